"""Grammars from requests: what they accept, and what is refused in bounded time."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError

from serve.core.errors import BrigadeError, RequestError
from serve.core.grammar_limits import MAX_REFERENCES, MAX_RULES
from serve.front.api.sampling import SamplingBody
from serve.front.api.structured import ResponseFormat, StructuredOutputs
from serve.front.text import grammars as grammars_module
from serve.front.text.grammars import GrammarChecker, of_grammar, of_schema
from serve.front.text.helpers import Helpers
from tests.errors import fails

MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny-chat"
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
def test_each_type_of_response_format_is_enforced(
    tokenizer: LLTokenizer, body: Any, right: str, wrong: str
) -> None:
    grammar = ResponseFormat.model_validate(body).grammar()
    assert accepts(tokenizer, grammar, right)
    assert not accepts(tokenizer, grammar, wrong)


TAGS = {"triggers": ["<function="], "structures": [{"begin": "<function=f>", "schema": PERSON}]}
ADA = '{"name": "Ada", "age": 36}'


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ({"type": "json_object", "schema": PERSON}, ADA, '{"name": "Ada"}'),
        ({"type": "json_schema", "schema": PERSON}, ADA, '{"name": "Ada"}'),
        ({"type": "json_schema", "json_schema": {"schema": PERSON}}, ADA, "{}"),
        ({"type": "regex", "pattern": "a+b"}, "aab", "aa"),
        ({"type": "regex", "regex": "a+b"}, "aab", "aa"),
        ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, "yes", "maybe"),
        (
            {"type": "structural_tag", **TAGS},
            f"I call <function=f>{ADA} and wait",
            "I call <function=f>{} and wait",
        ),
        (
            {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f"],
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<f>",
                            "content": {"type": "json_schema", "json_schema": PERSON},
                            "end": "</f>",
                        }
                    ],
                },
            },
            f"<f>{ADA}</f>",
            f"<f>{ADA}",
        ),
    ],
)
def test_response_formats_in_the_form_of_other_servers_are_enforced(
    tokenizer: LLTokenizer, body: Any, right: str, wrong: str
) -> None:
    grammar = ResponseFormat.model_validate(body).grammar()
    assert accepts(tokenizer, grammar, right)
    assert not accepts(tokenizer, grammar, wrong)


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"json_schema": {"const": "42"}}, '"42"', '"43"'),
        ({"json_schema": '{"const": "42"}'}, '"42"', '"43"'),
        ({"grammar": 'root ::= "a"'}, "a", "b"),
        ({"ebnf": 'root ::= item item\nitem ::= [0-9] ","'}, "1,2,", "1,"),
        ({"regex": "[0-9]+"}, "12", "x"),
        ({"guided_json": PERSON}, ADA, "{}"),
        ({"guided_regex": "[0-9]+"}, "12", "x"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab", "a"),
    ],
)
def test_grammar_fields_of_other_servers_are_enforced(
    tokenizer: LLTokenizer, fields: Any, right: str, wrong: str
) -> None:
    body = SamplingBody.model_validate(fields)
    ((name, grammar),) = body.grammars().items()
    assert name in fields
    assert accepts(tokenizer, grammar, right)
    assert not accepts(tokenizer, grammar, wrong)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a',
        "root ::= missing",
        'other ::= "a"',
        "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
        "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(1000)),
    ],
    ids=["an open string", "a missing rule", "no root", "too deep", "many rules"],
)
def test_unreadable_gbnf_is_refused_with_the_name_of_its_field(text: str) -> None:
    body = SamplingBody.model_validate({"guided_grammar": text})
    with pytest.raises(RequestError) as caught:
        body.grammars()
    assert caught.value.param == "guided_grammar"


def test_the_format_for_plain_text_has_no_grammar() -> None:
    assert ResponseFormat(type="text").grammar() is None


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ({"json": PERSON}, '{"name": "Ada", "age": 36}', '{"age": 36}'),
        ({"json": json.dumps(PERSON)}, '{"name": "Ada", "age": 36}', '{"age": 36}'),
        ({"regex": "a+b"}, "aab", "aa"),
        ({"choice": ["yes", "no", "a.b"]}, "a.b", "acb"),
        ({"grammar": 'start: "x" "y"*'}, "xyy", "yx"),
        ({"grammar": 'root ::= "x" "y"*'}, "xyy", "yx"),
        ({"json_object": True}, "{}", "1"),
    ],
)
def test_each_kind_of_structured_output_is_enforced(
    tokenizer: LLTokenizer, body: Any, right: str, wrong: str
) -> None:
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
        {"regex": ""},
        {"grammar": ""},
        {"grammar": " \n"},
        {"unknown": 1},
    ],
)
def test_structured_outputs_must_have_exactly_one_field(body: Any) -> None:
    with pytest.raises(ValidationError):
        StructuredOutputs.model_validate(body)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "schema": {}, "json_schema": {"name": "a"}},
        {"type": "text", "json_schema": {"name": "a"}},
        {"type": "text", "schema": {}},
        {"type": "regex"},
        {"type": "regex", "pattern": ""},
        {"type": "grammar", "grammar": " "},
        {"type": "structural_tag", "triggers": ["<"]},
        {"type": "structural_tag", **TAGS, "triggers": ["<other"]},
        {"type": "structural_tag", **TAGS, "structures": [{"begin": "<function=f>"}]},
        {"type": "x"},
    ],
)
def test_a_response_format_must_have_the_fields_of_its_type(body: Any) -> None:
    with pytest.raises(ValidationError):
        ResponseFormat.model_validate(body)


def test_white_space_between_json_tokens_is_limited(tokenizer: LLTokenizer) -> None:
    assert accepts(tokenizer, of_schema(PERSON), '{\n  "name": "Ada",\n  "age": 36\n}')
    assert not accepts(tokenizer, of_schema(PERSON), '{"name":' + " " * 40 + '"Ada", "age": 36}')


HOPELESS: list[tuple[str, Any]] = [
    ("never", {"json": {"type": "array", "minItems": 2, "maxItems": 1}}),
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
def test_grammars_that_no_answer_can_follow_are_refused_quickly(body: Any) -> None:
    def check() -> None:
        grammar = StructuredOutputs.model_validate(body).grammar()
        GrammarChecker(MODEL).check(grammar, "structured_outputs")

    with pytest.raises(RequestError) as caught:
        check()
    assert caught.value.param == "structured_outputs"
    assert "site-packages" not in str(caught.value)
    assert "to prepare" not in str(caught.value), "found by waiting, not by limits"


@pytest.mark.parametrize(
    ("schema", "keywords", "right"),
    [
        (PERSON, (), ADA),
        (
            {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
            ("uniqueItems",),
            "[1]",
        ),
        (
            {**PERSON, "if": {"required": ["age"]}, "then": {"required": ["name"]}},
            ("if", "then"),
            ADA,
        ),
        ({"type": "integer", "not": {"const": 1}}, ("not",), "2"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf",), "2.5"),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, (), "2"),
        ({"type": "string", "format": "car-number"}, ("format",), '"a"'),
        ({"type": "string", "format": "uuid"}, (), f'"{"0" * 8}-0000-4000-8000-{"0" * 12}"'),
    ],
)
def test_checking_a_grammar_returns_the_keywords_that_it_does_not_enforce(
    tokenizer: LLTokenizer, schema: Any, keywords: tuple[str, ...], right: str
) -> None:
    grammar = of_schema(schema)
    assert GrammarChecker(MODEL).check(grammar, "response_format") == keywords
    assert accepts(tokenizer, grammar, right)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= root",
        "root ::= a\na ::= b\nb ::= a",
        "start: start",
        "start: /[^\\x00-\\U0010ffff]/",
    ],
)
def test_a_grammar_that_no_text_can_follow_is_refused_with_a_clear_error(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        GrammarChecker(MODEL).check(of_grammar(text, "grammar"), "grammar")
    assert "no answer can follow it" in str(caught.value)


def multiple_of(number: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": number}


SLOW: list[tuple[str, Any]] = [
    ("a large multiple", {"json": multiple_of(9_999_991)}),
    ("a common multiple", {"json": {"allOf": [multiple_of(9_973), multiple_of(9_967)]}}),
    ("inside of a grammar", {"grammar": f"start: %json {json.dumps(multiple_of(9_999_991))}"}),
]


@pytest.mark.parametrize("body", [body for _, body in SLOW], ids=[name for name, _ in SLOW])
def test_grammars_that_take_too_long_to_prepare_are_refused(body: Any) -> None:
    """No limit of llguidance's bounds these: each takes it many seconds, and megabytes. The clock
    is that of the processor: others may need it as well."""
    grammars = GrammarChecker(MODEL)
    with fails(
        RequestError, "grammar", match="it takes (more than 1 s|too much memory) to prepare"
    ):
        grammars.check(StructuredOutputs.model_validate(body).grammar(), "structured_outputs")
    grammars.check(of_schema(PERSON), "response_format")
    grammars.check(of_schema(multiple_of(101)), "response_format")


def checkers() -> set[int]:
    """Processes that check grammars for this one."""
    gc.collect()
    found: set[int] = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # It ends just now.
            if any("grammar_check" in word for word in child.cmdline()):
                found.add(child.pid)
    return found


def test_checking_a_grammar_leaves_no_process_behind_and_imports_no_mlx() -> None:
    before, grammars = checkers(), GrammarChecker(MODEL)
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


def start_checker(grammars: GrammarChecker) -> int:
    """The pid of the process that checks the next grammar."""
    before = checkers()
    grammars.check(of_schema(PERSON), "response_format")
    (checker,) = checkers() - before
    return checker


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGBUS])
def test_a_grammar_whose_check_a_signal_ends_is_refused(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(
        helpers: Helpers[Any],
        process: "subprocess.Popen[bytes]",
        question: bytes,
        data: tuple[bytes, ...],
    ) -> bytes | None:
        os.kill(process.pid, number)
        return real_answer(helpers, process, question, data)

    grammars, real_answer = GrammarChecker(MODEL), Helpers._answer
    with monkeypatch.context() as dying:
        dying.setattr(Helpers, "_answer", answer)
        with fails(RequestError, "grammar") as caught:
            grammars.check(of_schema(multiple_of(2)), "response_format")
    assert (caught.value.http_status, caught.value.param) == (400, "response_format")
    grammars.check(of_schema(multiple_of(3)), "response_format")


def test_a_checking_process_that_was_killed_while_idle_is_replaced() -> None:
    grammars = GrammarChecker(MODEL)
    checker = start_checker(grammars)
    os.kill(checker, signal.SIGKILL)
    os.waitid(os.P_PID, checker, os.WEXITED | os.WNOWAIT)
    grammars.check(of_schema(multiple_of(2)), "response_format")


def test_a_checking_process_that_cannot_start_is_an_internal_error(tmp_path: Path) -> None:
    with pytest.raises(BrigadeError) as caught:
        GrammarChecker(tmp_path).check(of_schema(PERSON), "response_format")
    assert caught.value.http_status == 500


def chain_of_rules(length: int) -> str:
    rules = [f'r{n}: "a" r{n + 1}' for n in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "b"'])


def chain_of_terminals(length: int) -> str:
    terminals = [f'T{n}: "a" T{n + 1}' for n in range(length)]
    return "\n".join(["start: T0", *terminals, f'T{length}: "b"'])


def chain_of_definitions(length: int) -> str:
    definitions: dict[str, Any] = {
        f"d{n}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}},
            "required": ["a"],
        }
        for n in range(length)
    }
    definitions[f"d{length}"] = {"type": "string"}
    return of_schema({"$ref": "#/$defs/d0", "$defs": definitions})


DEEP = {
    "rules": (chain_of_rules, MAX_RULES),
    "terminals": (chain_of_terminals, MAX_RULES),
    "definitions": (chain_of_definitions, MAX_REFERENCES),
}


@pytest.mark.parametrize("kind", DEEP)
def test_grammars_with_too_long_chains_of_rules_are_refused(kind: str) -> None:
    chain, max_length = DEEP[kind]
    grammars = GrammarChecker(MODEL)
    checker = start_checker(grammars)
    grammars.check(chain(max_length - 2), "structured_outputs")
    with fails(RequestError, "grammar", match=f"{max_length} "):
        grammars.check(chain(max_length + 1), "structured_outputs")
    assert checker in checkers(), "no process had to end for it"


STACK_PROGRAM = """
import resource, sys
from pathlib import Path
from serve.core.errors import RequestError
from serve.core.grammar_limits import MAX_REFERENCES, MAX_RULES
from serve.front.text.grammars import GrammarChecker
limit, grammar = int(sys.argv[1]), Path(sys.argv[2]).read_text()
_, hard_limit = resource.getrlimit(resource.RLIMIT_STACK)
resource.setrlimit(resource.RLIMIT_STACK, (limit, hard_limit))
try:
    GrammarChecker(Path(sys.argv[3])).check(grammar, "x")
    print("accepted")
