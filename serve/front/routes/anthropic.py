"""The HTTP calls of Anthropic's Messages, which are chats in another form."""

from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from serve.front.api.anthropic.body import CountBody, MessagesBody
from serve.front.api.reading import kinds
from serve.front.api.writers.messages import MessagesWriter
from serve.front.http import middleware
from serve.front.http.access import Access, ErrorFormat, Policy, Route
from serve.front.http.openapi import endpoint
from serve.front.http.record import AccessRecord
from serve.front.http.replies import listed, named_event
from serve.front.routes.answering import Answering, log_number
from serve.front.routes.stream import Framing, stream_reply, whole_reply

_PING = ServerSentEvent('{"type":"ping"}', event="ping", sep="\n")
_FRAMING = Framing(named_event, ping=_PING)

_POLICY = Policy(Access.CLIENT, ErrorFormat.ANTHROPIC)
# Unknown paths below this folder get Anthropic's error objects, too.
FOLDERS = {"/v1/messages/": _POLICY}


class MessageCalls:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count, methods=["POST"]),
        ]

    @endpoint(policy=_POLICY, body=MessagesBody)
    async def create(self, request: Request) -> Response:
        """Answers a chat of Anthropic's API."""
        read = await self._answering.read(request, kinds.MESSAGE)
        job = read.job
        answer, headers = await self._answering.start_answer(request, job)
        record: AccessRecord = request.scope[middleware.RECORD]
        if read.left_out:
            headers |= listed("x-tools-not-offered", read.left_out)
            log_number(request, "tools_not_offered", len(read.left_out))
        writer = MessagesWriter(job.model, record.request, read.omits_thoughts)
        if job.is_stream:
            return stream_reply(answer, writer, headers, _FRAMING)
        return await whole_reply(request, answer, writer, headers)

    @endpoint(policy=_POLICY, body=CountBody)
    async def count(self, request: Request) -> Response:
        """Counts the tokens of a prompt of Anthropic's API."""
        return await self._answering.reply(request, kinds.COUNT)
