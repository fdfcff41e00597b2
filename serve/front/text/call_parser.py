"""Runs mlx-lm's parsers of tool calls in processes that can be stopped.

They read what a request can have a model write, and some take quadratic time. Run as a program
this is the process in which one of them works.
"""

import json
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serve.front.text.isolated import IsolatedProcess, ProcessEnded, answer_questions
from serve.front.text.tool_formats import tool_format

MAX_CHARACTERS = 256 << 10
MAX_SECONDS = 0.5  # of a core
# Even quadratic parsers read so much in a tenth of a second, and few real calls are longer.
MAX_SHORT_CHARACTERS = 2048

# For all models of this process: answers wait for a thread here, and for nobody else's work. Many
# long calls that end at the same time hold up no short ones.
_threads_of_short_calls = ThreadPoolExecutor(2, "short-calls")
_threads_of_long_calls = ThreadPoolExecutor(2, "long-calls")


def threads_for(num_characters: int) -> ThreadPoolExecutor:
    """The threads in which a call of this length is read, each with a process of its own."""
    if num_characters <= MAX_SHORT_CHARACTERS:
        return _threads_of_short_calls
    return _threads_of_long_calls


class CallParser:
    """The parser of this name, as ToolFormat.parse calls it. Raises ValueError of a call that is
    too long, takes too long or cannot be read: its text is content."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[IsolatedProcess] = []

    def __call__(self, text: str, tools: Any = None) -> Any:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"a call of {len(text)} characters, of which only {MAX_CHARACTERS} are allowed"
            )
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or IsolatedProcess(__name__, self._name)
        try:
            answer = process.ask(json.dumps([text, tools]).encode())
        except ProcessEnded as error:
            if error.code == -signal.SIGPROF:
                raise ValueError(f"a call that takes more than {MAX_SECONDS:g} s to read") from None
            raise ValueError(f"a call that ended its parser with {error.code}") from None
        with self._lock:
            self._idle.append(process)
        parsed = json.loads(answer)
        if "error" in parsed:
            raise ValueError(parsed["error"])
        return parsed["calls"]


def main(name: str) -> None:
    """Ends with its stdin, or by SIGPROF."""
    parse = tool_format(name).parse

    def answer(question: bytes) -> bytes:
        text, tools = json.loads(question)
        try:
            return json.dumps({"calls": parse(text, tools)}).encode()
        # A parser of mlx-lm reads what a model has written: it may raise anything.
        except Exception as error:
            return json.dumps({"error": f"{error!r:.200}"}).encode()

    answer_questions(answer, MAX_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
