"""The HTTP server of rank 0: routes, and what runs them. Starlette and uvicorn live here."""

import asyncio
import errno
import json
import logging
import math
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve import __version__
from serve.core.config import ServeConfig
from serve.core.errors import AddressError, BrigadeError, RequestError, UnavailableError
from serve.front.api.lanes import Kind, Lanes
from serve.front.api.openai import ChatBody, CompletionBody, DetokenizeBody, Tokenizable
from serve.front.api.reading import Reader, Told
from serve.front.http import guard, replies, schemas
from serve.front.http.access import Access, Policies, Policy
from serve.front.http.door import Door, log_access
from serve.front.http.metrics import Metrics
from serve.front.http.openapi import document, endpoint, summaries
from serve.front.http.record import Record
from serve.front.http.server import BACKLOG, Server
from serve.front.output.answer import Answer, Job
from serve.front.pipeline.interface import Engine
from serve.front.pipeline.prefix import scope_of
from serve.front.routes import anthropic
from serve.front.routes.adapters import ADMIN, AdapterCalls
from serve.front.routes.anthropic import MessageCalls
from serve.front.routes.responses import ResponseCalls
from serve.front.routes.stream import Stream, json_response
from serve.front.text.grammar_queue import GrammarQueue
from serve.front.text.tokens import Tokenizer

_MOST_SECONDS = 3600.0
_BROKEN_DRAIN_SECONDS = 0.5
_PROBE = Policy(access=Access.OPEN, ignores_load=True)
_READY = Policy(access=Access.OPEN)
# Unknown paths below these are treated as the calls there.
_FOLDERS = {"/admin/": ADMIN, **anthropic.FOLDERS}

