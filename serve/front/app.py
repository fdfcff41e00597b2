"""The HTTP server of rank 0, composed of its parts."""

import asyncio
import json
import logging
import socket
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware

from serve.core.config import ServeConfig
from serve.core.errors import stopping
from serve.front.http import middleware
from serve.front.http.access import Route
from serve.front.http.admission import AccessCheck, CheckedRoute, NoRoute, log_access
from serve.front.http.metrics import Metrics
from serve.front.http.openapi import field_names
from serve.front.http.record import trace_of
from serve.front.http.server import HttpServer, QuietServer
from serve.front.pipeline.engine import Engine
from serve.front.routes import admin, anthropic, errors, ollama, page
from serve.front.routes.adapters import AdapterCalls
from serve.front.routes.admin import AdminCalls
from serve.front.routes.answering import Answering
from serve.front.routes.anthropic import MessageCalls
from serve.front.routes.chat import ChatCalls
from serve.front.routes.embeddings import EmbeddingCalls
from serve.front.routes.events import EventCalls, ServerState
from serve.front.routes.history import SampleHistory
from serve.front.routes.ollama import OllamaCalls
from serve.front.routes.requests import RequestCalls
from serve.front.routes.responses import ResponseCalls
from serve.front.routes.server import ServerCalls
from serve.front.routes.starting import StartingCalls
from serve.front.text.tokens import Tokenizer

_BROKEN_DRAIN_SECONDS = 0.5
_FOLDERS = {**admin.FOLDERS, **anthropic.FOLDERS, **ollama.FOLDERS}

_logger = logging.getLogger(__name__)


