"""Shares out slow work fairly: clients take turns, so that a client with much work delays no
other."""

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from serve.core.errors import BrigadeError, OverloadedError, stopping

Result = TypeVar("Result")


@dataclass(order=True, slots=True)
class _Waiting:
    """Waiting work. The smallest work of a client comes first."""

    is_late: bool
    size: int
    number: int
    client: str = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    done: "asyncio.Future[Any]" = field(compare=False)


class FairQueue:
    """Threads for slow work, in one event loop. `what` is the name of the work in errors. A client
    uses one thread at a time. A free thread takes the smallest work of the client that was served
    longest ago, but urgent work of any client first."""

    def __init__(self, what: str, num_threads: int, max_waiting: int) -> None:
        self._what = what
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, what)
        self._waiting: dict[str, list[_Waiting]] = {}  # the client served longest ago first
        self._served: set[str] = set()
        self._numbers = itertools.count()
        self._is_closed = False

    def close(self) -> None:
        """Ends all waiting work with UnavailableError. Work that has begun may finish."""
        self._is_closed = True
        for waiting in itertools.chain.from_iterable(self._waiting.values()):
            _refuse(waiting, stopping())
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, client: str, size: int, work: Callable[[], Result], is_urgent: bool = True
    ) -> Result:
        """Runs work in a thread. Returns its result, or raises its error. Raises OverloadedError if
        too much work waits and most of it is this client's, and UnavailableError after `close`.
        Work that has begun goes on if its client leaves."""
        if self._is_closed:
            raise stopping()
        done = asyncio.get_running_loop().create_future()
        waiting = _Waiting(not is_urgent, size, next(self._numbers), client, work, done)
        self._waiting.setdefault(client, []).append(waiting)
        self._fill_threads()
        self._refuse_last()
        try:
            result: Result = await done
            return result
        finally:
            self._remove(waiting)

    def _fill_threads(self) -> None:
        """Starts waiting work in each free thread."""
        while len(self._served) < self._num_threads:
            clients = [client for client in self._waiting if client not in self._served]
            if not clients:
                return
            first_of_each = [min(self._waiting[client]) for client in clients]
            self._submit(min(first_of_each, key=lambda first: first.is_late))

    def _submit(self, waiting: _Waiting) -> None:
        self._remove(waiting)
        self._served.add(waiting.client)
        running = asyncio.get_running_loop().run_in_executor(self._threads, waiting.work)
        running.add_done_callback(partial(self._on_done, waiting))

    def _on_done(self, ended: _Waiting, running: "asyncio.Future[Any]") -> None:
        self._served.remove(ended.client)
        if own := self._waiting.pop(ended.client, None):
            self._waiting[ended.client] = own
        self._fill_threads()
        if running.cancelled():  # cancelled by `close`
            _refuse(ended, stopping())
            return
        error = running.exception()
        if ended.done.done():  # The client has left.
            return
        if error is not None:
            ended.done.set_exception(error)
        else:
            ended.done.set_result(running.result())

    def _refuse_last(self) -> None:
        """If too much work waits, refuses the last work of the client with the most. A client that
        fills the queue keeps out neither other clients' work nor its own smaller work."""
        if sum(map(len, self._waiting.values())) <= self._max_waiting:
            return
        most = max(reversed(self._waiting.values()), key=len)
        last = max(most)
        self._remove(last)
        error = OverloadedError(
            f"{self._max_waiting} {self._what} already wait: try again later.",
            code="queue_full",
        )
        _refuse(last, error)

    def _remove(self, waiting: _Waiting) -> None:
        own = self._waiting.get(waiting.client, [])
        if waiting in own:
            own.remove(waiting)
            if not own:
                del self._waiting[waiting.client]


def _refuse(waiting: _Waiting, error: BrigadeError) -> None:
    if not waiting.done.done():  # Otherwise the work's client has left.
        waiting.done.set_exception(error)
