"""Log lines: one for a request, and nothing in it is a client's text."""

import re

import pytest

from serve.core.errors import NotFoundError, OverflowedError, RequestError, UnavailableError
from serve.front.http.record import AccessRecord, request_id, trace_of

FIELDS = frozenset({"messages", "content", "tools", "lora_name"})


def test_a_line_of_the_log_contains_the_known_values() -> None:
    record = AccessRecord("abc", "POST", "/v1/chat/completions", status=200, prompt_tokens=3)
    record.ttft_seconds = 0.25
    assert re.fullmatch(
        r"request=abc method=POST path=/v1/chat/completions status=200 prompt_tokens=3 "
        r"ttft_seconds=0.25 total_seconds=[\d.e-]+",
        record.line(),
    )


def test_an_adapter_name_cannot_start_a_line_or_forge_a_field() -> None:
    line = AccessRecord(
        "abc", "GET", adapter='a" b\nstatus=200\r\x1b[31m\u2028 \x85', status=404
    ).line()
    assert line.isascii()
    assert line.isprintable()
    unquoted = re.sub(r'"(\\.|[^"])*"', '""', line)
    assert re.findall(r"(\w+)=", unquoted).count("status") == 1


@pytest.mark.parametrize("value", [b"0f8e6a1c-77aa-4b5e-9a51-2f0b0c9d1e2f", b"req_1", b"a-1:b.c"])
def test_a_request_id_that_is_a_plain_word_is_kept(value: bytes) -> None:
    assert request_id([(b"x-request-id", value)]) == value.decode()


@pytest.mark.parametrize(
    "value",
    [b"", b"1 2", b"1\n2", b"1\n", b"1" * 129, b"\xff", b'"', b".", b".."],
)
def test_a_request_id_that_is_not_a_plain_word_is_replaced(value: bytes) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", request_id([(b"x-request-id", value)]))


@pytest.mark.parametrize(
    ("param", "shown"),
    [
        ("messages", "messages"),
        ("messages[3].content", "messages.*.content"),
        ("messages.3.content", "messages.*.content"),
        ("tools[0].secret key", "tools.*.*"),
        ("secret", "*"),
        ("secret.content", "*.content"),
        ("Messages", "*"),
    ],
)
def test_the_log_of_a_refusal_names_only_fields_that_the_server_knows(
    param: str, shown: str
) -> None:
    record = AccessRecord("r", "POST", field_names=FIELDS)
    record.fail(RequestError("The text 'secret' is wrong.", param=param))
    assert record.param == shown
    assert "secret" not in record.line()
    assert "secret" not in record.failure()


def test_the_log_of_a_refusal_contains_its_code_but_not_its_message() -> None:
    record = AccessRecord("r", "POST", status=404, field_names=FIELDS)
    record.fail(NotFoundError("No adapter secret.", param="lora_name", code="model_not_found"))
    assert record.line().endswith(" code=model_not_found param=lora_name")
    assert record.failure() == "status=404 code=model_not_found param=lora_name"


def test_the_log_gives_the_reason_of_unavailability_and_the_code_of_other_errors() -> None:
    record = AccessRecord("r", "POST", status=503)
    record.fail(UnavailableError("Rank 1 is gone."))
    assert record.line().endswith(' reason="Rank 1 is gone."')
    record = AccessRecord("r", "POST", status=500)
    record.fail(OverflowedError(3, None))
    assert record.failure() == "status=500 code=numbers_overflowed"


def test_a_logged_traceback_contains_places_and_types_but_no_message() -> None:
    def first() -> None:
        raise KeyError("secret")

    def second() -> None:
        try:
            first()
        except KeyError as error:
            raise ValueError("another secret") from error

    with pytest.raises(ValueError, match="another") as raised:
        second()
    trace = trace_of(raised.value)
    assert "ValueError in " in trace
    assert "; after KeyError in " in trace
    assert re.search(r"test_record\.py:\d+ second", trace)
    assert re.search(r"test_record\.py:\d+ first", trace)
    assert "secret" not in trace
    assert "\n" not in trace
