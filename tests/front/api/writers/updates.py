"""Updates for the tests of writers, as an answer would make them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs

from serve.core.types import Score
from serve.front.output.deltas import (
    AnswerBegin,
    AnswerEnd,
    CallBegin,
    CallEnd,
    CallText,
    Delta,
    Reason,
    Text,
    Thought,
    TokenUsage,
    Update,
)


class EchoedLogprobs(Logprobs):
    """OpenAI's type leaves out that the first token of a prompt has no score."""

    token_logprobs: Any
    top_logprobs: Any


class ChunkChoice(CompletionChoice):
    """OpenAI's type says that there is always a reason, but only the last chunk has one."""

    finish_reason: Any
    logprobs: EchoedLogprobs | None


class CompletionChunk(Completion):
    choices: list[ChunkChoice]  # type: ignore[assignment]


FIRST = TokenUsage(prompt_tokens=7, completion_tokens=1, cached_tokens=3)
LAST = TokenUsage(
    prompt_tokens=7,
    completion_tokens=5,
    cached_tokens=3,
    reasoning_tokens=2,
    of_parts={"repeated_tokens": 3},
)


def begin(*more: Delta, number: int = 0) -> Update:
    return Update(number, (AnswerBegin(FIRST), *more))


def update(*deltas: Delta, number: int = 0) -> Update:
    return Update(number, deltas)


def end(reason: Reason = "stop", stop: str | int | None = None, number: int = 0) -> Update:
    return Update(number, (AnswerEnd(reason, stop, LAST),))


def call(name: str, arguments: str) -> tuple[Delta, ...]:
    """A call that came at once."""
    return CallBegin(f"call_{name}", name), CallText(arguments), CallEnd()


# Reasoning, text, a call that is written piece by piece, and one that comes at once.
ORDER = [
    begin(),
    update(Thought("Hm")),
    update(Text("a")),
    update(Text("b")),
    update(CallBegin("call_add", "add"), CallText('{"x"')),
    update(CallText(":1}"), CallEnd()),
    update(*call("sub", "{}")),
    end("tool_calls"),
]


def scored(updates: Sequence[Update]) -> Iterator[Update]:
    """The same updates, each with a token of its own and its score."""
    for token, each in enumerate(updates):
        yield dataclasses.replace(each, tokens=(token,), scores=(Score(token, -1.5, ()),))
