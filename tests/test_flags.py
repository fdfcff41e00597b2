"""Flags that may be repeated, and what is refused before anything starts."""

from pathlib import Path

import pytest

from serve.cli.flags import parse
from serve.cli.main import check
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


@pytest.mark.parametrize("root", ["nowhere", "file", "x" * 5000])
def test_an_adapter_root_that_is_no_folder(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").touch()
    model = Path(__file__).parents[1] / "examples" / "tiny-chat"
    words = ["--model", str(model), "--adapter-root"]
    with pytest.raises(UsageError, match="--adapter-root .* is no folder: make it on each host"):
        check([*words, str(tmp_path / root)], 2)
    assert check([*words, str(tmp_path)], 2)[0].adapter_root == tmp_path
