"""Log lines: one for a request, whatever a client puts into it."""

import re

import pytest

from serve.core.errors import RequestError
from serve.front.http.record import Record, request_id

EVIL = "/v1\nstatus=200 path=x\r\x1b[31m\u2028 \x85"


def test_a_line_has_what_is_known() -> None:
    record = Record("abc", "POST", "/v1/chat/completions", status=200, prompt_tokens=3)
    record.ttft_seconds = 0.25
    assert re.fullmatch(
        r"request=abc method=POST path=/v1/chat/completions status=200 prompt_tokens=3 "
        r"ttft_seconds=0.25 total_seconds=[\d.e-]+",
        record.line(),
    )


def test_a_path_begins_no_line_and_forges_no_field() -> None:
    line = Record("abc", "GET", EVIL, status=404).line()
    assert line.isascii()
    assert line.isprintable()
    assert "\\n" in line
    unquoted = re.sub(r'"[^"]*"', '""', line)
    assert re.findall(r"(\w+)=", unquoted).count("status") == 1


def test_a_quote_in_a_path_stays_inside() -> None:
    assert 'path="/\\" status=200"' in Record("abc", "GET", '/" status=200', status=404).line()


def test_a_long_path_is_cut() -> None:
    assert len(Record("abc", "GET", "/" + "x" * 9000).line()) < 400


def test_a_harmless_request_id_is_kept() -> None:
    assert request_id([(b"x-request-id", b"a-1:b.c")]) == "a-1:b.c"


@pytest.mark.parametrize("value", [b"", b"a b", b"a\nb", b"x" * 129, b"\xff", b'"', b".", b".."])
def test_other_request_ids_are_replaced(value: bytes) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", request_id([(b"x-request-id", value)]))


@pytest.mark.parametrize("mark", ["'", '"'])
@pytest.mark.parametrize("unit", ["\\x00", "\\", "\\'", '\\"', "a"])
def test_a_reason_with_a_quotation_that_does_not_end_is_soon_written(mark: str, unit: str) -> None:
    """Each backslash once matched in two ways: the search took two to the power of their number."""
    record = Record("r", "GET", "/")
    record.fail(RequestError(f"illegal request line: {mark}{unit * 2000}"))
    assert record.reason is not None
    assert record.reason.startswith("illegal request line: ")
    assert len(record.reason) <= 300


@pytest.mark.parametrize("escaped", ["\\n", "\\'", "\\\\", "b"])
def test_a_long_quotation_is_cut_at_a_whole_character(escaped: str) -> None:
    record = Record("r", "GET", "/")
    record.fail(RequestError(f"Unknown name '{escaped * 100}'. Give another."))
    assert record.reason == f"Unknown name '{escaped * 40}...'. Give another."


def test_record_does_not_cut_text_between_apostrophes() -> None:
    text = "'x y' cannot be an adapter's name: use letters, digits and . _ : @ -, not the model's."
    record = Record("r", "GET", "/")
    record.fail(RequestError(text))
    assert record.reason == text
