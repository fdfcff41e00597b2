"""The registry of LoRA adapters: names that clients use, and which version each stands for.

Each time that files are read they become a new version, a number that is never used again. All
ranks read and check them first. When all are satisfied, the name gets the new version: sequences
that begin from then on have it, and running ones keep theirs until they end.
"""

import asyncio
import itertools
import json
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from serve.core.config import NO_ADAPTER_NAME, ServeConfig, hub_id, may_name_adapter
from serve.core.errors import (
    AdapterError,
    BrigadeError,
    ClusterError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UsageError,
)
from serve.core.messages import AdapterRead, AdapterRefused, LoadAdapter
from serve.core.plan import memory_of
from serve.front.pipeline.adapter import Adapter, Held, Source, checked, num_bytes
from serve.hub.access import FAILURES, is_refusal
from serve.hub.partial import pin
from serve.hub.repo import ADAPTER

_logger = logging.getLogger(__name__)
Json = dict[str, Any]


class Ranks(Protocol):
    """What the registry needs of the engine."""

    async def loaded(self) -> None:
        """Returns when the engines can be told something, which may be some seconds after a
        fault. Raises UnavailableError before they ever could."""

    def tell_engines(self, message: LoadAdapter) -> None: ...

    def end_with_adapter(self, version: int, error: BrigadeError) -> None:
        """Ends the requests that run or wait with it."""

    def retire_adapter(self, version: int) -> None:
        """No new sequence has it; the stages free it after the last one."""

    def num_with_adapter(self, version: int) -> int:
        """Sequences that run or wait with it."""

    @property
    def ring(self) -> tuple[int, ...]:
        """The ranks that take part."""


# One that ends the engines would end the next ones, too.
_MOST_TRIES = 2


class _Late(AdapterError):
    """A rank says nothing."""


class _Interrupted(Exception):
    """The engines that were asked are gone."""


