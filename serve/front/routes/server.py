"""The HTTP calls about the server: its models, state and documentation."""

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from serve import __version__
from serve.core.errors import RequestError, UnavailableError
from serve.front.http import middleware
from serve.front.http.access import CLIENT, Access, ErrorFormat, Policy, Route
from serve.front.http.metrics import Metrics
from serve.front.http.openapi import document, endpoint, summaries
from serve.front.http.replies import Json
from serve.front.pipeline.engine import Engine
from serve.front.routes.starting import PROBE, health, ping, version
from serve.front.routes.stream import json_response

_READY = Policy(access=Access.OPEN)
_MODELS = Policy(Access.CLIENT, ErrorFormat.BOTH)
MAX_PAGE = 1000  # Anthropic's numbers
_PAGE = 20


class ServerCalls:
    """The calls about the server. `describe` must be called first, with all routes."""

    def __init__(
        self,
        model: str,
        engine: Engine,
        metrics: Metrics,
        max_context: int,
        num_slots: int,
        sampling: dict[str, float | int],
    ) -> None:
        self._model = model
        self._engine = engine
        self._metrics = metrics
        self._max_context = max_context
        self._num_slots = num_slots
        self._sampling = sampling
        self._created = int(time.time())
        self._calls: dict[str, str] = {}
        self._document: Json = {}

    def describe(self, routes: Iterable[Route]) -> Json:
        """Describes the calls for clients, and returns their OpenAPI document."""
        routes = list(routes)
        self._calls = summaries(routes)
        self._document = document(routes, __version__)
        return self._document

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", health),
            Route("/ping", ping),
            Route("/props", self.props),
            Route("/server_info", self.info),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", version),
            Route("/openapi.json", self.openapi),
        ]

    @endpoint(
        policy=_MODELS,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
            "after_id": {"type": "string"},
            "before_id": {"type": "string"},
        },
    )
    async def models(self, request: Request) -> Response:
        """Lists the model and its adapters, for clients of Anthropic in pages."""
        names = self._engine.adapters.registry.names
        query = request.query_params
        if middleware.error_format_of(request.scope) is ErrorFormat.ANTHROPIC:
            return json_response(self._page_of_anthropic(names, query))
        shown, _ = _page(names, query, len(names))
        return json_response({"object": "list", "data": [self._described(name) for name in shown]})

    @endpoint(policy=_MODELS)
    async def model(self, request: Request) -> Response:
        """Describes the model or an adapter."""
        name = request.path_params["name"]
        if not name:  # The request is for the list, with a slash at the path's end.
            return await self.models(request)
        found = self._engine.adapters.registry.served.meant(name)
        if middleware.error_format_of(request.scope) is ErrorFormat.ANTHROPIC:
            return json_response(self._described_to_anthropic(found))
        return json_response(self._described(found))

    def _page_of_anthropic(self, names: list[str], query: Mapping[str, str]) -> Json:
        shown, has_more = _page(names, query, _PAGE)
        return {
            "data": [self._described_to_anthropic(name) for name in shown],
            "has_more": has_more,
            "first_id": shown[0] if shown else None,
            "last_id": shown[-1] if shown else None,
        }

    def _described_to_anthropic(self, name: str) -> Json:
        created = datetime.fromtimestamp(self._created, UTC)
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created.isoformat().replace("+00:00", "Z"),
        }

    def _described(self, name: str) -> Json:
        adapter = self._engine.adapters.registry.by_name.get(name)
        return {
            "id": name,
            "root": name if adapter is None else str(adapter.source),
            "permission": [_permission(name, self._created)],
            "parent": None if name == self._model else self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "brigade",
            "max_model_len": self._max_context,
            "default_sampling_params": self._sampling,
        }

    @endpoint(policy=CLIENT)
    async def props(self, _: Request) -> Response:
        """Returns the properties of the model that llama.cpp's clients ask for first."""
        properties = {
            "default_generation_settings": {"n_ctx": self._max_context},
            "total_slots": self._num_slots,
            "model_alias": self._model,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"brigade-{__version__}",
        }
        return json_response(properties)

    @endpoint(policy=CLIENT)
    async def info(self, _: Request) -> Response:
        """Returns the server's name and version, its model and its limits."""
        info = {
            "name": "Brigade",
            "version": __version__,
            "model": self._model,
            "max_model_len": self._max_context,
            "max_num_sequences": self._num_slots,
        }
        return json_response(info)

    @endpoint(policy=_READY)
    async def ready(self, _: Request) -> Response:
        """Answers 200 if the cluster can answer requests, and otherwise 503 with the reason."""
        reason = self._engine.ready_reason()
        if reason is not None:
            raise UnavailableError(reason)
        return json_response({"status": "ready"})

    @endpoint(policy=PROBE)
    async def metrics(self, request: Request) -> Response:
        """Returns all metrics in the format that Prometheus asks for."""
        body, content_type = self._metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @endpoint(policy=CLIENT)
    async def index(self, _: Request) -> Response:
        """Returns the name of this server, its model and its calls."""
        return json_response(
            {
                "name": "Brigade",
                "version": __version__,
                "model": self._model,
                "calls": self._calls,
            }
        )

    @endpoint(policy=CLIENT)
    async def openapi(self, _: Request) -> Response:
        """Describes every call, its parameters and its body for programs."""
        return json_response(self._document)


def _page(names: list[str], query: Mapping[str, str], limit: int) -> tuple[list[str], bool]:
    """Returns the names between after_id and before_id, and whether there are more of them. limit
    applies to a query without its own. Raises RequestError."""
    if "limit" in query:
        limit = _limit(query["limit"])
    start, end = 0, len(names)
    if "after_id" in query:
        start = _index(names, query["after_id"], "after_id") + 1
    if "before_id" in query:
        end = _index(names, query["before_id"], "before_id")
    is_backward = "before_id" in query and "after_id" not in query
    shown = names[start:end][-limit:] if is_backward else names[start:end][:limit]
    return shown, len(shown) < max(0, end - start)


def _limit(text: str) -> int:
    is_short_number = text.isascii() and text.isdigit() and len(text) < 5
    if not is_short_number or not 1 <= int(text) <= MAX_PAGE:
        raise RequestError(f"limit must be a whole number from 1 to {MAX_PAGE}.", param="limit")
    return int(text)


def _index(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise RequestError(f"{param}: this server has no such model.", param=param)
    return names.index(name)


def _permission(name: str, created: int) -> Json:
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
