"""Parsers of tool calls in a process that is stopped when one takes too long."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.core.helper_messages import ParsedCall
from serve.front.text.call_parser import CallParser
from serve.front.text.dialects.mlx_lm import MAX_CHARACTERS, mlx_lm_dialect
from serve.front.text.tool_formats import parsed_calls, tool_format

CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
# Each time that the parser of gemma4 sees "call:" it reads on to the end.
SLOW = "call:a{" * 12_000


@pytest.fixture(scope="module")
def parser() -> CallParser:
    return CallParser("json_tools")


def test_parsing_in_a_process_gives_the_same_calls_as_the_parser_itself(parser: CallParser) -> None:
    assert parser(CALL) == parsed_calls(tool_format("json_tools").parse(CALL, None))
    assert parser(CALL) == (ParsedCall("weather", '{"city": "Köln"}'),)


def test_parsing_text_that_is_not_a_call_raises_value_error(parser: CallParser) -> None:
    with pytest.raises(ValueError, match="JSONDecodeError"):
        parser("no call")
    assert parser(CALL), "the process goes on"


def test_a_call_that_is_too_long_is_refused_while_it_is_written() -> None:
    calls = mlx_lm_dialect("json_tools", None).calls
    assert calls is not None
    with pytest.raises(ValueError, match="characters"):
        calls.reader([]).feed("[" * (MAX_CHARACTERS + 1))


def test_deeply_nested_json_in_a_call_is_refused(parser: CallParser) -> None:
    with pytest.raises(ValueError, match="RecursionError"):
        parser('{"name": "f", "arguments": ' + "[" * 100_000)


def test_a_parser_that_takes_too_long_is_stopped_and_other_parsers_continue() -> None:
    """This one took minutes, on a thread that everybody shares."""
    slow = CallParser("gemma4")
    with ThreadPoolExecutor(1) as threads:
        stopped = threads.submit(slow, SLOW)
        with pytest.raises(ValueError, match="takes more than 0.5 s"):
            stopped.result(60)
    with pytest.raises(ValueError, match="No function"):
        slow("nothing")
