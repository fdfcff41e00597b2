"""The HTTP calls of OpenAI's Responses: made of chats, and kept for those that continue them."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve.core.errors import BrigadeError, RequestError
from serve.front.api.reading.lanes import Read
from serve.front.api.reading.reader import NeedsEarlier, Reader, ReadResponse
from serve.front.api.responses.body import (
    InputTokensBody,
    ResponsesBody,
    joined,
    output_messages,
    own_names,
)
from serve.front.api.responses.compaction import CompactBody
from serve.front.api.responses.offer import Offer
from serve.front.api.responses.store import Store, StoredItem
from serve.front.api.writers.compaction import CompactionWriter
from serve.front.api.writers.responses import ResponsesWriter
from serve.front.http.access import CLIENT, Route
from serve.front.http.guard import read_parts
from serve.front.http.openapi import Call, by_method, endpoint
from serve.front.http.replies import Json, encode
from serve.front.http.schemas import DeletedResponse, InputTokens
from serve.front.routes.answering import Answering, log_number
from serve.front.routes.background import Background, Run
from serve.front.routes.stream import NAMED, Stream, json_response, stream_reply, whole_reply
from serve.front.text.tokens import Tokenizer

MAX_PAGE = 100
_PAGE = 20
# Harmless: a response is returned with everything that it has.
_STRINGS = {"type": "array", "items": {"type": "string"}}
_INCLUDE: Json = {"include": _STRINGS, "include[]": _STRINGS}


class ResponseCalls:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._store = Store()
        self.background = Background()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/responses/compact", self.compact, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.input_tokens, methods=["POST"]),
            Route(
                "/v1/responses/{id}",
                by_method(GET=self.retrieve, DELETE=self.delete),
                methods=["GET", "DELETE"],
            ),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
        ]

    @endpoint(404, 429, 500, body=ResponsesBody, reply=Json, chunk=Json, policy=CLIENT)
    async def respond(self, request: Request) -> Response:
        """Answers with items: text, reasoning, calls of functions."""
        read = await self._read(request, Reader.response)
        if warnings := read.plan.repeated.get("warnings"):
            log_number(request, "warnings", len(warnings))
        with own_names():
            answer, headers = await self._answering.begin(request, read.job)
        writer = _StoringWriter(read, self._answering.tokenizer, self._store)
        if read.is_background:
            writer.store()
            run = self.background.start(answer, writer)
            if read.job.is_stream:
                return Stream(None, run.read(0), headers)
            return json_response(run.response, headers=headers)
        if read.job.is_stream:
            return stream_reply(answer, writer, headers, NAMED)
        return await whole_reply(request, answer, writer, headers)

    @endpoint(404, 429, 500, body=CompactBody, reply=Json, policy=CLIENT)
    async def compact(self, request: Request) -> Response:
        """Summarizes a conversation in an item that can replace it."""
        read = await self._read(request, Reader.compact)
        with own_names():
            answer, headers = await self._answering.begin(request, read.job)
        return await whole_reply(request, answer, CompactionWriter(read.kept), headers)

    @endpoint(404, 500, body=InputTokensBody, reply=InputTokens, policy=CLIENT)
    async def input_tokens(self, request: Request) -> Response:
        """Counts the tokens of a response's input."""
        read = await self._read(request, Reader.input_tokens)
        return Response(read.reply, media_type="application/json")

    async def _read(
        self,
        request: Request,
        method: Callable[[Reader, bytes, bytes | None], Read | NeedsEarlier],
    ) -> Read:
        """Reads the body, with the earlier responses that it needs."""
        data = await read_parts(request.scope, request.receive)
        read = await self._answering.read(request, method, data)
        if isinstance(read, NeedsEarlier):
            earlier = self._store.earlier(read.previous_id, read.item_ids)
            read = await self._answering.read(request, method, data, (earlier,))
            assert not isinstance(read, NeedsEarlier)
        return read

    @endpoint(
        *(400, 404),
        reply=Json,
        chunk=Json,
        query={
            "stream": {"type": "boolean"},
            "starting_after": {"type": "integer", "minimum": 0},
            "include_obfuscation": {"type": "boolean"},
            **_INCLUDE,
        },
        policy=CLIENT,
    )
    async def retrieve(self, request: Request) -> Response:
        """Returns a stored response, or the rest of its stream from an event on."""
        _check_query(request, type(self).retrieve)
        _is_true(request, "include_obfuscation")  # Checked only: it pads OpenAI's events.
        id = request.path_params["id"]
        stored = self._store.get(id)
        run = self.background.get(id)
        if _is_true(request, "stream"):
            return self._resumed(request, run)
        if "starting_after" in request.query_params:
            raise RequestError("starting_after needs stream=true.", param="starting_after")
        if run is not None and not run.is_done:
            return json_response(run.response)
        return Response(stored.response, media_type="application/json")

    @endpoint(*(400, 404), reply=DeletedResponse, policy=CLIENT)
    async def delete(self, request: Request) -> Response:
        """Deletes a stored response, and ends it if it is still generated."""
        _check_query(request, type(self).delete)
        id = request.path_params["id"]
        self._store.get(id)
        await self.background.forget(id)  # Before delete, because it stores the last state.
        self._store.delete(id)
        reply: DeletedResponse = {"id": id, "object": "response", "deleted": True}
        return json_response(reply)

    def _resumed(self, request: Request, run: Run | None) -> Response:
        """Returns the events of a background response from a number on."""
        if run is None:
            raise RequestError(
                "The events of this response are not stored: only those of responses "
                "with background=true are, for a limited time.",
                param="stream",
            )
        after = _number(request, "starting_after", -1, 0, 1 << 31)
        return Stream(None, run.read(after + 1), {})

    @endpoint(400, 404, reply=Json, policy=CLIENT)
    async def cancel(self, request: Request) -> Response:
        """Ends a background response that is still generated."""
        id = request.path_params["id"]
        stored = self._store.get(id)
        run = self.background.get(id)
        if run is not None and not run.is_done:
            await run.cancel()
            return json_response(run.response)
        if not json.loads(stored.response)["background"]:
            raise RequestError(
                "Only a response with background=true can be cancelled: to end another "
                "one, close its connection.",
                param="id",
            )
        return Response(stored.response, media_type="application/json")

    @endpoint(
        *(400, 404),
        reply=Json,
        query={
            "after": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
            "order": {"enum": ["asc", "desc"]},
            **_INCLUDE,
        },
        policy=CLIENT,
    )
    async def input_items(self, request: Request) -> Response:
        """Lists the items of a stored response's input."""
        _check_query(request, type(self).input_items)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc.", param="order")
        limit = _number(request, "limit", _PAGE, 1, MAX_PAGE)
        items = list(self._store.get(request.path_params["id"]).input_items)
        if order == "desc":
            items.reverse()
        page = _after(items, request.query_params.get("after"))
        shown = page[:limit]
        frame: Json = {
            "object": "list",
            "data": [],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": len(page) > limit,
        }
        before, after = encode(frame).split(b"[]", 1)
        data = b",".join(item.json for item in shown)
        return Response(before + b"[" + data + b"]" + after, media_type="application/json")


