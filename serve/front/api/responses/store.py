"""The stored responses, which later requests can continue, read or refer to.

Responses are stored as JSON. The event loop never parses it, because a client may have put
megabytes into one item.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from serve.core.errors import NotFoundError, RequestError
from serve.front.http.replies import Json, encode

MAX_STORED = 1024
MAX_STORED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, the messages of its conversation up to its end, and the items of its output by
    their ids, all as JSON."""

    response: bytes
    messages: bytes
    items: dict[str, bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages) + sum(map(len, self.items.values()))


class Store:
    """The latest used responses, limited in number and bytes. Nobody can guess a response's id."""

    def __init__(self, max_num: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_num = max_num
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, bytes] = {}  # the items in all stored outputs, as JSON, by id
        self._num_bytes = 0

    def put(self, response: Json, messages: bytes) -> None:
        items = {item["id"]: encode(item) for item in response.get("output", ())}
        stored = Stored(encode(response), messages, items)
        self._items |= items
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

    def earlier(self, previous_id: str | None, item_ids: Iterable[str]) -> bytes:
        """Returns, as JSON, the messages that a new response continues, and the items that it
        refers to. Raises RequestError."""
        messages = b"[]" if previous_id is None else self._messages(previous_id)
        items = [encode(id) + b":" + self._item(id) for id in dict.fromkeys(item_ids)]
        return b'{"messages":' + messages + b',"items":{' + b",".join(items) + b"}}"

    def _messages(self, id: str) -> bytes:
        try:
            return self.get(id).messages
        except NotFoundError as error:
            raise RequestError(
                str(error),
                param="previous_response_id",
                code="previous_response_not_found",
            ) from error

    def _item(self, id: str) -> bytes:
        if id not in self._items:
            raise RequestError(
                f"The item {id[:80]!r} is not stored: send the whole item.",
                param="input",
                code="item_not_found",
            )
        return self._items[id]

    def delete(self, id: str) -> None:
        """Deletes a stored response. Raises NotFoundError."""
        stored = self.get(id)
        self._num_bytes -= stored.num_bytes
        for item_id in stored.items:
            del self._items[item_id]
        del self._stored[id]
