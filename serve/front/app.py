"""The HTTP server of rank 0, composed of its parts."""

import asyncio
import logging
import socket

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from serve.core.config import ServeConfig
from serve.core.errors import UnavailableError
from serve.front.http import guard
from serve.front.http.access import Policies
from serve.front.http.door import Door, log_access
from serve.front.http.metrics import Metrics
from serve.front.http.server import QuietServer, Server
from serve.front.pipeline.interface import Engine
from serve.front.routes import admin, anthropic, errors, ollama, page
from serve.front.routes.adapters import AdapterCalls
from serve.front.routes.admin import AdminCalls
from serve.front.routes.answering import Answering
from serve.front.routes.anthropic import MessageCalls
from serve.front.routes.chat import ChatCalls
from serve.front.routes.embeddings import EmbeddingCalls
from serve.front.routes.events import EventCalls, Observation
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
    """Runs the server until it is drained, or until SIGTERM or SIGINT. Raises the error of
    engine.failed() if the cluster breaks."""
    log_access(config)
    front = Front(config, engine, tokenizer, max_context)
    if not config.no_warm_up:
        # In Starlette's thread pool: its first use imports the modules that streams need.
        await run_in_threadpool(front.answering.warm_up)
    server = Server(front.app, config, lambda: front.begin_drain(config.drain_timeout))
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    failing = asyncio.ensure_future(engine.failed())
    draining = asyncio.ensure_future(front.door.drained())
    try:
        await asyncio.wait({serving, failing, draining}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done() and not serving.done():
            front.answering.interrupt(failing.result())
        if draining.done():
            _logger.info("event=drained answers_ended=%d", front.num_ended)
        if not failing.done():
            await front.responses.background.idle(config.drain_timeout)
        front.events.watchers.close()
        server.should_exit = True
        await serving
        if failing.done():
            raise failing.result()
    finally:
        for task in (serving, failing, draining):
            task.cancel()
        await asyncio.gather(serving, failing, draining, return_exceptions=True)
        front.answering.close()


class EarlyServer:
    """The HTTP server while the cluster starts, when there may be neither a tokenizer nor a model.
    It shows browsers the page with the state of the start, answers probes, and refuses everything
    else with 503. It must end before `serve` begins; connections that arrive in between wait."""

    def __init__(
        self,
        config: ServeConfig,
        listening: socket.socket,
        observation: Observation,
    ) -> None:
        self._events = EventCalls(observation)
        routes = [*self._events.routes(), *StartingCalls(observation).routes()]
        if not config.no_ui:
            routes[:0] = page.routes()
        _, app = _guarded(routes, config, Metrics(dict))
        self._server = QuietServer(app, config)
        # uvicorn closes the socket that it is given.
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening.dup()]))

    async def stop(self) -> None:
        """Ends the streams, and returns when the last reply is sent."""
        self._events.watchers.close()
        self._server.should_exit = True
        await self._serving


class Front:
    """The application: the calls inside the door, and the door inside the guard."""

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
        self.num_ended = 0  # answers that a drain did not wait for
        self.answering = Answering(config, engine, tokenizer, max_context, self._metrics)
        self.responses = ResponseCalls(self.answering)
        self.observation = Observation(config)
        self.observation.engine = engine
        self.observation.answering = self.answering
        self.observation.metrics = self._metrics
        self.events = EventCalls(self.observation)
        self.routes = self._compose(max_context)
        # The page's files are no calls: /openapi.json does not describe them.
        files = [] if config.no_ui else page.routes()
        self.door, self.app = _guarded([*self.routes, *files], config, self._metrics)

    def _compose(self, max_context: int) -> list[Route]:
        config, engine = self._config, self._engine
        server = ServerCalls(
            config.model_name,
            engine,
            self._metrics,
            max_context,
            config.max_num_sequences,
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
        server.describe(routes)
        return routes

    def begin_drain(self, seconds: float) -> None:
        """Accepts no new requests. Answers that still run after this many seconds end with an
        error. They end sooner if a rank is missing, because it is unlikely to return."""
        self.door.drain()
        self.observation.is_draining = True
        if not self._engine.is_complete:
            seconds = min(seconds, _BROKEN_DRAIN_SECONDS)
        num_open = len(self.answering.open_answers())
        _logger.info("event=draining seconds=%g answers=%d", seconds, num_open)
        asyncio.get_running_loop().call_later(seconds, self._end_drain)

    def _end_drain(self) -> None:
        self.num_ended += len(self.answering.open_answers())
        self.answering.interrupt(UnavailableError("The server is stopping."))
        self.door.give_up()


def _guarded(
    routes: list[Route],
    config: ServeConfig,
    metrics: Metrics,
) -> tuple[Door, guard.Application]:
    """Wraps the calls in the door, and the door in the guard. Returns the door and the whole."""
    starlette = Starlette(routes=routes, exception_handlers=errors.HANDLERS)
    starlette.router.redirect_slashes = False
    door = Door(starlette, config)
    app = guard.Guard(
        _with_cors(door, config),
        metrics,
        config,
        paths=[route.path for route in routes],
        policies=Policies(routes, _FOLDERS),
    )
    return door, app if config.no_ui else page.with_page(app)


def _with_cors(app: guard.Application, config: ServeConfig) -> guard.Application:
    """Allows the origins of --cors-origin. This is outside of the door, because a browser's
    preflight request has no key. Credentials are never allowed: keys are headers, so no page can
    use what a browser has stored."""
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
