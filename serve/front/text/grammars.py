"""Grammars that an answer must follow, and the check that they can be followed.

Both are llguidance's. Rank 0's engine applies the grammar.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from serve.core.errors import BrigadeError, RequestError
from serve.core.grammar_limits import CHECK_SECONDS, MAX_GRAMMAR_CHARACTERS
from serve.front.text import grammar_check
from serve.front.text.schemas import GUIDANCE, Schema, closed, closed_text, expressible_text

# About 150 bytes each. A client cannot check this many before others reuse theirs.
_MAX_KNOWN = 4096
# How a grammar can end the process that checks it.
_REASONS = {
    -signal.SIGPROF: f"it takes more than {CHECK_SECONDS:g} s to prepare",
    -signal.SIGKILL: "it takes too much memory to prepare",
    -signal.SIGABRT: "it takes too much memory to prepare",
    -signal.SIGSEGV: "it is nested too deeply",
    -signal.SIGBUS: "it is nested too deeply",
    -signal.SIGILL: "it cannot be prepared",
    -signal.SIGTRAP: "it cannot be prepared",
}
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_MAX_REASON_CHARACTERS = 500
# Translating GBNF takes time that is quadratic in its rules.
_MAX_GBNF_RULES = 500
_MAX_GBNF_CHARACTERS = 64 << 10


def of_schema(schema: dict[str, Any] | str, param: str = "structured_outputs") -> str:
    """The grammar of JSON by a schema whose objects are closed. Raises RequestError for the field
    param if the schema is nested too deeply, or is a text that is not a JSON object."""
    text = closed_text(schema) if isinstance(schema, str) else json.dumps(closed(schema))
    return _of_schema_text(text, param)


def of_tool_schema(schema: Schema) -> str:
    """The same for a schema made of tools' schemas. What a grammar cannot express of them is left
    out."""
    return _of_schema_text(expressible_text(schema), "tools")


def _of_schema_text(text: str, param: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=GUIDANCE)
    except ValueError as error:
        reason = f"is not a JSON object: {error}"
        if "recursion limit" in str(error):
            reason = "is nested too deeply."
        raise RequestError(f"The schema {reason}", param=param) from error


def of_regex(pattern: str) -> str:
    """The grammar of texts that match the pattern as a whole."""
    return LLMatcher.grammar_from_regex(pattern)


def of_choice(texts: Sequence[str]) -> str:
    """The grammar that allows exactly these texts."""
    return of_regex("|".join(map(re.escape, texts)))


def of_grammar(text: str, param: str) -> str:
    """The grammar of a text in llguidance's variant of Lark, or in GBNF, which is translated.
    Raises RequestError for the field param if that is not possible."""
    if _GBNF_RULE.search(text):
        text = _lark_of_gbnf(text, param)
    return LLMatcher.grammar_from_lark(text)


def _lark_of_gbnf(text: str, param: str) -> str:
    num_rules = text.count("::=")
    if num_rules > _MAX_GBNF_RULES or len(text) > _MAX_GBNF_CHARACTERS:
        raise RequestError(
            f"The grammar has {num_rules} rules and {len(text)} characters. GBNF may have "
            f"{_MAX_GBNF_RULES} rules and {_MAX_GBNF_CHARACTERS} characters: write the grammar "
            "in Lark.",
            param=param,
        )
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except GbnfToLarkError as error:
        reason = str(error)
    except Exception as error:  # It raises nothing more special for a rule that is missing.
        reason = str(error)
    detail = reason[:_MAX_REASON_CHARACTERS]
    raise RequestError(
        "The grammar looks like GBNF and cannot be read:", detail=detail, param=param
    )


class Grammars:
    """Checks grammars for the model's tokenizer in other processes, and remembers the results.

    It is thread-safe: each thread that checks at the same time uses a process of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: list[subprocess.Popen[str]] = []
        weakref.finalize(self, _end, self._idle)  # also when this process ends
        self._findings: OrderedDict[bytes, grammar_check.Finding] = OrderedDict()
        self._lock = threading.Lock()

    def is_known(self, grammar: str) -> bool:
        """Whether `check` returns without asking a process."""
        return len(grammar) > MAX_GRAMMAR_CHARACTERS or _key(grammar) in self._findings

    def check(self, grammar: str, param: str) -> tuple[str, ...]:
        """Returns the keywords of schemas that the grammar does not hold. Raises RequestError if no
        answer can follow the grammar, if it is invalid, or if it takes too much memory or
        time."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            most = f"{MAX_GRAMMAR_CHARACTERS} are allowed"
            raise RequestError(f"The grammar has {len(grammar)} characters, {most}.", param=param)
        reason, unenforced = self._known(grammar)
        if reason:
            raise RequestError("The grammar cannot be followed:", detail=reason, param=param)
        return tuple(unenforced)

    def _known(self, grammar: str) -> grammar_check.Finding:
        key = _key(grammar)
        finding = self._findings.get(key)
        if finding is None:
            finding = self._finding(grammar)
        with self._lock:
            self._findings[key] = finding
            self._findings.move_to_end(key)
            if len(self._findings) > _MAX_KNOWN:
                self._findings.popitem(last=False)
        return finding

    def _finding(self, grammar: str) -> grammar_check.Finding:
        checker = self._checker()
        if answer := _ask(checker, grammar):
            self._idle.append(checker)
            reason, unenforced = json.loads(answer)
            return reason, unenforced
        code = checker.wait()
        _end([checker])
        if code in _REASONS:
            return f"{_REASONS[code]}: make it simpler", []
        raise BrigadeError(f"The check of grammars ended with {code}.")

    def _checker(self) -> "subprocess.Popen[str]":
        """An idle process. One that ended while it was idle was not ended by a grammar."""
        while self._idle:
            with suppress(IndexError):  # Another thread may take the last one.
                checker = self._idle.pop()
                if checker.poll() is None:
                    return checker
                _end([checker])
        return self._start()

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", grammar_check.__name__, str(self._folder)]
        pipe = subprocess.PIPE
        # In a session of its own: a terminal's SIGINT is for the server.
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()


def _ask(checker: "subprocess.Popen[str]", grammar: str) -> str:
    """The answer as a line of JSON; empty if the process has ended."""
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