_logger = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises AddressError if host and port cannot be had."""
    listening = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # At once: of two that are only bound to a port, neither is told of the other.
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except (OSError, UnicodeError) as error:
        if listening is not None:
            listening.close()
        raise AddressError(_address_message(host, port, error)) from error
    return listening


def _address_message(host: str, port: int, error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return f"--host {host} is no address: give one of this machine, such as 127.0.0.1."
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use: stop what listens there or give another --port."
    if error.errno == errno.EACCES:
        return f"Port {port} needs more rights: give a --port above 1023."
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"--host {host} is no address of this machine: give one it has, such as 127.0.0.1."
    return f"{host}:{port} cannot be listened on ({error.strerror}): give another --host or --port."


async def serve(
    config: ServeConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    listening: socket.socket,
    max_context: int,
) -> None:
    """Answers until it is drained, or until SIGTERM or SIGINT. Raises what engine.failed()
    gave, if it did."""
    log_access(config)
    front = Front(config, engine, tokenizer, max_context)
    if not config.no_warm_up:
        # By starlette, which imports what it streams with at the first use.
        await run_in_threadpool(front.warm_up)
    server = Server(front.app, config, lambda: front.begin_drain(config.drain_timeout))
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    failing = asyncio.ensure_future(engine.failed())
    draining = asyncio.ensure_future(front.door.drained())
    try:
        await asyncio.wait({serving, failing, draining}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done() and not serving.done():
            front.end_streams(failing.result())
        if draining.done():
            _logger.info("event=drained answers_ended=%d", front.num_ended)
        server.should_exit = True
        await serving
        if failing.done():
            raise failing.result()
    finally:
        for task in (serving, failing, draining):
            task.cancel()
        await asyncio.gather(serving, failing, draining, return_exceptions=True)
        front.close()


class Front:
    """The endpoints, and the answers that are under way."""

    def __init__(
        self, config: ServeConfig, engine: Engine, tokenizer: Tokenizer, max_context: int
    ) -> None:
        self._model = config.model_name
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._drain_seconds = config.drain_timeout
        self._keeps_keys_apart = config.prefix_cache_scope == "key"
        self._created = int(time.time())
        self._adapters = engine.adapters
        self._metrics = Metrics(engine.pipeline)
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self.num_ended = 0  # answers that a drain did not wait for
        max_answers = config.max_queue + config.max_num_sequences
        self._reader = Reader(tokenizer, max_context, max_answers)
        self._lanes = Lanes(self._reader)
        self._grammars = GrammarQueue()
        routes = self._routes()
        starlette = Starlette(routes=routes, exception_handlers=_ERROR_HANDLERS)
        starlette.router.redirect_slashes = False
        self.door = Door(starlette, config)
        paths = [route.path for route in routes]
        self._calls = summaries(routes)
        self._document = document(routes, __version__)
        policies = Policies(routes, _FOLDERS)
        inner = _with_cors(self.door, config)
        self.app = guard.Guard(inner, self._metrics, config, paths, policies)

    def warm_up(self) -> None:
        """Reads requests of nobody, so that the first one of a client finds validators, template
        and checker of grammars made."""
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        chat = {"model": self._model, "messages": [{"role": "user", "content": "Hello!"}]}
        formats = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        for body in (chat, {**chat, "stream": True, "response_format": formats}):
            try:
                job = self._reader.chat(json.dumps(body).encode())
                job.check_grammar(self._tokenizer)
            except RequestError as error:  # A model may have no template, or one for others.
                _logger.info("event=warm_up_refused reason=%s", json.dumps(str(error)))

    def begin_drain(self, seconds: float) -> None:
        """From here on nothing new is taken. What still runs after so many seconds ends with
        an error; sooner if a rank is gone, which most likely will not come again."""
        self.door.drain()
        if not self._engine.is_complete:
            seconds = min(seconds, _BROKEN_DRAIN_SECONDS)
        num_open = len(self._open_answers())
        _logger.info("event=draining seconds=%g answers=%d", seconds, num_open)
        asyncio.get_running_loop().call_later(seconds, self._end_drain)

    def _end_drain(self) -> None:
        self.num_ended += len(self._open_answers())
        self.end_streams(UnavailableError("The server is stopping."))
        self.door.give_up()

    def _open_answers(self) -> list[Answer]:
        return [answer for answer in self._answers if answer.is_open]

    def end_streams(self, error: BrigadeError) -> None:
        for answer in list(self._answers):
            answer.interrupt(error)

    def close(self) -> None:
        self._lanes.close()
        self._grammars.close()

    def _routes(self) -> list[Route]:
        return [
            Route("/", self.index),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
            Route("/admin/pipeline", self.pipeline),
            Route("/admin/trace", self.trace),
            Route("/admin/drain", self.drain, methods=["POST"]),
            *ResponseCalls(self).routes(),
            *MessageCalls(self).routes(),
            *AdapterCalls(self._adapters, self._model).routes(),
        ]

    @endpoint(404, 429, 500, body=ChatBody, reply=schemas.ChatReply, chunk=schemas.ChatChunk)
    async def chat(self, request: Request) -> Response:
        """Answers a chat."""
        return await self._generate(request, "chat")

    @endpoint(
        *(404, 429, 500),
        body=CompletionBody,
        reply=schemas.CompletionReply,
        chunk=schemas.CompletionReply,
    )
    async def completions(self, request: Request) -> Response:
        """Continues prompts."""
        return await self._generate(request, "completion")

    async def _generate(self, request: Request, kind: Kind) -> Response:
        job: Job = await self.read(request, kind)
        answer, headers = await self.begin(request, job)
        if job.is_stream:
            return Stream(answer, answer.server_sent_events(job.include_usage), headers)
        reply = replies.fold(answer.chunks(include_usage=True))
        try:
            whole = await guard.unless_gone(request.receive, reply)
            data = await answer.encode(whole)
            return Response(data, headers=headers, media_type="application/json")
        finally:
            answer.close()

    async def begin(self, request: Request, job: Job) -> tuple[Answer, dict[str, str]]:
        """The answer, which whoever gets it closes, and headers that go with it."""
        record: Record = request.scope[guard.RECORD]
        if job.model != self._model:
            record.adapter = job.model
        self._adapters.check(job.model)
        grammar = job.grammar
        if grammar is not None:
            await guard.unless_gone(request.receive, self._check_grammar(request, job, grammar))
        adapter = await self._adapters.version(job.model)
        headers = replies.ignored_fields(job.ignored_fields)
        if adapter:
            record.adapter_version = adapter
            headers["x-adapter-version"] = str(adapter)
        api_key = self.door.key_digest(request.scope) if self._keeps_keys_apart else ""
        cache_scope = scope_of(job.cache_salt, api_key)
        generation = self._engine.submit(job.prompts, adapter, cache_scope)
        answer = Answer(job.model, job, generation, self._tokenizer, record, self._metrics)
        self._answers.add(answer)
        return answer, headers

    async def _check_grammar(self, request: Request, job: Job, grammar: str) -> None:
        def check() -> None:
            job.check_grammar(self._tokenizer)

        if self._tokenizer.grammars.is_known(grammar):
            await self._grammars.run_known(check)
        else:
            client = self.door.client_of(request.scope)
            await self._grammars.run(client, len(grammar), check)

    async def read(self, request: Request, kind: Kind, *given: bytes) -> Any:
        """What reading a request's body gives; the body and more may be given already."""
        held = list(given) or [await guard.read_body(request.scope, request.receive)]
        try:
            return await guard.unless_gone(request.receive, self._lanes.read(kind, held))
        finally:
            held.clear()  # Else what clients have left waits for a thread with their bodies.

    async def tell(self, request: Request, kind: Kind) -> Response:
        """A reply that needs nothing but the body."""
        read: Told = await self.read(request, kind)
        if read.model is not None:
            self._adapters.check(read.model)
        headers = replies.ignored_fields(read.ignored_fields)
        return Response(read.reply, headers=headers, media_type="application/json")

    @endpoint(404, body=Tokenizable, reply=schemas.Tokenized)
    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of messages."""
        return await self.tell(request, "tokenize")

    @endpoint(404, body=DetokenizeBody, reply=schemas.Detokenized)
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return await self.tell(request, "detokenize")

    @endpoint(reply=schemas.ModelList)
    async def models(self, _: Request) -> Response:
        """The model and its adapters."""
        described = [self._described(name) for name in self._adapters.names]
        return json_response({"object": "list", "data": described})

    @endpoint(404, reply=schemas.Model)
    async def model(self, request: Request) -> Response:
        """The model or an adapter by its name."""
        name = request.path_params["name"]
        self._adapters.check(name)
        return json_response(self._described(name))

    def _described(self, name: str) -> schemas.Model:
        return {
            "id": name,
            "parent": None if name == self._model else self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "brigade",
            "max_model_len": self._max_context,
        }

    @endpoint(reply=schemas.Status, policy=_PROBE)
    async def health(self, _: Request) -> Response:
        """Answers while the process is alive."""
        return json_response({"status": "alive"})

    @endpoint(reply=schemas.Status, policy=_READY)
    async def ready(self, _: Request) -> Response:
        """Whether requests can be answered; 503 says what the server waits for."""
        reason = self._engine.ready_reason()
        if reason is not None:
            raise UnavailableError(reason)
        return json_response({"status": "ready"})

    @endpoint(policy=_PROBE)
    async def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus."""
        body, content_type = self._metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @endpoint(reply=schemas.Index)
    async def index(self, _: Request) -> Response:
        """What this server is, and its calls."""
        return json_response(
            {
                "name": "Brigade",
                "version": __version__,
                "model": self._model,
                "calls": self._calls,
            }
        )

    @endpoint(reply=schemas.Version)
    async def version(self, _: Request) -> Response:
        """The version of Brigade."""
        return json_response({"version": __version__})

    @endpoint(reply=replies.Json)
    async def openapi(self, _: Request) -> Response:
        """Every call, its parameters and replies, for programs."""
        return json_response(self._document)

    @endpoint(403, reply=replies.Json, policy=ADMIN)
    async def pipeline(self, _: Request) -> Response:
        """Each stage: its layers, bytes, times and state."""
        return json_response(self._engine.pipeline())

    @endpoint(400, 403, reply=replies.Json, query={"seconds": {"type": "number"}}, policy=ADMIN)
    async def trace(self, request: Request) -> Response:
        """What each stage did when, as a Chrome trace."""
        return json_response(self._engine.timeline(_seconds(request, 10.0)))

    @endpoint(
        400,
        403,
        status=202,
        reply=schemas.Status,
        query={"seconds": {"type": "number"}},
        policy=ADMIN,
    )
    async def drain(self, request: Request) -> Response:
        """The process ends with code 0 when the last answer is finished."""
        self.begin_drain(_seconds(request, self._drain_seconds))
        return json_response({"status": "draining"}, 202)


