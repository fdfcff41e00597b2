"""The registry of LoRA adapters: it maps the names that clients use to versions. Pure.

Each time files are read, they become a new version with a number of its own.
`serve.front.adapters.loader` makes the ranks read them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve.core.amounts import memory_of
from serve.core.config import NO_ADAPTER_NAME, ServeConfig, may_name_adapter
from serve.core.errors import AdapterError, NotFoundError, RequestError
from serve.core.helper_messages import ModelNames
from serve.front.adapters.adapter import Adapter, LoadedVersion


@dataclass(frozen=True, slots=True)
class Eviction:
    adapters: list[Adapter]
    is_enough: bool


@dataclass(slots=True)
class AdapterStatistics:
    """The numbers of loads since the start, and of requests for each adapter since its name was
    registered. Names that are gone are not counted, because there may be any number of them."""

    num_loaded: int = 0
    num_swapped: int = 0
    load_seconds: float = 0.0
    num_requests: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_loaded": self.num_loaded,
            "num_swapped": self.num_swapped,
            "load_seconds": self.load_seconds,
            "num_requests": dict(self.num_requests),
        }


class AdapterRegistry:
    """The adapters that clients can ask for, by name, and the versions that ranks may hold, also
    replaced ones in use. num_sequences counts the sequences that run or wait with a version."""

    def __init__(self, config: ServeConfig, num_sequences: Callable[[int], int]) -> None:
        self._model_name = config.model_name
        self._memory = config.adapter_memory
        self._num_sequences = num_sequences
        self.by_name: dict[str, Adapter] = {}
        self.versions: dict[int, LoadedVersion] = {}
        self.default = config.model_name
        self.statistics = AdapterStatistics()

    # --- names

    @property
    def served(self) -> ModelNames:
        """The names that requests may give."""
        return ModelNames(tuple(self.names), self.default)

    def check_new(self, name: str, in_place: bool) -> Adapter | None:
        """Returns the adapter that a new adapter with this name replaces, if there is one. Raises
        RequestError if an adapter cannot have this name, or if the name is taken and must not be
        replaced."""
        if not may_name_adapter(name, self._model_name):
            raise RequestError(
                f"{name[:100]!r} {NO_ADAPTER_NAME}", param="lora_name", code="adapter_name"
            )
        old = self.by_name.get(name)
        if old and not in_place:
            raise RequestError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                param="lora_name",
                code="name_taken",
            )
        return old

    def put(self, adapter: Adapter) -> None:
        """Registers the adapter under its name. It is pinned if its predecessor was."""
        old = self.by_name.get(adapter.name)
        adapter.is_pinned = old is not None and old.is_pinned
        self.by_name[adapter.name] = adapter

    def remove(self, name: str) -> Adapter:
        adapter = self.by_name.pop(name, None)
        if adapter is None:
            raise adapter_not_found(name)
        self.statistics.num_requests.pop(name, None)
        return adapter

    @property
    def names(self) -> list[str]:
        """The names of the model and its adapters, the default first."""
        names = [self._model_name, *self.by_name]
        return sorted(names, key=lambda name: name != self.default)

    def name_of(self, version: int) -> str | None:
        """Returns the name that clients use for a version, or its source if no name refers to it
        any more; None for the model without an adapter."""
        if not version:
            return None
        for adapter in self.by_name.values():
            if adapter.version == version:
                return adapter.name
        loaded = self.versions.get(version)
        return str(loaded.source) if loaded else f"version {version}"

    def described(self) -> list[dict[str, Any]]:
        return [self._described(adapter) for adapter in self.by_name.values()]

    def _described(self, adapter: Adapter) -> dict[str, Any]:
        first = adapter.loaded.answers[0]
        return {
            "name": adapter.name,
            "version": adapter.version or None,
            "rank": first.lora_rank,
            "scale": first.scale,
            "targets": first.kinds,
            "bytes": adapter.loaded.num_bytes,
            "num_running": self._num_running(adapter),
            "loaded_at": adapter.loaded_at,
            "source": str(adapter.source),
            "pinned": adapter.is_pinned,
        }

    # --- versions

    def hold(self, version: int, loaded: LoadedVersion) -> None:
        """Stores a version that the ranks hold. A change of the ring changes its sizes."""
        self.versions[version] = loaded
        for adapter in self.by_name.values():
            if adapter.version == version:
                adapter.loaded = loaded

    def is_wanted(self, version: int) -> bool:
        """Whether a name refers to this version, or a sequence uses it."""
        return version in self.loaded_versions() or self._num_sequences(version) > 0

    def loaded_versions(self) -> list[int]:
        return [adapter.version for adapter in self.by_name.values() if adapter.version]

    def release(self, adapter: Adapter) -> int:
        """Takes the version from an adapter and returns it, or 0 if it has none. The ranks hold it
        until its last sequence has ended."""
        version = adapter.version
        adapter.version = 0
        for held in self.versions.keys() - self.loaded_versions():
            if not self._num_sequences(held):
                del self.versions[held]
        return version

    def lose(self, version: int) -> None:
        """Forgets a version that no rank can read again. Its adapter is read as a new version when
        it is next used."""
        for adapter in self.by_name.values():
            if adapter.version == version:
                adapter.version = 0
        self.versions.pop(version, None)

    # --- memory

    def evictions(
        self,
        num_bytes: list[int],
        old: Adapter | None,
        ring: Sequence[int],
    ) -> Eviction:
        """Returns the idle adapters, the least recently used first, that have to be evicted so that
        each rank of the ring has room for num_bytes in place of the old adapter. Raises
        AdapterError if no eviction could make room."""
        if self._memory is None:
            return Eviction([], is_enough=True)
        limits = memory_of(self._memory, ring)
        if not _fits([num_bytes], limits):
            raise AdapterError(
                f"The adapter has {max(num_bytes)} bytes, more than --adapter-memory.",
                code="no_memory",
            )
        others = [adapter for adapter in self.by_name.values() if adapter is not old]
        idle = [adapter for adapter in others if self._is_idle(adapter)]
        idle.sort(key=lambda adapter: adapter.used_at)
        evicted: list[Adapter] = []
        while True:
            staying = [adapter for adapter in others if adapter not in evicted]
            if _fits([num_bytes, *self._sizes(staying)], limits):
                return Eviction(evicted, is_enough=True)
            if len(evicted) == len(idle):
                return Eviction(evicted, is_enough=False)
            evicted.append(idle[len(evicted)])

    def _sizes(self, staying: list[Adapter]) -> list[list[int]]:
        staying_versions = {adapter.version for adapter in staying}
        sizes = []
        for version, loaded in self.versions.items():
            if version in staying_versions or self._num_sequences(version):
                sizes.append(loaded.num_bytes)
        return sizes

    def _is_idle(self, adapter: Adapter) -> bool:
        return bool(adapter.version) and not adapter.is_pinned and not self._num_running(adapter)

    def _num_running(self, adapter: Adapter) -> int:
        if not adapter.version:
            return 0  # Sequences without an adapter have version 0 too.
        return self._num_sequences(adapter.version)


def adapter_not_found(name: str) -> NotFoundError:
    return NotFoundError(
        f"The lora adapter '{name}' cannot be found.",
        param="lora_name",
        code="adapter_not_found",
    )


def _fits(sizes: list[list[int]], limits: list[int]) -> bool:
    """Whether the bytes on each rank are within its limit. sizes gives, by version, the bytes on
    each rank."""
    by_rank = zip(*sizes, strict=True)
    totals = [sum(held) for held in by_rank]
    pairs = zip(totals, limits, strict=True)
    return all(total <= limit for total, limit in pairs)
