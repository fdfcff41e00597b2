"""Runs mlx-lm's parsers of tool calls in processes that can be stopped.

Parsers read text that a client can make a model write, and some take quadratic time. Run as a
program, this module is the process in which a parser works.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec

from serve.core.helper_messages import CallsParsed, CallUnreadable, ParseCall, ParsedCall
from serve.front.text.calls.parts import Tools
from serve.front.text.helpers import HelperEnded, Helpers, answer_questions
from serve.front.text.tool_formats import parsed_calls, tool_format

MAX_SECONDS = 0.5  # the CPU time for one text
# Even quadratic parsers read a call of this length in a tenth of a second. Few calls are longer.
MAX_SHORT_CHARACTERS = 2048

# Threads that all models of this process share, for parsing only. Many long calls that end at the
# same time do not delay short ones.
_threads_of_short_calls = ThreadPoolExecutor(2, "short-calls")
_threads_of_long_calls = ThreadPoolExecutor(2, "long-calls")


def threads_for(num_characters: int) -> ThreadPoolExecutor:
    """Returns the threads, each with its own process, in which a call of this length is read."""
    if num_characters <= MAX_SHORT_CHARACTERS:
        return _threads_of_short_calls
    return _threads_of_long_calls


class CallParser:
    """mlx-lm's parser of this name, in a process of its own for each thread that calls it."""

    def __init__(self, name: str) -> None:
        self._helpers: Helpers[CallsParsed | CallUnreadable]
        self._helpers = Helpers(CallsParsed | CallUnreadable, __name__, name)

    def __call__(self, text: str, tools: Tools = ()) -> tuple[ParsedCall, ...]:
        """Returns the calls in a text. tools are the declared tools as OpenAI's JSON. Raises
        ValueError if the text takes too long or cannot be read: then the text is content."""
        declared = msgspec.json.encode(tools).decode()
        try:
            answer = self._helpers.call(ParseCall(text, declared))
        except HelperEnded as error:
            if error.is_overrun:
                raise ValueError(f"a call that takes more than {MAX_SECONDS:g} s to read") from None
            raise ValueError(f"a call that ended its parser with {error.code}") from None
        match answer:
            case CallsParsed(calls):
                return calls
            case CallUnreadable(reason):
                raise ValueError(reason)


# --- in the process


def main(name: str) -> None:
    """Answers questions until its standard input ends, or until SIGPROF ends the process."""
    parse = tool_format(name).parse

    def answer(question: ParseCall, _: bytes) -> CallsParsed | CallUnreadable:
        try:
            tools = msgspec.json.decode(question.tools)
            return CallsParsed(parsed_calls(parse(question.text, tools)))
        # A parser of mlx-lm reads what a model has written: it may raise anything.
        except Exception as error:
            return CallUnreadable(f"{error!r:.200}")

    answer_questions(ParseCall, answer, MAX_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
