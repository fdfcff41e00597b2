"""The stored responses, which later requests can continue, read or refer to."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from serve.core.errors import NotFoundError, RequestError
from serve.front.http.replies import Json, encode

MAX_STORED = 1024
MAX_STORED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, the messages of its conversation up to its end, and the items of its input. All
    are JSON: reading and writing long ones takes time."""

    response: bytes
    messages: bytes
    input_items: bytes
    item_ids: tuple[str, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        parts = self.response, self.messages, self.input_items
        return sum(map(len, parts))


class Store:
    """The responses that were used last, bounded in number and bytes. A response is found by its
    id, which cannot be guessed."""

    def __init__(self, max_num: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_num = max_num
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._by_item: dict[str, str] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()  # Bodies are read in threads.

    def put(self, response: Json, messages: bytes, input_items: bytes = b"[]") -> None:
        """Stores a response, also in the place of an earlier state of it."""
        ids = tuple(item["id"] for item in response.get("output", ()))
        stored = Stored(encode(response), messages, input_items, ids)
        with self._lock:
            if response["id"] in self._stored:
                self._forget(response["id"])
            self._stored[response["id"]] = stored
            self._num_bytes += stored.num_bytes
            for item_id in ids:
                self._by_item[item_id] = response["id"]
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
        items = encode({id: self._item(id) for id in item_ids})
        return b'{"messages":' + messages + b',"items":' + items + b"}"

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

    def _item(self, id: str) -> Json:
        with self._lock:
            owner_id = self._by_item.get(id, "")
            owner = self._stored.get(owner_id)
        if owner is not None:
            response = json.loads(owner.response)
            for item in response["output"]:
                if item["id"] == id:
                    return dict(item)
        raise RequestError(
            f"The item {id[:80]!r} is not stored: send the whole item.", param="input"
        )

    def _forget(self, id: str) -> None:
        stored = self._stored.pop(id)
        self._num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            self._by_item.pop(item_id, None)

    def _check(self, id: str) -> None:
        if id not in self._stored:
            raise NotFoundError(f"The response {id[:80]!r} does not exist or is no longer stored.")
