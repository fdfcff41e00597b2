"""Grammars that an answer must follow, and the check that they can be followed.

Grammars and the check are those of llguidance. Rank 0's engine applies the grammars.
"""

import hashlib
import re
import signal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from serve.core.errors import BrigadeError, RequestError
from serve.core.grammar_limits import CHECK_SECONDS, MAX_GRAMMAR_CHARACTERS
from serve.core.helper_messages import CheckGrammar, GrammarChecked
from serve.front.text import grammar_check
from serve.front.text.helpers import HelperEnded, Helpers
from serve.front.text.schemas import GUIDANCE, Schema, closed_text, expressible_text

# The number of cached results, of about 150 bytes each: more than one client can displace.
_MAX_KNOWN = 4096
# The reasons why a grammar ended its helper process, by the exit code.
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
# The time to translate GBNF is quadratic in the number of rules.
_MAX_GBNF_RULES = 500
_MAX_GBNF_CHARACTERS = 64 << 10


def of_schema(schema: Schema | str, param: str = "structured_outputs") -> str:
    """Returns the grammar of JSON that follows a schema, with closed objects. Raises RequestError
    for the field param if the schema is nested too deeply, or is a text that is not a JSON
    object."""
    return _of_schema_text(closed_text(schema), param)


def of_tool_schema(schema: Schema) -> str:
    """Returns the grammar of JSON by tools' schemas, as far as a grammar can express them."""
    return _of_schema_text(expressible_text(schema), "tools")


def _of_schema_text(text: str, param: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=GUIDANCE)
    except ValueError as error:
        reason = f"is not a JSON object: {error}"
        if "recursion limit" in str(error):
            reason = "is nested too deeply."
        raise RequestError(
            f"The schema {reason}", param=param, code="unsupported_schema"
        ) from error


def of_regex(pattern: str) -> str:
    """Returns the grammar of texts that match the pattern as a whole."""
    return LLMatcher.grammar_from_regex(pattern)


def of_choice(texts: Sequence[str]) -> str:
    """Returns the grammar that allows exactly these texts."""
    return of_regex("|".join(map(re.escape, texts)))


def of_grammar(text: str, param: str) -> str:
    """Returns the grammar of llguidance's Lark, or of GBNF. Raises RequestError for param."""
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
            code="grammar",
        )
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except GbnfToLarkError as error:
        reason = str(error)
    except Exception as error:  # raised for a missing rule
        reason = str(error)
    raise RequestError(
        f"The grammar looks like GBNF and cannot be read: {reason[:_MAX_REASON_CHARACTERS]}",
        param=param,
        code="grammar",
    )


class GrammarChecker:
    """Checks grammars for the model's tokenizer, and caches the results. It is thread-safe: each
    thread that checks at the same time uses a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._helpers: Helpers[GrammarChecked]
        self._helpers = Helpers(GrammarChecked, grammar_check.__name__, str(folder))
        self._known: OrderedDict[bytes, GrammarChecked] = OrderedDict()
        self._lock = threading.Lock()

    def is_known(self, grammar: str) -> bool:
        """Whether `check` returns without a helper process."""
        return len(grammar) > MAX_GRAMMAR_CHARACTERS or _key(grammar) in self._known

    def check(self, grammar: str, param: str | None) -> tuple[str, ...]:
        """Returns the keywords of schemas that the grammar does not enforce. Raises RequestError if
        it is invalid, cannot be followed, or takes too much time or memory."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"The grammar has {len(grammar)} characters, but only "
                f"{MAX_GRAMMAR_CHARACTERS} are allowed.",
                param=param,
                code="grammar",
            )
        checked = self._checked(grammar)
        if checked.reason is not None:
            raise RequestError(
                f"The grammar cannot be followed: {checked.reason}", param=param, code="grammar"
            )
        return checked.unenforced

    def _checked(self, grammar: str) -> GrammarChecked:
        key = _key(grammar)
        checked = self._known.get(key)
        if checked is None:
            checked = self._check_in_helper(grammar)
        with self._lock:
            self._known[key] = checked
            self._known.move_to_end(key)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return checked

    def _check_in_helper(self, grammar: str) -> GrammarChecked:
        try:
            return self._helpers.call(CheckGrammar(grammar))
        except HelperEnded as error:
            if error.code in _REASONS:
                return GrammarChecked(f"{_REASONS[error.code]}: make it simpler")
            raise BrigadeError(f"The check of grammars ended with {error.code}.") from None


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
