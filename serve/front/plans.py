"""Which layers each of the ranks that are there gets: made by rank 0's engine, once for each
set of ranks."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from serve.core.config import ServeConfig
from serve.core.errors import ModelError, PlanError
from serve.core.plan import StagePlan
from serve.front.orders import plan_request, replan_request
from serve.parent.control import engine_ended, raise_if_error
from serve.parent.engine import EngineProcess


class Plans:
    """folder is where the model's config is."""

    def __init__(self, config: ServeConfig, folder: Path) -> None:
        self._config, self._folder = config, str(folder)
        self._known: dict[tuple[int, ...], list[StagePlan]] = {}
        self._too_small: dict[tuple[int, ...], str] = {}

    async def first(self, ring: tuple[int, ...], process: EngineProcess) -> list[StagePlan]:
        """For all ranks. Raises what is wrong with the plan or the model."""
        request = plan_request(self._config, len(ring), self._folder)
        return await self._make(ring, request, process)

    async def again(
        self, ring: tuple[int, ...], memory: Sequence[int], process: EngineProcess
    ) -> list[StagePlan]:
        """For those of a ring, each with so many bytes of memory, or 0. Raises PlanError if the
        model does not fit; the engine's process has ended then."""
        if ring in self._too_small:
            raise PlanError(self._too_small[ring])
        if ring in self._known:
            return self._known[ring]
        request = replan_request(self._config, ring, memory, self._folder)
        return await self._make(ring, request, process)

    def refuse(self, ring: tuple[int, ...], reason: str) -> None:
        """It was tried, and is too small."""
        self._too_small[ring] = reason

    async def _make(
        self, ring: tuple[int, ...], request: dict[str, object], process: EngineProcess
    ) -> list[StagePlan]:
        process.link.send_json(request)
        try:
            reply = process.link.receive_json()
            message = await asyncio.wait_for(reply, self._config.load_timeout)
        except TimeoutError as error:
            raise ModelError(
                f"No plan could be made within {self._config.load_timeout:g} s: does config.json "
                "fit the weights? (--load-timeout)"
            ) from error
        if message is None:
            message = engine_ended(0, await process.wait())
        raise_if_error(message)
        stages = map(StagePlan.from_json, message["stages"])
        self._known[ring] = [replace(s, rank=rank) for s, rank in zip(stages, ring, strict=True)]
        return self._known[ring]