except RequestError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [2 << 20, 8 << 20, resource.RLIM_INFINITY])
def test_checking_a_grammar_uses_the_same_stack_whatever_the_systems_limit(
    tmp_path: Path, limit: int
) -> None:
    """Overflowing it is the grammar's fault. In the main thread it depended on the limit."""
    if limit > resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the system does not allow this limit")
    answers = []
    for number, grammar in enumerate((chain_of_rules(3900), chain_of_definitions(990))):
        path = tmp_path / f"{number}.txt"
        path.write_text(grammar)
        command = [sys.executable, "-c", STACK_PROGRAM, str(limit), str(path), str(MODEL)]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
        answers.append(completed.stdout.strip() or completed.stderr)
    assert answers == ["accepted", "accepted"]


def test_the_checking_process_ends_with_its_server() -> None:
    """Also with one that is killed."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from serve.front.text.grammars import *\n"
        "grammars = GrammarChecker(Path(sys.argv[1])); grammars.check(of_schema({}), 'x')\n"
        "print(grammars._helpers._idle[0].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program, str(MODEL)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(int(completed.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_same_grammar_is_checked_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "_MAX_KNOWN", 20)
    grammars = GrammarChecker(MODEL)
    asked = Mock(wraps=grammars._helpers.call)
    monkeypatch.setattr(grammars._helpers, "call", asked)
    written = [StructuredOutputs(regex=f"a{{{n + 1}}}").grammar() for n in range(30)]
    for grammar in written:
        assert not grammars.is_known(grammar)
        grammars.check(grammar, "structured_outputs")
        assert grammars.is_known(grammar)
        grammars.check(written[0], "structured_outputs")
    assert asked.call_count == 30
    assert grammars.is_known(written[0]), "one that is used is kept"
    assert [grammars.is_known(grammar) for grammar in written[1:]].count(True) == 19


def test_a_slow_check_of_a_grammar_does_not_delay_another_check() -> None:
    grammars, before = GrammarChecker(MODEL), checkers()
    grammars.check(of_schema(PERSON), "response_format")
    (checker,) = checkers() - before
    os.kill(checker, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(grammars.check, of_schema(multiple_of(2)), "response_format")
        while grammars._helpers._idle:
            time.sleep(0.01)
        with fails(RequestError, "grammar", match="nil"):
            grammars.check(of_schema({"type": "nil"}), "response_format")
        assert not held.done()
        os.kill(checker, signal.SIGCONT)
        held.result(60)
    assert len(checkers() - before) == 2
