"""The HTTP calls of Anthropic's Messages, which are chats in another dialect."""

from collections.abc import AsyncIterator
from functools import partial

from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve.front.api.anthropic import CountBody, MessagesBody
from serve.front.api.anthropic_events import MessagesWriter
from serve.front.http import guard, schemas
from serve.front.http.access import Dialect, Policy
from serve.front.http.openapi import endpoint
from serve.front.http.replies import Json
from serve.front.output.answer import Job
from serve.front.routes.answering import Answering
from serve.front.routes.stream import in_events

_PING = ServerSentEvent('{"type":"ping"}', event="ping", sep="\n")

_POLICY = Policy(dialect=Dialect.ANTHROPIC)
# Errors of unknown paths below are in Anthropic's words, too.
FOLDERS = {"/v1/messages/": _POLICY}


class MessageCalls:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count, methods=["POST"]),
        ]

    @endpoint(
        *(404, 429, 500),
        body=MessagesBody,
        reply=schemas.MessageReply,
        chunk=Json,
        policy=_POLICY,
    )
    async def create(self, request: Request) -> Response:
        """Answers a chat in Anthropic's words."""
        job: Job = await self._answering.read(request, "message")
        answer, headers = await self._answering.begin(request, job)
        writer = MessagesWriter(job.model, answer.usage)
        events = _events(writer, answer.chunks(include_usage=True))
        failed = partial(guard.error_reply, request.scope)
        return await in_events(request, answer, events, failed, writer.message, headers, _PING)

    @endpoint(*(404, 500), body=CountBody, reply=schemas.MessageTokens, policy=_POLICY)
    async def count(self, request: Request) -> Response:
        """How many tokens a prompt has, of a chat in Anthropic's words."""
        return await self._answering.reply(request, "count")


async def _events(writer: MessagesWriter, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
    async for chunk in chunks:
        for event in writer.feed(chunk):
            yield event
    for event in writer.finish():
        yield event
