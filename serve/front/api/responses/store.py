"""The stored responses, which later requests can continue or read.

They are kept as JSON that is never parsed here, in the event loop: a client may have put megabytes
into one item.
"""

from collections import OrderedDict
from dataclasses import dataclass

from serve.core.errors import NotFoundError, RequestError
from serve.front.http.replies import Json, encode

MAX_STORED = 1024
MAX_STORED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, and the messages of its conversation up to its end, both as JSON."""

    response: bytes
    messages: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class Store:
    """The responses that were used last, bounded in number and bytes. A response is found by its
    id, which cannot be guessed."""

    def __init__(self, max_num: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_num = max_num
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0

    def put(self, response: Json, messages: bytes) -> None:
        stored = Stored(encode(response), messages)
        self._stored[response["id"]] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_num or self._num_bytes > self._max_bytes:
            self.delete(next(iter(self._stored)))

    def get(self, id: str) -> Stored:
        """Returns a stored response. Raises NotFoundError if there is none with this id."""
        if id not in self._stored:
            raise NotFoundError(f"The response {id[:80]!r} does not exist or is no longer stored.")
        self._stored.move_to_end(id)
        return self._stored[id]

    def earlier(self, id: str) -> bytes:
        """Returns the messages that a new response continues. Raises RequestError."""
        try:
            return self.get(id).messages
        except NotFoundError as error:
            raise RequestError(
                str(error),
                param="previous_response_id",
                code="previous_response_not_found",
            ) from error

    def delete(self, id: str) -> None:
        """Forgets a stored response. Raises NotFoundError."""
        self._num_bytes -= self.get(id).num_bytes
        del self._stored[id]
