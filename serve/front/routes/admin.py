"""The HTTP calls about the running pipeline, for operators."""

import math
from collections.abc import Callable
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from serve.core.errors import RequestError
from serve.front.api.openai import parse
from serve.front.http.access import Route
from serve.front.http.body import Body, json_object
from serve.front.http.middleware import read_body
from serve.front.http.openapi import endpoint
from serve.front.pipeline.engine import Engine
from serve.front.routes.adapters import ADMIN
from serve.front.routes.stream import json_response

# Unknown paths below this folder are admin calls, too.
FOLDERS = {"/admin/": ADMIN}
_MAX_SECONDS = 3600.0


class PrefixCacheBody(Body):
    """The body of a call that clears the prefix cache."""

    clear: Literal[True]


class AdminCalls:
    """The calls of operators. begin_drain takes the seconds in which answers may finish."""

    def __init__(
        self, engine: Engine, drain_seconds: float, begin_drain: Callable[[float], None]
    ) -> None:
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._begin_drain = begin_drain

    def routes(self) -> list[Route]:
        return [
            Route("/admin/pipeline", self.pipeline),
            Route("/admin/trace", self.trace),
            Route("/admin/drain", self.drain, methods=["POST"]),
            Route("/admin/prefix-cache", self.clear_prefixes, methods=["POST"]),
        ]

    @endpoint(policy=ADMIN)
    async def pipeline(self, _: Request) -> Response:
        """Describes each stage: its layers, bytes, times and state."""
        return json_response(self._engine.pipeline())

    @endpoint(policy=ADMIN, query={"seconds": {"type": "number"}})
    async def trace(self, request: Request) -> Response:
        """Returns the activity of each stage over time, as a Chrome trace."""
        return json_response(self._engine.timeline(_seconds(request, 10.0)))

    @endpoint(policy=ADMIN, query={"seconds": {"type": "number"}})
    async def drain(self, request: Request) -> Response:
        """Drains the server: it ends with code 0 when the last answer is finished."""
        self._begin_drain(_seconds(request, self._drain_seconds))
        return json_response({"status": "draining"}, 202)

    @endpoint(policy=ADMIN, body=PrefixCacheBody)
    async def clear_prefixes(self, request: Request) -> Response:
        """Drops all cached prefixes, in memory and on the disks of all ranks."""
        parse(PrefixCacheBody, json_object(await read_body(request.scope, request.receive)))
        self._engine.clear_prefixes()
        return json_response({"status": "cleared"})


def _seconds(request: Request, default: float) -> float:
    if set(request.query_params) - {"seconds"}:
        raise RequestError("The only parameter here is `seconds`.", param="query")
    if not request.query_params:
        return default
    try:
        seconds = float(request.query_params["seconds"])
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_SECONDS:
        raise RequestError(
            f"seconds must be a number above 0 and up to {_MAX_SECONDS:g}.", param="seconds"
        )
    return seconds
