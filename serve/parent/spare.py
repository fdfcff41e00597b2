"""Keeps one engine process in reserve, so that a lost engine is replaced without the seconds in
which Python imports MLX."""

import asyncio
import json
import logging

from serve.core.errors import EngineError
from serve.parent.engine import EngineProcess

_logger = logging.getLogger(__name__)

# The pause before a spare starts: its imports would slow down the first steps after a fault.
_QUIET_SECONDS = 2.0


class Spare:
    """An engine process that has imported MLX and waits for an order. It holds no weights. Without
    is_on there is no spare, and every engine starts when it is needed."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._timer: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[EngineProcess | None] | None = None

    def prepare(self) -> None:
        """Starts the spare process a few seconds later, unless there is one. Must be called once in
        each life of the engines, so that a spare that keeps failing is not restarted endlessly."""
        if self._is_on and self._timer is None and not self._is_there:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_QUIET_SECONDS, self._begin)

    async def take(self) -> EngineProcess:
        """Returns the spare process if it is alive, or else a new one. Raises EngineError."""
        process = await self._taken()
        if process and process.is_alive:
            return process
        if process:
            reason = "The spare engine has ended."
            _logger.warning("event=no_spare_engine reason=%s", json.dumps(reason))
            await process.stop()
        return await EngineProcess.start()

    async def close(self) -> None:
        if process := await self._taken():
            await process.stop()

    @property
    def _is_there(self) -> bool:
        if self._starting is None or not self._starting.done():
            return self._starting is not None
        process = self._starting.result()
        return process is not None and process.is_alive

    def _begin(self) -> None:
        self._timer = None
        earlier = self._starting.result() if self._starting else None
        self._starting = asyncio.create_task(_started(earlier))

    async def _taken(self) -> EngineProcess | None:
        """Returns the spare process, which may have ended, and forgets it. If the caller is
        cancelled meanwhile, the process is still the spare one, and `close` ends it."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        starting = self._starting
        if starting is None:
            return None
        await asyncio.wait({starting})
        if self._starting is not starting:
            return None  # Another caller has taken it.
        self._starting = None
        return starting.result()


async def _started(earlier: EngineProcess | None) -> EngineProcess | None:
    """Starts a process in place of one that has ended. Returns None if that fails."""
    try:
        if earlier:
            await earlier.stop()
        return await EngineProcess.start()
    except EngineError as error:
        _logger.warning("event=no_spare_engine reason=%s", json.dumps(str(error)))
        return None
