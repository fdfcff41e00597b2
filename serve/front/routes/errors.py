"""Turns errors of calls into replies."""

import json
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serve.core.errors import BrigadeError
from serve.front.http import middleware, replies
from serve.front.routes.stream import json_response


async def _brigade_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BrigadeError)
    return json_response(
        middleware.error_reply(request.scope, error),
        error.http_status,
        replies.error_headers(error),
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Returns an error of the router: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    what = json.dumps(f"{request.method} {request.url.path}"[:200])
    message = f"{error.detail}: {what} is not a call of this server. GET / lists all calls."
    return await _brigade_error(
        request, replies.StatusError(error.status_code, message, error.headers or {})
    )


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return await _brigade_error(request, BrigadeError(str(error)))


HANDLERS: dict[Any, Callable[[Request, Exception], Any]] = {
    BrigadeError: _brigade_error,
    HTTPException: _http_error,
    Exception: _unexpected_error,
}
