"""Limits how fast large bodies are received: one part of one body in each tick of the event loop,
so that many uploads at once delay other requests no more than one does."""

import asyncio
from collections import deque

MAX_FREE_BYTES = 64 << 10  # of each body


class Pace:
    """Lets large bodies take turns after each part that arrives, so slow clients delay nobody."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def wait(self) -> None:
        """Returns in a tick in which no other body continues, first come first served."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            # It runs in the next tick, after the loop has looked for other events.
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_scheduled = False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # Its client may have left.
                turn.set_result(None)
                break
        self._schedule()
