"""The pipeline as the HTTP server sees it: sequences go in, events come out.

Composed of the requests with their scheduler, the adapters, the life cycle of the engines and its
driver. Everything here runs in one event loop, so that nothing needs a lock.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as ReadableList
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve.core.config import Cluster, ServeConfig
from serve.core.errors import BrigadeError, UnavailableError
from serve.front.adapters.loader import AdapterLoader
from serve.front.pipeline.capacity import better_split, kept_bytes
from serve.front.pipeline.driver import Driver, StartView
from serve.front.pipeline.generation import Generation
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.lifecycle import Lifecycle
from serve.front.pipeline.membership import Membership
from serve.front.pipeline.requests import Requests
from serve.front.pipeline.status import (
    StageSpan,
    chrome_trace,
    first_shards,
    moved,
    spans_after,
)
from serve.front.pipeline.watch import is_silent
from serve.parent.engines import Engines


class Engine:
    """The engines of all ranks. Requests that come while engines restart wait for them.

    folder contains the model's config, facts describe this rank, and view shows the progress of the
    start.
    """

    def __init__(
        self,
        config: ServeConfig,
        cluster: Cluster,
        folder: Path,
        facts: dict[str, str],
        view: StartView,
    ) -> None:
        self._config = config
        is_launched = cluster.leash is not None
        num_stages = cluster.num_ranks // (config.num_shards or 1)
        engines = Engines(cluster, facts, config.constants.keeps_spare_engine)
        self._membership = Membership(config, cluster.hosts, facts, is_launched=is_launched)
        self._membership.ranks[0].pid = os.getpid()
        self._lifecycle = Lifecycle(config, self._membership)
        self._requests = Requests(config, num_stages, engines)
        self.adapters = AdapterLoader(config, engines, self._requests)
        self._driver = Driver(
            config,
            cluster,
            folder,
            engines,
            self._lifecycle,
            self._requests,
            self.adapters,
            view,
        )

    async def listen(self) -> None:
        """Starts to listen for the other ranks. Raises AddressError."""
        await self._driver.listen()

    def start(self) -> None:
        """Starts the ranks in the background. ready_reason says how far they are."""
        self._driver.start()

    async def close(self) -> None:
        """Ends the engines, and tells the other ranks to end."""
        await self._driver.close()

    async def failed(self) -> BrigadeError:
        """Waits until the cluster has failed for good, and returns the reason."""
        return await asyncio.shield(self._driver.failure)

    def submit(
        self,
        prompts: ReadableList[Prompt],
        adapter_version: int = 0,
        cache_scope: str = "",
    ) -> Generation:
        """Begins a request. Raises UnavailableError, OverloadedError or RequestError."""
        reason = self._not_ready()
        if reason and (self._driver.failure.done() or not self._lifecycle.has_worked):
            raise UnavailableError(f"The cluster is not ready ({reason}): try again later.")
        return self._requests.submit(prompts, adapter_version, cache_scope)

    # --- what is seen from outside

    @property
    def is_complete(self) -> bool:
        """Whether no rank is missing."""
        return not self._membership.missing

    @property
    def makes_checkpoints(self) -> bool:
        """Whether the boundaries of prompts are needed: some caches cannot be cut."""
        return self._requests.scheduler.reuse == "checkpoints"

    def ready_reason(self) -> str | None:
        """Returns the reason why requests cannot be served, in one line, or None. Requests are
        still accepted while a rank is silent for a short time, and wait for it."""
        if reason := self._not_ready():
            return reason
        now = time.monotonic()
        silent = [stage.rank for stage in self._membership.stages if is_silent(stage, now)]
        return f"rank {silent[0]}: silent" if silent else None

    def _not_ready(self) -> str | None:
        if self._driver.failure.done():
            return "the cluster failed"  # The reason may name hosts, so only the log has it.
        if awaited := self._membership.awaited():
            return awaited
        if self._lifecycle.is_working:
            return None
        return "warming up" if self._requests.is_warming_up else "loading adapters"

    def pipeline(self) -> dict[str, Any]:
        """Returns the state of the stages and the scheduler, as /admin/pipeline shows it."""
        lifecycle = self._lifecycle
        membership = self._membership
        scheduler = self._requests.scheduler
        stages = [stage.to_json() for stage in membership.stages]
        recovery_seconds = round(lifecycle.recovery.seconds, 3)
        of_parts: dict[str, Any] = {}
        for part in scheduler.parts:
            of_parts |= part.to_json()
        return {
            "model": self._config.model_name,
            "num_ranks": len(membership.ring),
            "tensor_parallel": membership.num_shards,
            "stages": stages,
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "kv_tokens": scheduler.num_held_tokens,
            "max_kv_tokens": scheduler.budget.max_tokens,
            "prefix_cache": self._prefix_cache() | of_parts.pop("prefix_cache", {}),
            **of_parts,
            "better_split": better_split(first_shards(membership.stages)),
            "adapters": self.adapters.registry.statistics.to_json(),
            "num_restarts": lifecycle.life,
            "recovery_seconds": recovery_seconds,
        }

    def _prefix_cache(self) -> dict[str, Any]:
        scheduler = self._requests.scheduler
        kept = scheduler.budget.kept
        counts = scheduler.prefix_counts.to_json()
        return {
            "reuse": scheduler.reuse,
            **counts,
            "num_bytes": kept_bytes(kept, self._membership.stages),
            **kept.to_json(),
        }

    def clear_prefixes(self) -> None:
        """Drops all that the prefix cache keeps, in memory and on disk."""
        self._requests.clear_prefixes()

    def timeline(self, seconds: float) -> dict[str, Any]:
        """Returns the last seconds as a Chrome trace."""
        now = time.monotonic()
        since_1970 = time.time() - now
        return chrome_trace(self._membership.stages, now - seconds, since_1970)

    def state(self) -> dict[str, Any]:
        """Returns the state of the life cycle, in words for operators, and the latest fault."""
        lifecycle = self._lifecycle
        fault = lifecycle.recovery.last_fault
        return {
            "name": lifecycle.state.name.lower(),
            "what": lifecycle.state.value,
            "reason": self.ready_reason(),
            "has_worked": lifecycle.has_worked,
            "missing": self._membership.missing,
            "fault": fault and fault.reason,
            "fault_seconds_ago": fault and round(time.monotonic() - fault.time),
        }

    def spans_after(self, numbers: Mapping[int, int], seconds: float) -> list[StageSpan]:
        """Returns the spans of the last seconds, the latest first. For each rank, only spans with a
        higher number than the rank's entry in numbers count. Their times are seconds since 1970."""
        now = time.monotonic()
        since_1970 = time.time() - now
        found = spans_after(
            self._membership.stages,
            numbers,
            now - seconds,
            self._requests.step_log,
        )
        return [replace(each, span=moved(each.span, since_1970)) for each in found]
