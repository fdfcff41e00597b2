"""The store of responses, which drops the oldest."""

import json
import tracemalloc

import pytest

from serve.core.errors import NotFoundError, RequestError
from serve.front.api.responses.store import Store


def put(store: Store, id: str, size: int = 0) -> None:
    store.put({"id": id}, json.dumps([{"role": "user", "content": "x" * size}]).encode())


def test_the_least_recently_used_response_is_dropped_first() -> None:
    store = Store(max_num=2)
    put(store, "a")
    put(store, "b")
    store.get("a")
    put(store, "c")
    assert store.get("a").response == b'{"id":"a"}'
    with pytest.raises(NotFoundError):
        store.get("b")
    with pytest.raises(RequestError) as caught:
        store.earlier("b", ())
    assert (caught.value.http_status, caught.value.param) == (400, "previous_response_id")


def test_bytes_held_by_the_store_stay_within_its_limit() -> None:
    store = Store(max_bytes=1000)
    for number in range(9):
        put(store, str(number), 300)
    assert store.get("8")
    with pytest.raises(NotFoundError):
        store.get("5")
    put(store, "huge", 2000)
    with pytest.raises(NotFoundError):
        store.get("huge")
    put(store, "small")
    assert store.earlier("small", ())


def test_items_are_found_in_the_store_without_parsing_them() -> None:
    """The store is read in the event loop, for each reference that a client writes."""
    store = Store()
    item = {"id": "msg_1", "type": "message"}
    store.put({"id": "a", "tools": [[]] * 200_000, "output": [item]}, b"[]")
    tracemalloc.start()
    earlier = store.earlier(None, ["msg_1"] * 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert json.loads(earlier) == {"messages": [], "items": {"msg_1": item}}
    assert peak < 1 << 20


def test_deleting_a_response_frees_its_bytes() -> None:
    store = Store(max_bytes=1000)
    for number in range(20):
        put(store, str(number), 300)
        store.delete(str(number))
    with pytest.raises(NotFoundError):
        store.delete("1")
    put(store, "a", 400)
    put(store, "b", 400)
    assert store.get("a")
    assert store.get("b")
