"""Flags that may be repeated, and keys that --help does not show."""

import pytest

from serve.cli.flags import parse
from serve.core.config import ServeConfig
from serve.core.errors import UsageError


def serve(*words: str) -> ServeConfig:
    return parse(ServeConfig, ["--model", "m", *words], "serve", "")


def test_a_flag_may_be_repeated_or_left_out() -> None:
    assert serve().api_key == ()
    assert serve("--api-key", "a").api_key == ("a",)
    assert serve("--api-key", "a", "--api-key", "b").api_key == ("a", "b")
    assert serve().api_key == (), "one command's keys are not another's"


@pytest.mark.parametrize("words", [("--max-connections", "0"), ("--header-timeout", "nan")])
def test_limits_that_are_none_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=words[0]):
        serve(*words)
