"""Checks whether a grammar can be followed. This runs in a separate process, because llguidance
does not limit the time, memory and stack that it uses, and only a process can be stopped."""

import os
import re
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from serve.core.grammar_limits import (
    CHECK_MEMORY_BYTES,
    CHECK_SECONDS,
    CHECK_STACK_BYTES,
    MAX_REFERENCES,
    MAX_RULES,
    PARSER_LIMITS,
)
from serve.core.helper_messages import CheckGrammar, GrammarChecked
from serve.front.text.helpers import answer_questions
from serve.hub.tiktoken_model import tokenizer_source

_POLL_SECONDS = 0.01
# A grammar is Lark text, or JSON that contains Lark text with escaped quotes and line ends.
_RULE = re.compile(r"(?:^|\n|\\n|\")[ \t]*[?!]?[A-Za-z_][\w.-]*(?:\[[^\]\n]*\])?[ \t]*:")
_REFERENCE = re.compile(r'\$(?:ref|dynamicRef|recursiveRef)\\?"\s*:\s*\\?"([^"]*)"')
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])", re.DOTALL)
# llguidance's word for a grammar that allows no first token.
_NO_TOKEN = "NoExtensionBias"
_QUOTED = re.compile(r'"(\w+)"')


def main(folder: str) -> None:
    """Answers questions until its standard input ends, or until a signal ends the process: SIGPROF
    for the time, SIGKILL for the memory, and others for a stack overflow or a failed allocation."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer(tokenizer_source(Path(folder)))
    threading.stack_size(CHECK_STACK_BYTES)
    # In a thread, because the main thread's stack depends on the system's limits.
    checking = ThreadPoolExecutor(1, "check")
    own_memory = psutil.Process().memory_info
    max_bytes = own_memory().rss + CHECK_MEMORY_BYTES

    def answer(question: CheckGrammar, _: bytes) -> GrammarChecked:
        checked = checking.submit(_checked, tokenizer, question.grammar)
        while not checked.done():
            wait([checked], _POLL_SECONDS)
            if own_memory().rss > max_bytes:
                os.kill(os.getpid(), signal.SIGKILL)
        return checked.result()

    answer_questions(CheckGrammar, answer, CHECK_SECONDS)


def _checked(tokenizer: LLTokenizer, grammar: str) -> GrammarChecked:
    if len(_RULE.findall(grammar)) > MAX_RULES:
        return GrammarChecked(f"it has more than {MAX_RULES} rules")
    if len(set(_REFERENCE.findall(grammar))) > MAX_REFERENCES:
        return GrammarChecked(f"it has references to more than {MAX_REFERENCES} definitions")
    limits = LLParserLimits(**PARSER_LIMITS)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    can_begin = not matcher.is_error() and any(matcher.compute_logit_bias())
    reason = matcher.get_error().partition("<state>")[0].strip()
    if reason == _NO_TOKEN or not (can_begin or reason):
        return GrammarChecked("no answer can follow it: its rules allow no text, or never end")
    if reason:
        return GrammarChecked(reason[:500])
    unenforced: set[str] = set()
    for warning in matcher.get_grammar_warnings():
        unenforced.update(_names(warning))
    return GrammarChecked(None, tuple(sorted(unenforced)))


def _names(warning: str) -> list[str]:
    """Returns the keywords named in a warning of llguidance."""
    if found := _UNIMPLEMENTED.fullmatch(warning):
        return _QUOTED.findall(found[1])
    if warning.startswith("Unknown format"):
        return ["format"]
    return [warning.split(maxsplit=1)[0]] if warning.strip() else []


if __name__ == "__main__":
    main(sys.argv[1])
