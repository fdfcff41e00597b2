"""The stored responses, which later requests can continue, read or refer to.

They are read in the event loop. So they are stored as JSON that can be joined, and are never
parsed: a client may have put megabytes into one item.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from serve.core.errors import NotFoundError, RequestError
from serve.front.http.replies import Json, encode

MAX_STORED = 1024
MAX_STORED_BYTES = 64 << 20


class StoredItem(msgspec.Struct, frozen=True):
    """An item of a response's input or output, as JSON."""

    id: str
    json: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, the messages of its conversation up to its end, both as JSON, and the items of
    its input and output."""

    response: bytes
    messages: bytes
    input_items: Sequence[StoredItem]
    output_items: Sequence[StoredItem]

    @property
    def num_bytes(self) -> int:
        items = [*self.input_items, *self.output_items]
        return len(self.response) + len(self.messages) + sum(len(item.json) for item in items)


def stored_items(items: Iterable[Json]) -> tuple[StoredItem, ...]:
    """Returns the items, each of which has an id, as they are stored."""
    return tuple(StoredItem(item["id"], encode(item)) for item in items)


class Store:
    """The responses that were used last, bounded in number and bytes. A response is found by its
    id, which cannot be guessed."""

    def __init__(self, max_num: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_num = max_num
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, bytes] = {}  # of the outputs, as JSON
        self._num_bytes = 0
        self._lock = threading.Lock()  # Bodies are read in threads.

    def put(self, response: Json, messages: bytes, input_items: Sequence[StoredItem] = ()) -> None:
        """Stores a response. It replaces an earlier state of the same response."""
        output_items = stored_items(response.get("output", ()))
        stored = Stored(encode(response), messages, input_items, output_items)
        with self._lock:
            if response["id"] in self._stored:
                self._forget(response["id"])
            self._stored[response["id"]] = stored
            self._num_bytes += stored.num_bytes
            for item in output_items:
                self._items[item.id] = item.json
            while len(self._stored) > self._max_num or self._num_bytes > self._max_bytes:
                oldest = next(iter(self._stored))
                self._forget(oldest)

    def get(self, id: str) -> Stored:
        """Returns a stored response. Raises NotFoundError if there is none with this id."""
        with self._lock:
            self._check(id)
            self._stored.move_to_end(id)
            return self._stored[id]

    def earlier(self, previous_id: str | None, item_ids: Iterable[str]) -> bytes:
        """Returns, as JSON, the messages that a new response continues, and the items that it
        refers to. Raises RequestError."""
        messages = b"[]"
        if previous_id is not None:
            messages = self._messages(previous_id)
        items = [encode(id) + b":" + self._item(id) for id in dict.fromkeys(item_ids)]
        return b'{"messages":' + messages + b',"items":{' + b",".join(items) + b"}}"

    def delete(self, id: str) -> None:
        """Forgets a stored response. Raises NotFoundError."""
        with self._lock:
            self._check(id)
            self._forget(id)

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
        with self._lock:
            item = self._items.get(id)
        if item is None:
            raise RequestError(
                f"The item {id[:80]!r} is not stored: send the whole item.", param="input"
            )
        return item

    def _forget(self, id: str) -> None:
        stored = self._stored.pop(id)
        self._num_bytes -= stored.num_bytes
        for item in stored.output_items:
            self._items.pop(item.id, None)

    def _check(self, id: str) -> None:
        if id not in self._stored:
            raise NotFoundError(f"The response {id[:80]!r} does not exist or is no longer stored.")
