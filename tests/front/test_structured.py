"""Grammars from requests: what they accept, and what is refused in bounded time."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError

from serve.core.errors import BrigadeError, RequestError
from serve.front.text.grammars import Grammars, ResponseFormat, StructuredOutputs, of_schema

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-chat"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(MODEL / "tokenizer.json"))


def accepts(tokenizer: LLTokenizer, grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ({"type": "json_object"}, '{"a": [1, 2]}', "[1]"),
        (
            {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
            '{"name": "Ada", "age": 36}',
            '{"name": "Ada"}',
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "any", "strict": True}},
            "[1]",
            "one",
        ),
    ],
)
def test_response_formats(tokenizer: LLTokenizer, body: Any, right: str, wrong: str) -> None:
    grammar = ResponseFormat.model_validate(body).grammar()
    assert accepts(tokenizer, grammar, right)
    assert not accepts(tokenizer, grammar, wrong)


def test_plain_text_has_no_grammar() -> None:
    assert ResponseFormat(type="text").grammar() is None


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ({"json": PERSON}, '{"name": "Ada", "age": 36}', '{"age": 36}'),
        ({"json": json.dumps(PERSON)}, '{"name": "Ada", "age": 36}', '{"age": 36}'),
        ({"regex": "a+b"}, "aab", "aa"),
        ({"choice": ["yes", "no", "a.b"]}, "a.b", "acb"),
        ({"grammar": 'start: "x" "y"*'}, "xyy", "yx"),
        ({"json_object": True}, "{}", "1"),
    ],
)
def test_structured_outputs(tokenizer: LLTokenizer, body: Any, right: str, wrong: str) -> None:
    grammar = StructuredOutputs.model_validate(body).grammar()
    assert accepts(tokenizer, grammar, right)
    assert not accepts(tokenizer, grammar, wrong)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"json_object": False},
        {"regex": 5},
        {"unknown": 1},
    ],
)
def test_structured_outputs_are_exactly_one(body: Any) -> None:
    with pytest.raises(ValidationError):
        StructuredOutputs.model_validate(body)


@pytest.mark.parametrize(
    "body", [{"type": "json_schema"}, {"type": "text", "json_schema": {"name": "a"}}, {"type": "x"}]
)
def test_a_response_format_has_what_its_type_needs(body: Any) -> None:
    with pytest.raises(ValidationError):
        ResponseFormat.model_validate(body)


def test_blanks_between_json_are_bounded(tokenizer: LLTokenizer) -> None:
    assert accepts(tokenizer, of_schema(PERSON), '{\n  "name": "Ada",\n  "age": 36\n}')
    assert not accepts(tokenizer, of_schema(PERSON), '{"name":' + " " * 40 + '"Ada", "age": 36}')


HOPELESS: list[tuple[str, Any]] = [
    ("never", {"json": {"not": {}}}),
    ("an unknown type", {"json": {"type": "strin"}}),
    ("a reference to elsewhere", {"json": {"$ref": "http://127.0.0.1:9/schema"}}),
    ("a reference to itself", {"json": {"$ref": "#"}}),
    ("two types at once", {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}),
    ("text that is no JSON", {"json": "{"}),
    ("JSON that is no object", {"json": "true"}),
    ("too deep", {"json": '{"items":' * 400 + "{}" + "}" * 400}),
    ("an open bracket", {"regex": "(((("}),
    ("looking ahead", {"regex": "(?=a)b"}),
    ("a grammar of itself", {"grammar": "start: start"}),
    ("no grammar", {"grammar": "nothing"}),
    ("too long", {"regex": "a" * (300 << 10)}),
]


@pytest.mark.parametrize("body", [body for _, body in HOPELESS], ids=[name for name, _ in HOPELESS])
def test_what_no_answer_can_follow_is_refused_soon(body: Any) -> None:
    def check() -> None:
        grammar = StructuredOutputs.model_validate(body).grammar()
        Grammars(MODEL).check(grammar, "structured_outputs")

    started = time.monotonic()
    with pytest.raises(RequestError) as caught:
        check()
    assert caught.value.param == "structured_outputs"
    assert "site-packages" not in str(caught.value)
    assert time.monotonic() - started < 20, "hopeless grammars are found by limits, not by waiting"


def multiple_of(number: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": number}


SLOW: list[tuple[str, Any]] = [
    ("a large multiple", {"json": multiple_of(9_999_991)}),
    ("a common multiple", {"json": {"allOf": [multiple_of(9_973), multiple_of(9_967)]}}),
    ("inside of a grammar", {"grammar": f"start: %json {json.dumps(multiple_of(9_999_991))}"}),
]


@pytest.mark.parametrize("body", [body for _, body in SLOW], ids=[name for name, _ in SLOW])
def test_what_is_slow_to_prepare_is_refused_and_others_are_not(body: Any) -> None:
    """No limit of llguidance's bounds these: each takes it many seconds, and megabytes."""
    grammars = Grammars(MODEL)
    started = time.monotonic()
    with pytest.raises(RequestError, match="cannot be followed: .* simpler"):
        grammars.check(StructuredOutputs.model_validate(body).grammar(), "structured_outputs")
    assert time.monotonic() - started < 10, "a second of a core, which others may need as well"
    grammars.check(of_schema(PERSON), "response_format")
    grammars.check(of_schema(multiple_of(101)), "response_format")


