"""One chat request's life: prompt, generation, text, chunks. Knows no HTTP.

The full reply and the stream are the same chunks; replies.fold adds them up.
"""

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from serve.core.errors import BrigadeError, EngineError, RequestError
from serve.core.types import Event, Sampling
from serve.front import replies
from serve.front.adapters import Adapters
from serve.front.metrics import Metrics
from serve.front.openai import ChatBody
from serve.front.record import Record
from serve.front.replies import Json
from serve.front.text import StopMatcher
from serve.front.tokens import Tokenizer

_logger = logging.getLogger(__name__)


class Generation(Protocol):
    """One sequence's events, the last with a finish reason.

    __anext__ raises BrigadeError when the engine broke. close drops the sequence on all
    ranks if it still runs, and may be called more than once. num_cached counts the
    tokens of the prompt that were not computed anew.
    """

    @property
    def num_cached(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """What the front needs of the cluster."""

    @property
    def adapters(self) -> Adapters: ...

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        eos_ids: frozenset[int],
        adapter: int = 0,
    ) -> Generation:
        """adapter is a version. Raises OverloadedError or UnavailableError at once."""

    def ready_reason(self) -> str | None:
        """None when ready, else one line for clients that says what is under way."""

    def pipeline(self) -> dict[str, Any]: ...

    def timeline(self, seconds: float) -> dict[str, Any]: ...

    async def failed(self) -> BrigadeError:
        """Returns when the cluster broke for good."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request in the engine's terms; stops are looked for in the front."""

    ids: list[int]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]


def prepare(body: ChatBody, tokenizer: Tokenizer, max_context: int) -> Prompt:
    """Renders and encodes the messages. Takes its time: call it in a thread.

    Raises RequestError if they do not fit into max_context tokens.
    """
    text = tokenizer.render(body.template_messages(), body.chat_template_kwargs or {})
    least = tokenizer.least_tokens(text)
    if least >= max_context:
        raise _too_long(f"Your messages have at least {least} tokens", max_context, "messages")
    ids = tokenizer.encode(text)
    if not ids:
        raise RequestError("The messages make an empty prompt.", param="messages")
    if len(ids) >= max_context:
        raise _too_long(
            f"Your messages have {len(ids)} tokens, and the answer needs at least one",
            max_context,
            "messages",
        )
    max_tokens = body.most_tokens or max_context - len(ids)
    if len(ids) + max_tokens > max_context:
        raise _too_long(
            f"You asked for {len(ids) + max_tokens} tokens "
            f"({len(ids)} in the messages, {max_tokens} in the completion)",
            max_context,
            "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        )
    return Prompt(ids, max_tokens, _sampling(body), body.stop)


def _too_long(what: str, max_context: int, param: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {max_context} tokens. {what}. "
        "Shorten the messages or the completion.",
        param=param,
        code="context_length_exceeded",
    )


def _sampling(body: ChatBody) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
    )


class Chat:
    """A generation on its way to a client. Ends it when it is closed, whatever happened."""

    def __init__(
        self,
        model: str,
        prompt: Prompt,
        generation: Generation,
        tokenizer: Tokenizer,
        record: Record,
        metrics: Metrics,
    ) -> None:
        self._generation = generation
        self._text = tokenizer.stream()
        self._stop = StopMatcher(prompt.stops)
        self._record = record
        self._metrics = metrics
        self._last_token = 0.0
        self._num_tokens = 0
        self._interruption: BrigadeError | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._head: Json = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        record.prompt_tokens, record.completion_tokens = len(prompt.ids), 0
        metrics.prompt(len(prompt.ids))

    async def chunks(self, include_usage: bool) -> AsyncIterator[Json]:
        """OpenAI's chunks. Raises BrigadeError if the engine breaks or the server stops."""
        tail: Json = {"usage": None} if include_usage else {}
        role: Json | None = {"role": "assistant", "content": ""}
        try:
            while self._record.finish_reason is None:
                text = self._take(await self._next())
                if role:
                    yield {**self._head, "choices": [replies.choice(role)], **tail}
                    role = None
                if text:
                    yield {**self._head, "choices": [replies.choice({"content": text})], **tail}
            end = replies.choice({}, self._record.finish_reason)
            yield {**self._head, "choices": [end], **tail}
            if include_usage:
                yield {**self._head, "choices": [], "usage": self._usage()}
        except BrigadeError:
            self._record.finish_reason = "error"
            raise
        finally:
            self.close()

    async def server_sent_events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The chunks as an event stream; after an error there is no [DONE]."""
        try:
            async for chunk in self.chunks(include_usage):
                yield replies.server_sent(chunk)
            yield replies.DONE
        except BrigadeError as error:
            yield self._failure(error)
        except Exception as error:
            _logger.exception("request=%s failed in its stream", self._record.request)
            yield self._failure(BrigadeError(str(error)))

    def interrupt(self, error: BrigadeError) -> None:
        """Ends the chat with error, also while it waits for the engine."""
        self._interruption = error
        if self._reader is not None:
            self._reader.cancel()

    def close(self) -> None:
        self._generation.close()
        if self._record.finish_reason is None:
            self._record.finish_reason = "abort"

    async def _next(self) -> Event:
        self._check_interruption()
        self._reader = asyncio.current_task()
        try:
            return await self._generation.__anext__()
        except StopAsyncIteration:
            raise EngineError("A generation ended without a finish reason.") from None
        except asyncio.CancelledError:
            if sys.version_info >= (3, 11) and self._interruption and self._reader:
                self._reader.uncancel()
            self._check_interruption()
            raise
        finally:
            self._reader = None

    def _check_interruption(self) -> None:
        if self._interruption is not None:
            raise self._interruption

    def _take(self, event: Event) -> str:
        """The text that is certain with this event. Ends the generation at a stop string."""
        if event.finish_reason not in (None, "stop", "length"):
            raise EngineError(f"A generation ended with {event.finish_reason}.")
        delta = ""
        if event.token is not None:
            self._count_token()
            # The token that ends an answer is no text, even where it is not a special one.
            delta = "" if event.finish_reason == "stop" else self._text.push(event.token)
        if event.finish_reason is not None:
            delta += self._text.finish()
        text = self._stop.feed(delta)
        if self._stop.matched:
            self._finish("stop")
        elif event.finish_reason is not None:
            text += self._stop.flush()
            self._finish(event.finish_reason)
        return text

    def _count_token(self) -> None:
        now = time.perf_counter()
        if self._num_tokens == 0:
            self._record.ttft_seconds = now - self._record.started
            self._metrics.first_token(self._record.ttft_seconds)
            num_prompt = self._record.prompt_tokens or 0
            self._metrics.prefix_cache(num_prompt, self._generation.num_cached)
        else:
            self._metrics.next_token(now - self._last_token)
        self._last_token = now
        self._num_tokens += 1
        self._record.completion_tokens = self._num_tokens

    def _finish(self, reason: str) -> None:
        self._record.finish_reason = reason
        self._metrics.answered(self._record.seconds())
        self._generation.close()

    def _failure(self, error: BrigadeError) -> bytes:
        self._record.status = error.http_status
        _logger.warning("request=%s failed in its stream: %s", self._record.request, error)
        return replies.server_sent(replies.error_object(error))

    def _usage(self) -> Json:
        num_prompt, num_cached = self._record.prompt_tokens or 0, self._generation.num_cached
        return replies.usage(num_prompt, self._num_tokens, num_cached)
