"""The calls that are answered before the server is ready: probes, and the reason for the wait."""

from typing import NoReturn

from starlette.requests import Request
from starlette.responses import Response

from serve import __version__
from serve.core.errors import UnavailableError
from serve.front.http.access import CLIENT, Access, Policy, Route
from serve.front.http.openapi import endpoint
from serve.front.routes.events import ServerState
from serve.front.routes.stream import json_response

PROBE = Policy(access=Access.OPEN, ignores_load=True)


@endpoint(policy=PROBE)
async def health(_: Request) -> Response:
    """Answers while the process is alive."""
    return json_response({"status": "alive"})


@endpoint(policy=PROBE)
async def ping(_: Request) -> Response:
    """Answers while the process is alive, for the probes of SageMaker and SGLang."""
    return json_response({"status": "alive"})


@endpoint(policy=CLIENT)
async def version(_: Request) -> Response:
    """Returns the version of Brigade."""
    return json_response({"version": __version__})


class StartingCalls:
    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    def routes(self) -> list[Route]:
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        return [
            Route("/health", health),
            Route("/ping", ping),
            Route("/version", version),
            Route("/ready", self.ready),
            Route("/{path:path}", self.later, methods=methods),
        ]

    @endpoint(policy=Policy(access=Access.OPEN))
    async def ready(self, _: Request) -> Response:
        """Answers 503 with the reason why the cluster is not ready."""
        self._refuse()

    @endpoint(policy=CLIENT)
    async def later(self, _: Request) -> Response:
        """Refuses every other call until the cluster is ready."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        reason = self._server_state.ready_reason() or "loading the tokenizer"
        raise UnavailableError(f"The cluster is not ready ({reason}): try again later.")