async def serve(
    config: ServeConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    listening: socket.socket,
    max_context: int,
) -> None:
    """Runs the server until SIGTERM, SIGINT or a drain. Raises the error of engine.failed()."""
    log_access(config)
    asyncio.get_running_loop().set_exception_handler(_log_bug)
    front = Front(config, engine, tokenizer, max_context)
    if config.constants.warms_up:
        # Runs in Starlette's thread pool, whose first use imports the modules that streams need.
        await run_in_threadpool(front.answering.warm_up)
    server = HttpServer(
        front.app, config.constants, lambda: front.begin_drain(config.drain_timeout)
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    failing = asyncio.ensure_future(engine.failed())
    draining = asyncio.ensure_future(front.check.drained())
    sampling = asyncio.ensure_future(front.history.run())
    try:
        await asyncio.wait({serving, failing, draining}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done() and not serving.done():
            front.answering.interrupt(failing.result())
        if draining.done():
            _logger.info("event=drained answers_ended=%d", front.num_ended)
        front.events.watchers.close()
        server.should_exit = True
        await serving
        if failing.done():
            raise failing.result()
    finally:
        tasks = (serving, failing, draining, sampling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        front.answering.close()


def _log_bug(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error that nobody awaits, without its message, which may quote a client."""
    error = context.get("exception")
    what = trace_of(error) if error else json.dumps(context["message"])
    _logger.error("event=bug trace=%s", what)


class EarlyServer:
    """The HTTP server while the cluster starts, when there may be neither a tokenizer nor a model.
    It shows browsers the page with the state of the start, answers probes, and refuses everything
    else with 503. It must end before `serve` begins; connections that arrive in between wait."""

    def __init__(
        self,
        config: ServeConfig,
        listening: socket.socket,
        server_state: ServerState,
    ) -> None:
        self._events = EventCalls(server_state)
        routes = [*self._events.routes(), *StartingCalls(server_state).routes()]
        if not config.no_ui:
            routes[:0] = page.routes()
        app = _application(routes, AccessCheck(config), config, Metrics(dict), frozenset())
        self._server = QuietServer(app, config.constants)
        # uvicorn closes the socket that it is given.
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening.dup()]))

    async def stop(self) -> None:
        """Ends the streams, and returns when the last reply is sent."""
        self._events.watchers.close()
        self._server.should_exit = True
        # A signal that cancels the caller must not cancel the server, for which `stop` waits again.
        await asyncio.shield(self._serving)


class Front:
    """The application: the routes, each behind its access check, inside the request log."""

    def __init__(
        self,
        config: ServeConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        max_context: int,
    ) -> None:
        self._config = config
        self._engine = engine
        self._metrics = Metrics(engine.pipeline)
        self.num_ended = 0  # the number of answers that a drain did not wait for
        self.answering = Answering(config, engine, tokenizer, max_context, self._metrics)
        self.responses = ResponseCalls(self.answering)
        self.server_state = ServerState(config)
        self.server_state.engine = engine
        self.server_state.answering = self.answering
        self.history = SampleHistory(engine.pipeline, self._metrics.totals)
        self.server_state.history = self.history
        self.events = EventCalls(self.server_state)
        self.check = AccessCheck(config)
        self.routes, names = self._compose(max_context)
        # The page's files are not calls: /openapi.json does not describe them.
        self.files = [] if config.no_ui else page.routes()
        routes = [*self.routes, *self.files]
        self.app = _application(routes, self.check, config, self._metrics, names)

    def _compose(self, max_context: int) -> tuple[list[Route], frozenset[str]]:
        """Returns the routes, and the names of all fields of their bodies and queries."""
        config, engine = self._config, self._engine
        server = ServerCalls(
            config.model_name,
            engine,
            self._metrics,
            max_context,
            config.max_num_seqs,
            self.answering.tokenizer.sampling_defaults.own(),
        )
        routes = [
            Route("/", server.index),
            *ChatCalls(self.answering).routes(),
            *EmbeddingCalls(self.answering).routes(),
            *server.routes(),
            *AdminCalls(engine, config.drain_timeout, self.begin_drain).routes(),
            *RequestCalls(self.answering).routes(),
            *self.events.routes(),
            *self.responses.routes(),
            *MessageCalls(self.answering).routes(),
            *OllamaCalls(self.answering, engine, max_context).routes(),
            *AdapterCalls(engine.adapters, config.model_name).routes(),
        ]
        document = server.describe(routes)
        return routes, field_names(document)

    def begin_drain(self, seconds: float) -> None:
        """Accepts no new requests. Answers that still run after this many seconds end with an
        error. If a rank is missing, which is unlikely to return, they end sooner."""
        self.check.drain()
        self.server_state.is_draining = True
        if not self._engine.is_complete:
            seconds = min(seconds, _BROKEN_DRAIN_SECONDS)
        num_open = len(self.answering.open_answers())
        _logger.info("event=draining seconds=%g answers=%d", seconds, num_open)
        asyncio.get_running_loop().call_later(seconds, self._end_drain)

    def _end_drain(self) -> None:
        self.num_ended += len(self.answering.open_answers())
        self.answering.interrupt(stopping())
        self.check.end_drain()


def _application(
    routes: list[Route],
    check: AccessCheck,
    config: ServeConfig,
    metrics: Metrics,
    field_names: frozenset[str],
) -> middleware.Application:
    """Returns the routes, each behind the check of its policy, inside the request log."""
    checked = [CheckedRoute(route, check) for route in routes]
    starlette = Starlette(routes=checked, exception_handlers=errors.HANDLERS)
    starlette.router.redirect_slashes = False
    starlette.router.default = NoRoute(check, _FOLDERS)
    app = middleware.RequestLog(_with_cors(starlette, config), metrics, config, field_names)
    return app if config.no_ui else page.with_page(app)


def _with_cors(app: middleware.Application, config: ServeConfig) -> middleware.Application:
    """Allows the origins of --allowed-origins. CORS comes before the access check, because a
    browser's preflight request has no key. Credentials that a browser has stored are never allowed:
    clients send keys in headers."""
    if not config.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
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
