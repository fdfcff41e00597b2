"""Requests that wait while a page shows them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from tests.front.fakes import Running

BODY = {"messages": [{"role": "user", "content": "a"}]}


@contextmanager
def waiting(server: Running, *ids: str) -> Iterator[None]:
    """Sends a chat with each of these ids, and cancels them at the end. The engine has to delay its
    answers for so long."""
    ended = threading.Event()
    begun = threading.Event()

    async def send() -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            tasks = [
                asyncio.ensure_future(
                    client.post("/v1/chat/completions", json=BODY, headers={"x-request-id": id})
                )
                for id in ids
            ]
            while not ended.is_set():
                listed = (await client.get("/admin/requests")).json()["data"]
                if len(listed) == len(ids):
                    begun.set()
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(send(),))
    thread.start()
    try:
        assert begun.wait(60), "the requests did not begin"
        yield
    finally:
        ended.set()
        thread.join(60)
