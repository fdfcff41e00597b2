"""The HTTP calls about requests that run or wait, for operators."""

from starlette.requests import Request
from starlette.responses import Response

from serve.core.errors import NotFoundError, RequestCancelledError
from serve.front.http.access import Route
from serve.front.http.openapi import endpoint
from serve.front.routes.adapters import ADMIN
from serve.front.routes.answering import Answering
from serve.front.routes.stream import json_response


class RequestCalls:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route("/admin/requests", self.list_requests),
            Route("/admin/requests/{id}/cancel", self.cancel_request, methods=["POST"]),
        ]

    @endpoint(policy=ADMIN)
    async def list_requests(self, _: Request) -> Response:
        """Lists the requests that run or wait, the oldest first."""
        return json_response({"object": "list", "data": self._answering.running()})

    @endpoint(policy=ADMIN)
    async def cancel_request(self, request: Request) -> Response:
        """Ends a request on all ranks; its client gets an error."""
        wanted = request.path_params["id"]
        found = [answer for answer in self._answering.open_answers() if answer.is_of(wanted)]
        if not found:
            raise NotFoundError(
                f"No request {wanted[:100]!r} runs or waits: GET /admin/requests lists them."
            )
        for answer in found:
            answer.cancel(RequestCancelledError())
        return json_response({"id": wanted, "num_cancelled": len(found)})
