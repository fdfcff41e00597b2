"""The grammar that an answer must follow: response_format and structured_outputs.

Grammars are llguidance's, so is the check whether one can be followed at all; rank 0's
engine follows it.
"""

import hashlib
import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from llguidance import LLMatcher
from pydantic import Field, model_validator

from serve.core.errors import BrigadeError, RequestError
from serve.core.grammar_limits import CHECK_SECONDS, MAX_GRAMMAR_CHARACTERS
from serve.front.api.messages import Body, refuse
from serve.front.text import grammar_check

# Some 150 bytes each: more than a client can check in the time in which others use theirs.
_MAX_KNOWN = 4096
# How the process that checks a grammar may end by what the grammar asks of it.
_REASONS = {
    -signal.SIGPROF: f"it takes more than {CHECK_SECONDS:g} s to prepare",
    -signal.SIGKILL: "it takes too much memory to prepare",
    -signal.SIGABRT: "it takes too much memory to prepare",
    -signal.SIGSEGV: "it is nested too deeply",
    -signal.SIGBUS: "it is nested too deeply",
    -signal.SIGILL: "it cannot be prepared",
    -signal.SIGTRAP: "it cannot be prepared",
}
# Else a model may write nothing but blanks.
_BLANKS = r"[ \n\t]{0,32}"


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            refuse("json_schema belongs to type json_schema, which needs it, and to no other")
        return self

    def grammar(self) -> str | None:
        if self.type == "text":
            return None
        return of_schema(self.json_schema.schema_ if self.json_schema else {"type": "object"})


class StructuredOutputs(Body):
    """vLLM's; exactly one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar_: str | None = Field(default=None, alias="grammar")
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        if len(self.model_fields_set - {n for n, v in self if v is None}) != 1:
            refuse("give exactly one of json, regex, choice, grammar and json_object")
        return self

    def grammar(self) -> str:
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, self.choice)))
        if self.grammar_ is not None:
            return LLMatcher.grammar_from_lark(self.grammar_)
        return of_schema({"type": "object"} if self.json_ is None else self.json_)


def of_schema(schema: dict[str, Any] | str) -> str:
    """Raises RequestError if the schema is text that is no JSON object."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _BLANKS})
    except ValueError as error:
        raise RequestError(
            f"The schema is not a JSON object: {error}", param="structured_outputs"
        ) from error


class Grammars:
    """What other processes said of the last grammars, with the model's tokenizer.

    Thread-safe: there is a process for each thread that asks at the same time.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"
        self._idle: list[subprocess.Popen[str]] = []
        weakref.finalize(self, _end, self._idle)  # also when this process ends
        self._objections: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def is_known(self, grammar: str) -> bool:
        """Whether to check it takes no time."""
        return len(grammar) > MAX_GRAMMAR_CHARACTERS or _key(grammar) in self._objections

    def check(self, grammar: str, param: str) -> None:
        """Raises RequestError if no answer can follow it, or it is too large, slow or wrong."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            most = f"{MAX_GRAMMAR_CHARACTERS} are allowed"
            raise RequestError(f"The grammar has {len(grammar)} characters, {most}.", param=param)
        if reason := self._known(grammar):
            raise RequestError("The grammar cannot be followed:", detail=reason, param=param)

    def _known(self, grammar: str) -> str:
        key = _key(grammar)
        reason = self._objections.get(key)
        if reason is None:
            reason = self._objection(grammar)
        with self._lock:
            self._objections[key] = reason
            self._objections.move_to_end(key)
            if len(self._objections) > _MAX_KNOWN:
                self._objections.popitem(last=False)
        return reason

    def _objection(self, grammar: str) -> str:
        checker = self._checker()
        if answer := _ask(checker, grammar):
            self._idle.append(checker)
            return str(json.loads(answer))
        code = checker.wait()
        _end([checker])
        if code in _REASONS:
            return f"{_REASONS[code]}: make it simpler"
        raise BrigadeError(f"The check of grammars ended with {code}.")

    def _checker(self) -> "subprocess.Popen[str]":
        """One that waits for work. What ends one while it has none is no grammar's doing."""
        while self._idle:
            with suppress(IndexError):  # Another thread may take the last one.
                checker = self._idle.pop()
                if checker.poll() is None:
                    return checker
                _end([checker])
        return self._start()

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", grammar_check.__name__, str(self._file)]
        pipe = subprocess.PIPE
        # In a session of its own: a terminal's SIGINT is for the server.
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()


def _ask(checker: "subprocess.Popen[str]", grammar: str) -> str:
    """Empty if it is gone."""
    assert checker.stdin
    assert checker.stdout
    with suppress(BrokenPipeError):
        checker.stdin.write(json.dumps(grammar) + "\n")
        checker.stdin.flush()
    return checker.stdout.readline()


def _end(checkers: "list[subprocess.Popen[str]]") -> None:
    for checker in checkers:
        checker.kill()
        checker.communicate()