class Adapters:
    def __init__(self, config: ServeConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._adapters: dict[str, Adapter] = {}
        self._versions = itertools.count(1)
        self._held: dict[int, Held] = {}
        self._answers: dict[int, dict[int, AdapterRead | AdapterRefused]] = {}
        self._answered = asyncio.Event()
        self._broken: BrigadeError | None = None
        self._num_interrupted = 0
        self._lock = asyncio.Lock()
        self.default = config.model_name
        self.num_loaded, self.num_swapped, self.load_seconds = 0, 0, 0.0
        self.num_requests: Counter[str] = Counter()

    # --- for requests

    def check(self, name: str, param: str = "model") -> None:
        """Raises NotFoundError unless it is the model's name or that of an adapter."""
        if name != self._config.model_name and name not in self._adapters:
            raise NotFoundError(
                f"The model {name[:100]!r} does not exist: this server has "
                f"{', '.join(map(repr, [self._config.model_name, *self._adapters]))}.",
                param=param,
                code="model_not_found",
            )

    async def version(self, name: str) -> int:
        """What a sequence of this model begins with; 0 for none. Submit it before anything
        else is awaited, because the next version may come. Raises RequestError."""
        self.check(name)
        if name == self._config.model_name:
            return 0
        try:
            adapter = await self._loaded(name)
        except AdapterError as error:
            _logger.error("event=adapter_lost name=%s reason=%s", name, error)
            raise UnavailableError(f"The adapter {name!r} cannot be read again.") from error
        adapter.used_at = time.monotonic()
        self.num_requests[name] += 1
        return adapter.version

    async def _loaded(self, name: str) -> Adapter:
        """Read again if it was evicted. Raises NotFoundError, also if it goes meanwhile."""
        while True:
            self.check(name)
            adapter = self._adapters[name]
            if adapter.version:
                return adapter
            async with self._lock:
                if adapter is self._adapters.get(name) and not adapter.version:
                    await self._load(adapter)

    # --- for whoever administrates

    async def load_at_start(self) -> None:
        for word in self._config.lora:
            name, _, path = word.partition("=")
            if name not in self._adapters:  # as it is after a fault
                try:
                    source = Source(path, commit=await self._commit(path, Path()))
                    await self._add(Adapter(name, source), in_place=False)
                except AdapterError as error:
                    raise UsageError(f"--lora {name}: {error}") from error

    async def load(self, name: str, path: str, in_place: bool) -> None:
        """Raises AdapterError, and then everything is as it was."""
        root = self._config.adapter_root
        commit = await self._commit(path, root)
        if root is None and commit is None:
            raise AdapterError(
                "Adapters are loaded from below --adapter-root, or from the hub with "
                "--allow-hub-adapters: start with one of them.",
                403,
            )
        source = Source(path, None if commit else str(root), commit)
        await self._add(Adapter(name, source), in_place)

    async def _commit(self, path: str, root: Path | None) -> str | None:
        """What all ranks are to read of `org/name` on the hub, which stays the same when it is
        read again; None for a folder. Raises AdapterError."""
        repo = hub_id(Path(path), root or Path())
        if repo is None or not self._config.allow_hub_adapters:
            return None
        try:
            pinned = await asyncio.to_thread(pin, repo, None, self._config.cache_dir, ADAPTER)
        except ModelError as error:
            cause = error.__cause__
            status = 404 if is_refusal(cause) else 503 if isinstance(cause, FAILURES) else 400
            raise AdapterError(str(error), status) from error
        return pinned.snapshot.commit

    async def _add(self, adapter: Adapter, in_place: bool) -> None:
        name = adapter.name
        if not may_name_adapter(name, self._config.model_name):
            raise RequestError(f"{name[:100]!r} {NO_ADAPTER_NAME}", param="lora_name")
        async with self._lock:
            old = self._adapters.get(name)
            if old and not in_place:
                raise RequestError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    param="lora_name",
                )
            await self._load(adapter, old)
            adapter.is_pinned = old is not None and old.is_pinned
            self._adapters[name] = adapter
            if old:
                self.num_swapped += 1
                self._retire(old)

    async def unload(self, name: str) -> None:
        async with self._lock:
            adapter = self._adapters.pop(name, None)
        if adapter is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        self._retire(adapter)
        if self.default == name:
            self.default = self._config.model_name

    async def change(
        self, name: str, pin: bool | None, default: bool | None, preload: bool
    ) -> Json:
        self.check(name, "lora_name")
        if name == self._config.model_name and (preload or pin is not None):
            raise RequestError(f"{name!r} is the model itself: it stays.", param="lora_name")
        if preload or pin:
            await self._loaded(name)
        if pin is not None and (adapter := self._adapters.get(name)):
            adapter.is_pinned = pin
        if default is not None:
            self.default = name if default else self._config.model_name
        return {"default": self.default, "data": self.described()}

    def described(self) -> list[Json]:
        return [
            {
                "name": adapter.name,
                "version": adapter.version or None,
                "rank": adapter.rank,
                "scale": adapter.scale,
                "targets": adapter.targets,
                "bytes": adapter.num_bytes,
                "num_running": self._num_running(adapter),
                "loaded_at": adapter.loaded_at,
                "source": str(adapter.source),
                "pinned": adapter.is_pinned,
            }
            for adapter in self._adapters.values()
        ]

    def name_of(self, version: int) -> str | None:
        """What clients call it, or where it was read if no name stands for it any more. None for
        the model without an adapter."""
        names = [a.name for a in self._adapters.values() if version and a.version == version]
        return names[0] if names else self._source_of(version)

    def _source_of(self, version: int) -> str | None:
        held = self._held.get(version)
        return str(held.source) if held else f"version {version}" if version else None

    @property
    def names(self) -> list[str]:
        """Of the model and its adapters, the default first."""
        names = [self._config.model_name, *self._adapters]
        return sorted(names, key=lambda name: name != self.default)

    def loaded_versions(self) -> list[int]:
        return [adapter.version for adapter in self._adapters.values() if adapter.version]

    def statistics(self) -> Json:
        return {
            "num_loaded": self.num_loaded,
            "num_swapped": self.num_swapped,
            "load_seconds": self.load_seconds,
            "num_requests": dict(self.num_requests),
        }

    # --- loading

    async def _load(self, adapter: Adapter, instead_of: Adapter | None = None) -> None:
        """Gives the adapter a version that all ranks hold. Raises AdapterError."""
        started, version = time.monotonic(), next(self._versions)
        try:
            answers = await self._ask_until_answered(version, adapter)
            held_bytes = num_bytes(answers)
            self._make_room(held_bytes, instead_of)
        except BaseException as error:
            self._ranks.retire_adapter(version)
            # Its number is not used again: a rank that is late may still hold it.
            reason = json.dumps(str(error) or type(error).__name__)
            refused = (adapter.name, version, reason)
            _logger.warning("event=adapter_refused name=%s version=%d reason=%s", *refused)
            raise
        first = answers[0]
        adapter.version = version
        adapter.num_bytes = held_bytes
        adapter.rank = first.lora_rank
        adapter.scale = first.scale
        adapter.targets = first.kinds
        adapter.loaded_at, adapter.used_at = time.time(), time.monotonic()
        self._held[version] = Held(adapter.source, answers)
        self.num_loaded += 1
        self.load_seconds += time.monotonic() - started
        _logger.info(
            "event=adapter_loaded name=%s version=%d bytes=%d seconds=%.3f",
            *(adapter.name, version, sum(held_bytes), time.monotonic() - started),
        )

    async def _ask_until_answered(self, version: int, adapter: Adapter) -> dict[int, AdapterRead]:
        for _ in range(_MOST_TRIES):
            await self._ranks.loaded()
            try:
                return await self._ask(version, adapter.source)
            except _Interrupted:
                continue
        raise AdapterError(f"The engines ended {_MOST_TRIES} times while they read it.", 503)

    async def _ask(self, version: int, source: Source) -> dict[int, AdapterRead]:
        """What every rank says after it has read and checked the files."""
        answers: dict[int, AdapterRead | AdapterRefused] = {}
        self._answers[version] = answers
        message = LoadAdapter(
            version=version,
            path=source.path,
            root=source.root,
            commit=source.commit,
            max_rank=self._config.max_lora_rank,
            held=list(self._held),
        )
        num_interrupted = self._num_interrupted
        deadline = time.monotonic() + self._config.load_timeout
        try:
            self._ranks.tell_engines(message)
            while len(answers) < len(self._ranks.ring):
                if self._broken:
                    raise self._broken
                self._answered.clear()
                await asyncio.wait_for(self._answered.wait(), deadline - time.monotonic())
                # Also if all have answered: new engines hold what is registered by then.
                if self._num_interrupted != num_interrupted:
                    raise _Interrupted
        except TimeoutError as error:
            late = [rank for rank in self._ranks.ring if rank not in answers]
            raise _Late(f"Rank {late[0]} does not answer (--load-timeout).", 503) from error
        finally:
            del self._answers[version]
        return checked(answers)

    def on_answer(self, rank: int, answer: AdapterRead | AdapterRefused) -> None:
        if answer.version in self._answers:
            self._answers[answer.version][rank] = answer
            self._answered.set()
        elif answer.version not in self._held:  # else it is from before a fault
            self._ranks.retire_adapter(answer.version)  # It took too long.

    # --- engines that start anew

    def interrupt(self) -> None:
        """The engines are gone, and what they held and were asked."""
        self._num_interrupted += 1
        self._answered.set()

    async def restore(self) -> None:
        """Every rank reads again what it is to hold, under the same versions."""
        for version, held in list(self._held.items()):
            if not self._is_wanted(version):
                self._held.pop(version, None)
                continue
            try:
                answers = await self._ask(version, held.source)
                if not held.is_same(answers):
                    raise AdapterError(f"The files in {held.source} are others than before.")
                self._hold(version, Held(held.source, answers))
            except _Late as error:
                raise ClusterError(str(error)) from error  # New engines may answer.
            except AdapterError as error:
                self._lose(version, error)
            if not self._is_wanted(version):  # It was unloaded meanwhile.
                self._ranks.retire_adapter(version)
        # On fewer ranks each has more layers.
        if self._config.adapter_memory and not self._evict([0] * len(self._ranks.ring), None):
            _logger.warning("event=over_adapter_memory reason='all are pinned or in use'")

    def _hold(self, version: int, held: Held) -> None:
        self._held[version] = held
        for adapter in self._adapters.values():
            if adapter.version == version:
                adapter.num_bytes = held.num_bytes

    def _is_wanted(self, version: int) -> bool:
        is_current = any(version == adapter.version for adapter in self._adapters.values())
        return is_current or self._ranks.num_with_adapter(version) > 0

    def _lose(self, version: int, error: AdapterError) -> None:
        """Its name is read again on use, as a new version."""
        _logger.error("event=adapter_lost version=%d reason=%s", version, error)
        for adapter in self._adapters.values():
            if adapter.version == version:
                adapter.version = 0
        lost = UnavailableError("The adapter of this request cannot be read again.")
        self._ranks.end_with_adapter(version, lost)
        self._ranks.retire_adapter(version)
        self._held.pop(version, None)

    def fail(self, error: BrigadeError) -> None:
        """Nobody answers any more."""
        self._broken = error
        self._answered.set()

    def _retire(self, adapter: Adapter) -> None:
        if adapter.version:
            self._ranks.retire_adapter(adapter.version)
            adapter.version = 0
        current = {other.version for other in self._adapters.values()}
        for version in self._held.keys() - current:
            if not self._ranks.num_with_adapter(version):
                del self._held[version]

    def _make_room(self, num_bytes: list[int], old: Adapter | None) -> None:
        """Idle adapters go, the least recently used first, until there is room for one more
        in the place of the old one. Raises OverloadedError if there is none."""
        if self._config.adapter_memory is None:
            return
        if not _fits([num_bytes], memory_of(self._config.adapter_memory, self._ranks.ring)):
            raise AdapterError(f"The adapter has {max(num_bytes)} bytes: over --adapter-memory.")
        if not self._evict(num_bytes, old):
            raise OverloadedError(
                "All adapters in --adapter-memory are pinned or in use: try later, or unpin or "
                "unload one."
            )

    def _evict(self, num_bytes: list[int], old: Adapter | None) -> bool:
        """Whether there is room for so many bytes more on each rank, with what is idle gone."""
        assert self._config.adapter_memory is not None
        most = memory_of(self._config.adapter_memory, self._ranks.ring)
        while not _fits([num_bytes, *self._held_beside(old)], most):
            idle = [a for a in self._adapters.values() if a is not old and self._is_idle(a)]
            if not idle:
                return False
            going = min(idle, key=lambda adapter: adapter.used_at)
            _logger.info("event=adapter_evicted name=%s version=%d", going.name, going.version)
            self._retire(going)
        return True

    def _is_idle(self, adapter: Adapter) -> bool:
        return bool(adapter.version) and not adapter.is_pinned and not self._num_running(adapter)

    def _num_running(self, adapter: Adapter) -> int:
        # Version 0 is everybody's who has none.
        return self._ranks.num_with_adapter(adapter.version) if adapter.version else 0

    def _held_beside(self, old: Adapter | None) -> list[list[int]]:
        """The bytes of versions that are to stay, or are retired and still in use."""
        staying = {a.version for a in self._adapters.values() if a is not old}
        used = {v for v in self._held if v in staying or self._ranks.num_with_adapter(v)}
        return [held.num_bytes for version, held in self._held.items() if version in used]


def _fits(held: list[list[int]], most: list[int]) -> bool:
    return all(sum(sizes) <= limit for *sizes, limit in zip(*held, most, strict=True))
