"""Decides whose grammar is checked next: clients take turns, so that one with many grammars does
not delay the others.

A check takes up to a second of a core. A client has one thread at a time and of its grammars the
shortest first; those that were checked before pass at once. All of it runs in one event loop.
"""

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from serve.core.errors import OverloadedError

_NUM_THREADS = 2
_MAX_WAITING_OF_CLIENT = 128
_MAX_WAITING = 512


@dataclass(order=True)
class _Turn:
    size: int
    number: int
    work: Callable[[], None] = field(compare=False)
    done: "asyncio.Future[None]" = field(compare=False)


class GrammarQueue:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        # Known grammars take milliseconds, and must not wait for unknown ones.
        self._known_thread = ThreadPoolExecutor(1, "known-grammar")
        self._waiting: dict[str, list[_Turn]] = {}  # the client served longest ago first
        self._running: set[str] = set()
        self._numbers = itertools.count()

    def close(self) -> None:
        for threads in (self._threads, self._known_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    async def run_known(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._known_thread, work)

    async def run(self, client: str, size: int, work: Callable[[], None]) -> None:
        """Runs work in a thread and raises what it raises, or OverloadedError if this client or
        all together have too many that wait."""
        self._check_room(client)
        done = asyncio.get_running_loop().create_future()
        turn = _Turn(size, next(self._numbers), work, done)
        self._waiting.setdefault(client, []).append(turn)
        self._start()
        try:
            await done
        finally:
            self._forget(client, turn)

    def _check_room(self, client: str) -> None:
        num_own = len(self._waiting.get(client, ()))
        num_all = sum(map(len, self._waiting.values()))
        if num_own >= _MAX_WAITING_OF_CLIENT or num_all >= _MAX_WAITING:
            raise OverloadedError(
                f"{num_own} of your grammars and {num_all} in all are waiting to be "
                "checked: try again later.",
                code="grammar_queue_full",
            )

    def _start(self) -> None:
        """Gives each free thread a client that has none."""
        for client in list(self._waiting):
            if len(self._running) >= _NUM_THREADS:
                return
            if client not in self._running:
                turns = self._waiting.pop(client)
                turn = min(turns)
                turns.remove(turn)
                if turns:
                    self._waiting[client] = turns
                self._run(client, turn)

    def _run(self, client: str, turn: _Turn) -> None:
        loop = asyncio.get_running_loop()

        def on_end(ended: "Future[None]") -> None:
            with suppress(RuntimeError):  # The server has closed its loop.
                loop.call_soon_threadsafe(self._end, client, turn, ended)

        self._running.add(client)
        self._threads.submit(turn.work).add_done_callback(on_end)

    def _end(self, client: str, turn: _Turn, ended: "Future[None]") -> None:
        # Only here: the thread goes on working after its client has left.
        self._running.remove(client)
        self._start()
        if turn.done.done():
            return
        if error := ended.exception():
            turn.done.set_exception(error)
        else:
            turn.done.set_result(None)

    def _forget(self, client: str, turn: _Turn) -> None:
        turns = self._waiting.get(client, [])
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[client]