def checkers() -> set[int]:
    """Processes that check grammars for this one."""
    gc.collect()
    told = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    ).stdout
    return {int(line.split()[0]) for line in told.splitlines() if "grammar_check" in line}


def test_a_check_leaves_no_process_behind_and_brings_no_mlx() -> None:
    before, grammars = checkers(), Grammars(MODEL)
    grammars.check(of_schema(PERSON), "response_format")
    (checker,) = checkers() - before
    maps = Path(f"/proc/{checker}/maps")
    assert not maps.exists() or "libmlx" not in maps.read_text()
    with pytest.raises(RequestError):
        grammars.check(of_schema(multiple_of(9_999_991)), "response_format")
    assert checkers() == before, "it was stopped"
    grammars.check(of_schema(multiple_of(3)), "response_format")
    del grammars
    assert checkers() == before


def test_a_check_that_breaks_is_the_end_of_its_request_alone() -> None:
    grammars = Grammars(MODEL)
    before = checkers()
    grammars.check(of_schema(PERSON), "response_format")
    (checker,) = checkers() - before
    os.kill(checker, signal.SIGKILL)
    with pytest.raises(BrigadeError, match="ended with -9") as told:
        grammars.check(of_schema(multiple_of(2)), "response_format")
    assert told.value.http_status == 500
    grammars.check(of_schema(multiple_of(2)), "response_format")


def test_it_ends_with_its_server() -> None:
    """Also with one that is killed."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from serve.front.text.grammars import *\n"
        "grammars = Grammars(Path(sys.argv[1])); grammars.check(of_schema({}), 'x')\n"
        "print(grammars._idle[0].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program, str(MODEL)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(told.stdout)}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_can_be_followed_is_checked_once() -> None:
    grammars = Grammars(MODEL)
    for n in range(300):
        grammars.check(StructuredOutputs(regex=f"a{{{n + 1}}}").grammar(), "structured_outputs")
    told = grammars.objection.cache_info()
    assert (told.misses, told.currsize) == (300, 256)
    grammars.check(StructuredOutputs(regex="a{300}").grammar(), "structured_outputs")
    assert grammars.objection.cache_info().hits == 1


def test_one_that_is_checked_holds_up_no_other() -> None:
    grammars, before = Grammars(MODEL), checkers()
    grammars.check(of_schema(PERSON), "response_format")
    (checker,) = checkers() - before
    os.kill(checker, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(grammars.check, of_schema(multiple_of(2)), "response_format")
        while grammars._idle:
            time.sleep(0.01)
        with pytest.raises(RequestError, match="nil"):
            grammars.check(of_schema({"type": "nil"}), "response_format")
        assert not held.done()
        os.kill(checker, signal.SIGCONT)
        held.result(20)
    assert len(checkers() - before) == 2
