"""What every API's writer does: it turns the updates of a request's answers into JSON events."""

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypedDict

from serve import __version__
from serve.core.errors import BrigadeError
from serve.front.http.replies import usage
from serve.front.http.schemas import Usage
from serve.front.output.answer import UsageInStream
from serve.front.output.deltas import Begin, End, TokenUsage, Update

Event = Mapping[str, Any]


class Writer(Protocol):
    """Writes the events of a stream. It consumes updates and nothing else. begin is called once
    before the first of them and finish once after the last; failed takes the place of what is
    still to come."""

    def begin(self) -> Iterable[Event]: ...

    def feed(self, update: Update) -> Iterable[Event]: ...

    def finish(self) -> Iterable[Event]: ...

    def failed(self, error: BrigadeError) -> Event: ...


class WholeWriter(Protocol):
    """Adds updates up to the reply for a client that wants no stream. whole is complete after
    finish. The events that feed and finish return are of no use here."""

    def feed(self, update: Update) -> Iterable[Event]: ...

    def finish(self) -> Iterable[Event]: ...

    def whole(self) -> Event: ...


class Head(TypedDict):
    """The fields that all chunks of an OpenAI stream share with the whole reply."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


def head(prefix: str, kind: str, model: str) -> Head:
    """The head of a new reply, with an id that begins with prefix."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"brigade-{__version__}",
    }


class UsageFields:
    """The usage in the chunks of a stream, as far as the client wants any."""

    def __init__(self, wanted: UsageInStream) -> None:
        self._wanted = wanted
        self._usage = TokenUsage(0, 0, 0)
        self._num_tokens = 0

    def feed(self, update: Update) -> dict[str, Usage | None]:
        """The fields of an update's chunks. Counts its tokens: all answers' together."""
        self._num_tokens += len(update.tokens)
        for delta in update.deltas:
            if isinstance(delta, Begin | End):
                self._usage = delta.usage
        if self._wanted is UsageInStream.NONE:
            return {}
        if self._wanted is UsageInStream.LAST:
            return {"usage": None}
        return {"usage": openai_usage(replace(self._usage, completion_tokens=self._num_tokens))}

    def last(self) -> Usage | None:
        """The usage for the chunk after the last answer; None if there is no such chunk."""
        return None if self._wanted is UsageInStream.NONE else openai_usage(self._usage)


def openai_usage(tokens: TokenUsage) -> Usage:
    """Token counts in the words of OpenAI's chat and completions."""
    return usage(
        tokens.prompt_tokens,
        tokens.completion_tokens,
        tokens.cached_tokens,
        tokens.reasoning_tokens,
        tokens.accepted_tokens,
        tokens.rejected_tokens,
    )
