"""How answers leave: as JSON, or as a stream of events that ends with its client."""

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.responses import Response

from serve.front import replies
from serve.front.answer import Answer

KEEP_ALIVE_SECONDS = 15.0
SEND_SECONDS = 60.0

_logger = logging.getLogger(__name__)


def json_response(
    body: Mapping[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(replies.encode(body), status, headers, "application/json")


class Stream(EventSourceResponse):
    """Ends the answer also when the client is gone before its first event."""

    def __init__(
        self, answer: Answer, events: AsyncIterator[bytes], headers: dict[str, str]
    ) -> None:
        super().__init__(
            events,
            headers={"cache-control": "no-cache", **headers},
            ping=KEEP_ALIVE_SECONDS,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            send_timeout=SEND_SECONDS,
        )
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _logger.warning("A client took nothing for %g seconds: given up.", SEND_SECONDS)
        finally:
            self._answer.close()
