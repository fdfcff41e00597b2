"""The HTTP calls of OpenAI's Responses: built on chats, and stored to be continued later."""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from serve.core.errors import RequestError
from serve.front.api.reading import kinds
from serve.front.api.reading.kinds import BodyKind, Reading
from serve.front.api.reading.reader import NeedsEarlier, ReadResponse
from serve.front.api.responses.body import (
    InputTokensBody,
    ResponsesBody,
    joined,
    output_messages,
    response_field_names,
)
from serve.front.api.responses.offer import OfferedTools
from serve.front.api.responses.store import Store
from serve.front.api.writers.responses import ResponsesWriter
from serve.front.http.access import CLIENT, Route
from serve.front.http.middleware import read_parts
from serve.front.http.openapi import by_method, endpoint
from serve.front.http.replies import Json
from serve.front.routes.answering import Answering, log_number
from serve.front.routes.stream import NAMED, json_response, stream_reply, whole_reply
from serve.front.text.tokens import Tokenizer

# `include` has no effect: a response is always returned whole.
_INCLUDE = {"type": "array", "items": {"type": "string"}}
_QUERY: Json = {"include": _INCLUDE, "include[]": _INCLUDE}


class ResponseCalls:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._store = Store()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.input_tokens, methods=["POST"]),
            Route(
                "/v1/responses/{id}",
                by_method(GET=self.retrieve, DELETE=self.delete),
                methods=["GET", "DELETE"],
            ),
        ]

    @endpoint(policy=CLIENT, body=ResponsesBody)
    async def respond(self, request: Request) -> Response:
        """Answers with items: text, reasoning, calls of functions."""
        read = await self._read(request, kinds.RESPONSE)
        if warnings := read.plan.repeated.get("warnings"):
            log_number(request, "warnings", len(warnings))
        with response_field_names():
            answer, headers = await self._answering.start_answer(request, read.job)
        writer = _StoringWriter(read, self._answering.tokenizer, self._store)
        if read.job.is_stream:
            return stream_reply(answer, writer, headers, NAMED)
        return await whole_reply(request, answer, writer, headers)

    @endpoint(policy=CLIENT, body=InputTokensBody)
    async def input_tokens(self, request: Request) -> Response:
        """Counts the tokens of a response's input."""
        read = await self._read(request, kinds.INPUT_TOKENS)
        return Response(read.reply, media_type="application/json")

    async def _read(
        self,
        request: Request,
        kind: BodyKind[Reading | NeedsEarlier],
    ) -> Reading:
        """Reads the body, with the stored messages and items that it refers to."""
        data = await read_parts(request.scope, request.receive)
        read = await self._answering.read(request, kind, data)
        if isinstance(read, NeedsEarlier):
            earlier = self._store.earlier(read.previous_id, read.item_ids)
            read = await self._answering.read(request, kind, data, (earlier,))
            assert not isinstance(read, NeedsEarlier)
        return read

    @endpoint(policy=CLIENT, query=_QUERY)
    async def retrieve(self, request: Request) -> Response:
        """Returns a stored response."""
        _check_query(request, _QUERY)
        stored = self._store.get(request.path_params["id"])
        return Response(stored.response, media_type="application/json")

    @endpoint(policy=CLIENT)
    async def delete(self, request: Request) -> Response:
        """Deletes a stored response."""
        _check_query(request, {})
        id = request.path_params["id"]
        self._store.delete(id)
        return json_response({"id": id, "object": "response", "deleted": True})


def _check_query(request: Request, known: Json) -> None:
    """Raises RequestError for a parameter that is not known."""
    for name in request.query_params:
        if name not in known:
            raise RequestError(
                f"The parameter {name[:80]!r} is not supported: leave it out.", param="query"
            )


class _StoringWriter(ResponsesWriter):
    """Stores the response, unless store=false, before its client learns of its end."""

    def __init__(self, read: ReadResponse, tokenizer: Tokenizer, store: Store) -> None:
        super().__init__(read.plan, tokenizer)
        self.response["model"] = read.job.model
        self._read, self._store = read, store

    def finish(self) -> Iterator[Json]:
        last = list(super().finish())
        if self.response["store"]:
            own = output_messages(self.response["output"], OfferedTools(self._read.plan.offered))
            self._store.put(self.response, joined(self._read.messages, own))
        return iter(last)