def _with_cors(app: guard.Application, config: ServeConfig) -> guard.Application:
    """Around the door, because a browser asks without a key whether it may ask. Never with
    credentials: a key is a header, so no page can use what a browser remembers."""
    if not config.cors_origin:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.cors_origin,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[
            "X-Request-Id",
            "Request-Id",
            "X-Adapter-Version",
            "X-Ignored-Fields",
            "Retry-After",
        ],
    )


def _seconds(request: Request, default: float) -> float:
    if set(request.query_params) - {"seconds"}:
        raise RequestError("The only parameter here is `seconds`.", param="query")
    if not request.query_params:
        return default
    try:
        seconds = float(request.query_params["seconds"])
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_SECONDS:
        raise RequestError(
            f"seconds must be a number above 0 and up to {_MOST_SECONDS:g}.", param="seconds"
        )
    return seconds


# --- errors


async def _brigade_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BrigadeError)
    return json_response(
        guard.error_reply(request.scope, error), error.http_status, replies.error_headers(error)
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Of the router: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    what = json.dumps(f"{request.method} {request.url.path}"[:200])
    message = f"{error.detail}: {what} is not a call of this server. GET / lists them."
    return await _brigade_error(
        request, replies.StatusError(error.status_code, message, error.headers or {})
    )


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return await _brigade_error(request, BrigadeError(str(error)))


_ERROR_HANDLERS: dict[Any, Callable[[Request, Exception], Any]] = {
    BrigadeError: _brigade_error,
    HTTPException: _http_error,
    Exception: _unexpected_error,
}
