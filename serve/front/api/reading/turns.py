"""Decides which large body is read next: one at a time, and the clients take turns."""

import asyncio
import itertools
from dataclasses import dataclass, field

from serve.core.errors import OverloadedError

MAX_SMALL_BYTES = 32 << 10
MAX_WAITING = 32  # of larger bodies


@dataclass(order=True, slots=True)
class _Waiting:
    """A body that waits. Of one client's, those that the model answers come before others, and
    small ones before large ones."""

    is_only_text: bool
    num_bytes: int
    number: int
    client: str = field(compare=False)
    begun: "asyncio.Future[None]" = field(compare=False)


class Turns:
    """The queue of one process, in one event loop.

    Bodies that the model answers come before others. Within both kinds each client has one turn
    before any client has the next.
    """

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._is_busy = False
        self._last_turns: dict[str, int] = {}  # of the clients that wait or have just had a turn

    async def begin(self, client: str, is_answered: bool, num_bytes: int) -> None:
        """Waits for a turn, which the caller must end. Raises OverloadedError if too many wait."""
        if not self._is_busy:
            self._is_busy = True
            self._last_turns = {client: next(self._numbers)}
            return
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        waiting = _Waiting(not is_answered, num_bytes, number, client, begun)
        self._waiting.append(waiting)
        self._refuse_last()
        try:
            await begun
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not begun.cancelled() and begun.exception() is None:
                self.end()  # The turn began at the same moment.
            raise

    def end(self) -> None:
        """Gives the turn to the next body, if one waits."""
        self._waiting = [each for each in self._waiting if not each.begun.done()]
        if not self._waiting:
            self._is_busy = False
            return
        waiting = min(self._waiting, key=self._order)
        self._waiting.remove(waiting)
        self._last_turns[waiting.client] = next(self._numbers)
        clients = {each.client for each in self._waiting} | {waiting.client}
        self._last_turns = {
            client: number for client, number in self._last_turns.items() if client in clients
        }
        waiting.begun.set_result(None)

    def _order(self, waiting: _Waiting) -> tuple[bool, int, _Waiting]:
        return waiting.is_only_text, self._last_turns.get(waiting.client, -1), waiting

    def _refuse_last(self) -> None:
        """If too many wait, refuses the last body of the client that has the most of them: a client
        that fills the queue does not keep out the bodies of others, or its own smaller ones."""
        large = [each for each in self._waiting if each.num_bytes > MAX_SMALL_BYTES]
        if len(large) <= MAX_WAITING:
            return
        clients = [each.client for each in large]
        last = max(large, key=lambda each: (clients.count(each.client), each))
        self._waiting.remove(last)
        if not last.begun.done():
            last.begun.set_exception(
                OverloadedError(
                    f"{MAX_WAITING} requests with large bodies are already waiting: try "
                    "again later.",
                    code="queue_full",
                )
            )
