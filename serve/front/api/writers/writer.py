"""The interface of the APIs' writers, which turn updates of answers into JSON events, and the
common part of OpenAI's writers."""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from serve import __version__
from serve.core.errors import BrigadeError
from serve.front.http.replies import Json, error_object
from serve.front.output.answer import Job, UsageInStream
from serve.front.output.deltas import AnswerBegin, AnswerEnd, TokenUsage, Update

Event = Mapping[str, Any]


class Writer(Protocol):
    """Writes the events of a stream from updates. `begin` comes first, and finish last; `failed`
    takes the place of all later events."""

    def begin(self) -> Iterable[Event]:
        return ()

    def feed(self, update: Update) -> Iterable[Event]: ...

    def finish(self) -> Iterable[Event]:
        return ()

    def failed(self, error: BrigadeError) -> Event: ...


class WholeWriter(Protocol):
    """Builds a reply from updates; `finish` completes it. The returned events are not used."""

    def feed(self, update: Update) -> Iterable[Event]: ...

    def finish(self) -> Iterable[Event]:
        return ()

    def whole(self) -> Event: ...


def _head(prefix: str, kind: str, model: str) -> Json:
    """Returns the fields that all chunks share with the whole reply. prefix begins the id."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"brigade-{__version__}",
    }


class ChunkWriter(Writer):
    """The common part of the writers of OpenAI's chat and completions: the head of all chunks, and
    the usage, which is known at the end."""

    def __init__(self, prefix: str, kind: str, job: Job) -> None:
        self.head = _head(prefix, kind, job.model)
        self.usage: TokenUsage | None = None
        self._usage_in_stream = job.usage_in_stream
        self._usage_so_far = TokenUsage(0, 0, 0)
        self._num_tokens = 0  # the tokens of all answers

    def feed(self, update: Update) -> Iterator[Event]:
        self._num_tokens += len(update.tokens)
        for delta in update.deltas:
            if isinstance(delta, AnswerBegin | AnswerEnd):
                self._usage_so_far = delta.usage
        tail = self._usage_of_chunk()
        for chunk in self.chunks(update):
            yield {**self.head, **chunk, **tail}

    def _usage_of_chunk(self) -> Json:
        if self._usage_in_stream is UsageInStream.NONE:
            return {}
        if self._usage_in_stream is UsageInStream.LAST:
            return {"usage": None}
        so_far = replace(self._usage_so_far, completion_tokens=self._num_tokens)
        return {"usage": openai_usage(so_far)}

    def finish(self) -> Iterator[Event]:
        if self._usage_in_stream is not UsageInStream.NONE:
            yield {**self.head, "choices": [], "usage": openai_usage(self._usage_so_far)}

    def failed(self, error: BrigadeError) -> Json:
        return error_object(error)

    def chunks(self, update: Update) -> Iterator[Json]:
        """Yields an update's chunks, with one choice each and without the shared fields."""
        raise NotImplementedError


def openai_usage(tokens: TokenUsage) -> Json:
    """Returns the token counts, as OpenAI's chat and completions state them."""
    return {
        "prompt_tokens": tokens.prompt_tokens,
        "completion_tokens": tokens.completion_tokens,
        "total_tokens": tokens.prompt_tokens + tokens.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": tokens.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": tokens.reasoning_tokens,
            **tokens.of_parts,
        },
    }
