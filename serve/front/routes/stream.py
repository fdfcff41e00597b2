"""Sends answers: as JSON, or as a stream of events that ends when its client leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from serve.front.api.writers.writer import Event, WholeWriter, Writer
from serve.front.http import middleware, replies, server
from serve.front.output.answer import RunningAnswer
from serve.front.output.deltas import Update

KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n")
KEEP_ALIVE_SECONDS = 15.0
_long_threads = ThreadPoolExecutor(2, "long")  # for replies that list very many tokens

Made = TypeVar("Made")


class Space(ServerSentEvent):
    """A ping in a stream of lines of JSON, which allows white space but no empty line."""

    def encode(self) -> bytes:
        return b" "


@dataclass(frozen=True, slots=True)
class Framing:
    """How an API's events are sent: `encode` makes bytes, `end` comes last, `ping` fills gaps."""

    encode: Callable[[Event], bytes]
    end: bytes = b""
    ping: ServerSentEvent = KEEP_ALIVE
    media_type: str = "text/event-stream"
    comment: bytes = b":\n\n"  # the shortest text that clients ignore


# As in vLLM, [DONE] ends a stream even after an error.
OPENAI = Framing(replies.server_sent, replies.DONE)
NAMED = Framing(replies.named_event)


def json_response(
    body: Mapping[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Returns a reply with a JSON body."""
    return Response(replies.encode(body), status, headers, "application/json")


def stream_reply(
    answer: RunningAnswer, writer: Writer, headers: dict[str, str], framing: Framing
) -> "Stream":
    """Returns a reply that streams the events of a writer. An error becomes the last event."""
    return Stream(answer, sent_events(answer, writer, framing), headers, framing)


async def whole_reply(
    request: Request, answer: RunningAnswer, writer: WholeWriter, headers: dict[str, str]
) -> Response:
    """Returns the whole reply. If the client leaves before it is complete, the answer ends."""
    try:
        await middleware.unless_gone(request.receive, _add_up(answer, writer))
        whole = writer.whole()
        encode = replies.encode_in_slices if answer.is_long else replies.encode
        data = await _in_thread_if(answer.is_long, partial(encode, whole))
        keywords = sorted({violation.keyword for violation in answer.violations})
        headers = headers | replies.listed("x-schema-violations", keywords)
        return Response(data, headers=headers, media_type="application/json")
    finally:
        answer.close()


async def _add_up(answer: RunningAnswer, writer: WholeWriter) -> None:
    async for update in answer.updates():
        await _written(answer, writer, update)
    for _ in writer.finish():
        continue


async def sent_events(
    answer: RunningAnswer, writer: Writer, framing: Framing
) -> AsyncIterator[bytes]:
    """Yields the encoded events of a writer, and the end. An error becomes the last event."""
    events = _encoded_events(answer, writer, framing)
    async for event in answer.with_error_event(
        events, lambda error: framing.encode(writer.failed(error))
    ):
        yield event
    if framing.end:
        yield framing.end


async def _encoded_events(
    answer: RunningAnswer, writer: Writer, framing: Framing
) -> AsyncIterator[bytes]:
    for event in writer.begin():
        yield framing.encode(event)
    async for update in answer.updates():
        is_long = answer.is_long and update.begin is not None
        for event in await _written(answer, writer, update):
            yield await _in_thread_if(is_long, partial(framing.encode, event))
    for event in writer.finish():
        yield framing.encode(event)


async def _written(
    answer: RunningAnswer, writer: Writer | WholeWriter, update: Update
) -> list[Event]:
    """Returns the events of an update. The first may contain the scores of a long prompt."""
    is_long = answer.is_long and update.begin is not None
    return await _in_thread_if(is_long, lambda: list(writer.feed(update)))


async def _in_thread_if(is_long: bool, make: Callable[[], Made]) -> Made:
    """Calls make, in a thread if it takes long."""
    if not is_long:
        return make()
    return await asyncio.get_running_loop().run_in_executor(_long_threads, make)


class Stream(EventSourceResponse):
    """A reply of encoded events. It ends its answer, even if the client leaves at once."""

    def __init__(
        self,
        answer: RunningAnswer | None,
        events: AsyncIterator[bytes],
        headers: dict[str, str],
        framing: Framing = OPENAI,
    ) -> None:
        super().__init__(
            events,
            headers={"cache-control": "no-cache", **headers},
            media_type=framing.media_type,
            ping=KEEP_ALIVE_SECONDS,
            ping_message_factory=self._next_ping,
        )
        self._answer, self._plain_ping = answer, framing.ping
        self._comment = framing.comment

    def _next_ping(self) -> ServerSentEvent:
        """Returns a ping: the API's own, or a comment that shows the progress of the prompt."""
        progress = self._answer.prompt_progress if self._answer else None
        if progress is None or self._plain_ping is not KEEP_ALIVE:
            return self._plain_ping
        done, total = progress
        return ServerSentEvent(comment=f"prompt {done}/{total} tokens", sep="\n")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        half_closed = scope.get("state", {}).get(server.HALF_CLOSED)
        probe = _Probe(send, half_closed or asyncio.Event(), self._comment)
        probing = asyncio.ensure_future(probe.run())
        try:
            await super().__call__(scope, receive, probe.send)
        finally:
            if self._answer is not None:
                self._answer.close()
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)


class _Probe:
    """Writes comments into a stream whose client has closed its sending side, because only writing
    shows whether the client has left."""

    def __init__(self, send: middleware.Send, half_closed: asyncio.Event, comment: bytes) -> None:
        self._send, self._half_closed, self._comment = send, half_closed, comment
        self._is_open = False

    async def send(self, message: middleware.Message) -> None:
        self._is_open = self._is_open and message.get("more_body", False)
        await self._send(message)
        self._is_open = message["type"] == "http.response.start" or self._is_open

    async def run(self) -> None:
        await self._half_closed.wait()
        for seconds in server.probe_intervals():
            if self._is_open:
                comment = {"type": "http.response.body", "body": self._comment, "more_body": True}
                await self._send(comment)
            await asyncio.sleep(seconds)
