"""The HTTP calls about responses: made of chats, kept for those that go on from them."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve.core.errors import RequestError
from serve.front.api.lanes import Kind
from serve.front.api.reading import NeedsEarlier, ReadResponse
from serve.front.api.responses import ResponsesBody, Store, as_messages, joined, own_names, response
from serve.front.api.responses_events import Telling
from serve.front.http.guard import read_body
from serve.front.http.openapi import endpoint
from serve.front.http.replies import Json
from serve.front.output.answer import Answer, Job
from serve.front.routes.stream import in_events, json_response


class Front(Protocol):
    """What it needs of the server that chats need, too."""

    async def read(self, request: Request, kind: Kind, *given: bytes) -> Any: ...

    async def tell(self, request: Request, kind: Kind) -> Response: ...

    async def begin(self, request: Request, job: Job) -> tuple[Answer, dict[str, str]]: ...


class ResponseCalls:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._store = Store()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.respond, methods=["POST"]),
            # One route, so that a 405 names both methods.
            Route("/v1/responses/{id}", self.kept, methods=["GET", "DELETE"]),
        ]

    @endpoint(404, 429, 500, body=ResponsesBody, reply=Json, chunk=Json)
    async def respond(self, request: Request) -> Response:
        """Answers with items: text, thoughts, calls of functions."""
        read = await self._read(request)
        with own_names():
            answer, headers = await self._front.begin(request, read.job)
        telling = Telling(response(read.body))
        events = self._events(answer.chunks(include_usage=True), telling, read.messages)
        return await in_events(request, answer, events, telling.failed, telling.response, headers)

    async def _read(self, request: Request) -> ReadResponse:
        data = await read_body(request.scope, request.receive)
        read = await self._front.read(request, "response", data)
        if isinstance(read, NeedsEarlier):
            earlier = self._store.before(read.id)
            read = await self._front.read(request, "response", data, earlier)
        assert isinstance(read, ReadResponse)
        return read

    async def _events(
        self, chunks: AsyncIterator[Json], telling: Telling, messages: bytes
    ) -> AsyncIterator[Json]:
        for event in telling.begin():
            yield event
        async for chunk in chunks:
            for event in telling.feed(chunk):
                yield event
        last = list(telling.finish())
        # Before its client knows of the end, so that it can go on at once.
        if telling.response["store"]:
            own = as_messages(telling.response["output"])
            self._store.put(telling.response, joined(messages, own))
        for event in last:
            yield event

    @endpoint(400, 404, reply=Json)
    async def kept(self, request: Request) -> Response:
        """A response that is kept; DELETE forgets it."""
        id = request.path_params["id"]
        if request.query_params:
            raise RequestError("No parameters are supported here: leave them out.", param="query")
        if request.method != "DELETE":
            return Response(self._store.get(id)[0], media_type="application/json")
        self._store.delete(id)
        return json_response({"id": id, "object": "response", "deleted": True})