def _after(items: list[StoredItem], id: str | None) -> list[StoredItem]:
    """Returns the items that come after the one with this id."""
    if id is None:
        return items
    ids = [item.id for item in items]
    if id not in ids:
        raise RequestError("after: no item of the input has this id.", param="after")
    return items[ids.index(id) + 1 :]


def _check_query(request: Request, function: Callable[..., Any]) -> None:
    """Raises RequestError for a parameter that this endpoint does not declare, and for one that is
    given twice although it is not a list."""
    call: Call = function.call  # type: ignore[attr-defined]
    known = call.query or {}
    for name in sorted(set(request.query_params)):
        if name not in known:
            raise RequestError(
                f"The parameter {name[:80]!r} is not supported: leave it out.", param="query"
            )
        is_list = known[name].get("type") == "array"
        if not is_list and len(request.query_params.getlist(name)) > 1:
            raise RequestError(f"{name} must not be given twice.", param=name)


def _is_true(request: Request, name: str) -> bool:
    """Returns the value of a parameter of the query, false without it. Raises RequestError."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "1", "false", "0"):
        raise RequestError(f"{name} must be true or false.", param=name)
    return value in ("true", "1")


def _number(request: Request, name: str, default: int, minimum: int, maximum: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    is_short_number = text.isascii() and text.isdigit() and len(text) < 12
    if not is_short_number or not minimum <= int(text) <= maximum:
        raise RequestError(
            f"{name} must be a whole number from {minimum} to {maximum}.", param=name
        )
    return int(text)


class _StoringWriter(ResponsesWriter):
    """Stores the response before its client learns of its end, so that it can be continued at
    once."""

    def __init__(self, read: ReadResponse, tokenizer: Tokenizer, store: Store) -> None:
        super().__init__(read.plan, tokenizer)
        self._read, self._store = read, store

    def finish(self) -> Iterator[Json]:
        last = list(super().finish())
        self.store()
        return iter(last)

    def cancelled(self) -> Iterator[Json]:
        last = list(super().cancelled())
        self.store()
        return iter(last)

    def failed(self, error: BrigadeError) -> Json:
        last = super().failed(error)
        if self._read.is_background:  # Its client will ask for it later.
            self.store()
        return last

    def store(self) -> None:
        """Stores the response in its current state, unless the request has store=false."""
        if not self.response["store"]:
            return
        own = output_messages(self.response["output"], Offer(self._read.plan.offered))
        messages = joined(self._read.messages, own)
        self._store.put(self.response, messages, self._read.input_items)
