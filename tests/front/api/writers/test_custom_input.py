"""The input of custom tools: the same however the arguments are cut."""

import json
from collections.abc import Iterator

import pytest

from serve.front.api.writers.custom_input import CustomInput

TEXT = 'a "quoted" \\ line\n\tünd 😀 \u2028 end'
WRITTEN = [
    json.dumps({"input": TEXT}),
    json.dumps({"input": TEXT}, ensure_ascii=False),
    json.dumps({"input": TEXT}, indent=1),
    json.dumps({"patch": TEXT}),
]


def given(parts: Iterator[str], is_raw: bool = False) -> tuple[str, list[str]]:
    """The whole input, and the pieces before the end."""
    reader = CustomInput(is_raw)
    pieces = [reader.feed(part) for part in parts]
    return "".join(pieces) + reader.finish(), pieces


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_the_input_of_a_custom_tool_does_not_depend_on_how_its_json_is_cut(
    written: str, size: int
) -> None:
    parts = (written[i : i + size] for i in range(0, len(written), size))
    assert given(parts)[0] == TEXT


def test_the_input_of_a_custom_tool_is_streamed_while_it_is_written() -> None:
    _, pieces = given(iter(['{"inp', 'ut": "ab', "cd", '"}']))
    assert pieces == ["", "ab", "cd", ""]


@pytest.mark.parametrize("written", ["", "no JSON", '{"a": 1}', '{"a": "x", "b": "y"}', "[1]"])
def test_arguments_in_another_form_are_returned_unchanged_as_input(written: str) -> None:
    assert given(iter(written))[0] == written


def test_input_that_was_cut_off_contains_only_complete_characters() -> None:
    assert given(iter('{"input": "abc\\ud83d'))[0] == "abc"


def test_an_answer_that_is_itself_the_input_is_returned_unchanged() -> None:
    assert given(iter('{"input": "a"}'), is_raw=True)[0] == '{"input": "a"}'
