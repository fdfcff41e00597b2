"""The HTTP calls about responses: made of chats, kept for those that go on from them."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve.core.errors import RequestError
from serve.front.api.openai import ChatBody, parse
from serve.front.api.responses import ResponsesBody, Store, as_messages, response
from serve.front.api.responses_events import Telling
from serve.front.http.body import json_object
from serve.front.http.openapi import told
from serve.front.http.replies import Json
from serve.front.output.answer import Answer, Job
from serve.front.routes.stream import in_events, json_response

# What a chat's fields are called here.
_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


@contextmanager
def _own_names() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        error.param = _FIELDS.get(error.param or "", error.param)
        raise


class Front(Protocol):
    """What it needs of the server that chats need, too."""

    def prepare_chat(self, body: ChatBody) -> Job: ...

    def count(self, body: ChatBody) -> int: ...

    async def in_thread(self, request: Request, read: Callable[[bytes], Any]) -> Any: ...

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

    @told(404, 429, 500, body=ResponsesBody, reply=Json, chunk=Json)
    async def respond(self, request: Request) -> Response:
        """Answers with items: text, thoughts, calls of functions."""
        body, messages, job = await self._front.in_thread(request, self._read)
        with _own_names():
            answer, headers = await self._front.begin(request, job)
        telling = Telling(response(body))
        events = self._events(answer.chunks(include_usage=True), telling, messages)
        return await in_events(request, answer, events, telling.failed, telling.response, headers)

    def _read(self, data: bytes) -> tuple[ResponsesBody, list[Json], Job]:
        """With the messages that lead to the answer, but for instructions: those end with it."""
        body = parse(ResponsesBody, json_object(data))
        messages = [*self._store.before(body.previous_response_id), *body.messages()]
        with _own_names():
            return body, messages, self._front.prepare_chat(body.as_chat(messages))

    async def _events(
        self, chunks: AsyncIterator[Json], telling: Telling, messages: list[Json]
    ) -> AsyncIterator[Json]:
        for event in telling.begin():
            yield event
        async for chunk in chunks:
            for event in telling.feed(chunk):
                yield event
        last = list(telling.finish())
        # Before its client knows of the end, so that it can go on at once.
        if telling.response["store"]:
            self._store.put(telling.response, [*messages, *as_messages(telling.response["output"])])
        for event in last:
            yield event

    @told(400, 404, reply=Json)
    async def kept(self, request: Request) -> Response:
        """A response that is kept; DELETE forgets it."""
        id = request.path_params["id"]
        if request.query_params:
            raise RequestError("No parameters are supported here: leave them out.", param="query")
        if request.method != "DELETE":
            return json_response(self._store.get(id)[0])
        self._store.delete(id)
        return json_response({"id": id, "object": "response", "deleted": True})
