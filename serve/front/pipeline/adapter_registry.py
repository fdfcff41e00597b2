"""The registry of LoRA adapters: it maps the names that clients use to versions. Pure.

Each time that files are read they become a new version, a number that is never used again.
`serve.front.pipeline.adapter_loader` has the ranks read them.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve.core.config import NO_ADAPTER_NAME, ServeConfig, may_name_adapter
from serve.core.errors import AdapterError, NotFoundError, RequestError
from serve.core.plan import memory_of
from serve.front.pipeline.adapter import Adapter, LoadedVersion


@dataclass(frozen=True, slots=True)
class Eviction:
    """The adapters that have to go for a new one, and whether there is room for it then."""

    adapters: list[Adapter]
    is_enough: bool


@dataclass(slots=True)
class AdapterStatistics:
    """The numbers of loads and requests since the start."""

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
    """by_name are the adapters that clients can ask for. versions are those that ranks may hold,
    also replaced ones that are still in use: num_sequences tells how many sequences run or wait
    with a version."""

    def __init__(self, config: ServeConfig, num_sequences: Callable[[int], int]) -> None:
        self._model_name = config.model_name
        self._memory = config.adapter_memory
        self._num_sequences = num_sequences
        self._version_numbers = itertools.count(1)
        self.by_name: dict[str, Adapter] = {}
        self.versions: dict[int, LoadedVersion] = {}
        self.default = config.model_name
        self.statistics = AdapterStatistics()

    # --- names

    def check(self, name: str, param: str = "model") -> None:
        """Raises NotFoundError unless it is the model's name or that of an adapter."""
        if name != self._model_name and name not in self.by_name:
            raise NotFoundError(
                f"The model {name[:100]!r} does not exist: this server has "
                f"{', '.join(map(repr, [self._model_name, *self.by_name]))}.",
                param=param,
                code="model_not_found",
            )

    def meant(self, name: str) -> str:
        """The model or adapter that a request means: the default one if it names none, and those of
        the prefix and the suffix that LiteLLM and Ollama put to names. Raises NotFoundError."""
        for each in (name, name.removeprefix("openai/"), name.removesuffix(":latest")):
            if each == self._model_name or each in self.by_name:
                return each
        if name in ("", "default"):
            return self.default
        self.check(name)
        return name

    def check_new(self, name: str, in_place: bool) -> Adapter | None:
        """The adapter that a new one of this name replaces, if there is one. Raises RequestError
        if the name cannot be an adapter's, or is taken and not to be replaced."""
        if not may_name_adapter(name, self._model_name):
            raise RequestError(f"{name[:100]!r} {NO_ADAPTER_NAME}", param="lora_name")
        old = self.by_name.get(name)
        if old and not in_place:
            raise RequestError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                param="lora_name",
            )
        return old

    def put(self, adapter: Adapter) -> None:
        """Gives the name to this adapter, which is pinned if the one that it replaces was."""
        old = self.by_name.get(adapter.name)
        adapter.is_pinned = old is not None and old.is_pinned
        self.by_name[adapter.name] = adapter

    def remove(self, name: str) -> Adapter:
        """Takes the name away. Raises NotFoundError."""
        adapter = self.by_name.pop(name, None)
        if adapter is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        return adapter

    @property
    def names(self) -> list[str]:
        """The names of the model and its adapters, the default first."""
        names = [self._model_name, *self.by_name]
        return sorted(names, key=lambda name: name != self.default)

    def name_of(self, version: int) -> str | None:
        """The name that clients use for a version, or its source if no name refers to it any more;
        None for the model without an adapter."""
        if not version:
            return None
        for adapter in self.by_name.values():
            if adapter.version == version:
                return adapter.name
        loaded = self.versions.get(version)
        return str(loaded.source) if loaded else f"version {version}"

    def described(self) -> list[dict[str, Any]]:
        """The adapters as the HTTP API lists them."""
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
            for adapter in self.by_name.values()
        ]

    # --- versions

    def new_version(self) -> int:
        return next(self._version_numbers)

    def hold(self, version: int, loaded: LoadedVersion) -> None:
        """The ranks hold this version; on another ring than before it has other sizes."""
        self.versions[version] = loaded
        for adapter in self.by_name.values():
            if adapter.version == version:
                adapter.num_bytes = loaded.num_bytes

    def is_wanted(self, version: int) -> bool:
        """Whether a name stands for this version, or a sequence has it."""
        return version in self.loaded_versions() or self._num_sequences(version) > 0

    def loaded_versions(self) -> list[int]:
        """The versions for which names stand."""
        return [adapter.version for adapter in self.by_name.values() if adapter.version]

    def release(self, adapter: Adapter) -> int:
        """The version that the adapter had, which goes with its last sequence; 0 for none."""
        version, adapter.version = adapter.version, 0
        for held in self.versions.keys() - self.loaded_versions():
            if not self._num_sequences(held):
                del self.versions[held]
        return version

    def lose(self, version: int) -> None:
        """No rank can hold this version again: its name is read again on use, as a new one."""
        for adapter in self.by_name.values():
            if adapter.version == version:
                adapter.version = 0
        self.versions.pop(version, None)

    # --- memory

    def evictions(self, num_bytes: list[int], old: Adapter | None, ring: Sequence[int]) -> Eviction:
        """The idle adapters, the least recently used first, that have to go until each rank of the
        ring has room for so many bytes more, in the place of the old adapter. Raises AdapterError
        if no eviction could make room."""
        if self._memory is None:
            return Eviction([], is_enough=True)
        limits = memory_of(self._memory, ring)
        if not _fits([num_bytes], limits):
            raise AdapterError(
                f"The adapter has {max(num_bytes)} bytes, more than --adapter-memory."
            )
        idle = [a for a in self.by_name.values() if a is not old and self._is_idle(a)]
        idle.sort(key=lambda adapter: adapter.used_at)
        evicted: list[Adapter] = []
        while not _fits([num_bytes, *self._sizes_without(old, evicted)], limits):
            if len(evicted) == len(idle):
                return Eviction(evicted, is_enough=False)
            evicted.append(idle[len(evicted)])
        return Eviction(evicted, is_enough=True)

    def _sizes_without(self, old: Adapter | None, evicted: list[Adapter]) -> list[list[int]]:
        """The bytes of versions that are to stay, or are retired and still in use."""
        staying = {a.version for a in self.by_name.values() if a is not old and a not in evicted}
        return [
            loaded.num_bytes
            for version, loaded in self.versions.items()
            if version in staying or self._num_sequences(version)
        ]

    def _is_idle(self, adapter: Adapter) -> bool:
        return bool(adapter.version) and not adapter.is_pinned and not self._num_running(adapter)

    def _num_running(self, adapter: Adapter) -> int:
        # Sequences without an adapter have version 0.
        return self._num_sequences(adapter.version) if adapter.version else 0


def _fits(sizes: list[list[int]], limits: list[int]) -> bool:
    """Whether what each rank holds is within its limit; sizes has a list of ranks for each
    version."""
    return all(sum(held) <= limit for *held, limit in zip(*sizes, limits, strict=True))
