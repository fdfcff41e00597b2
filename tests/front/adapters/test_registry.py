"""Names, versions and memory of adapters, without ranks."""

import dataclasses
from collections import Counter

from serve.core.errors import AdapterError
from serve.core.messages import AdapterRead
from serve.front.adapters.adapter import Adapter, LoadedVersion, Source
from serve.front.adapters.registry import AdapterRegistry
from tests.errors import fails
from tests.front.fakes import CONFIG

RING = (0,)


class Registry:
    """A registry with adapters of 1 KB on one rank; running has the sequences of versions."""

    def __init__(self, memory: str) -> None:
        config = dataclasses.replace(CONFIG, adapter_memory=memory)
        self.running: Counter[int] = Counter()
        self.num_added = 0
        self.registry = AdapterRegistry(config, lambda version: self.running[version])

    def add(self, name: str) -> Adapter:
        self.num_added += 1
        read = AdapterRead(
            version=self.num_added,
            digest="d",
            checksum="c",
            targets=[],
            own=[],
            kinds=[],
            lora_rank=8,
            scale=2.0,
            num_bytes=1000,
        )
        loaded = LoadedVersion(Source(name), {0: read})
        adapter = Adapter(name, read.version, loaded, used_at=float(read.version))
        self.registry.hold(read.version, loaded)
        self.registry.put(adapter)
        return adapter


def test_idle_adapters_are_evicted_beginning_with_the_least_recently_used() -> None:
    made = Registry("4KB")
    pinned, used, idle, last = (made.add(name) for name in "abcd")
    pinned.is_pinned = True
    made.running[used.version] = 1
    eviction = made.registry.evictions([1000], None, RING)
    assert (eviction.adapters, eviction.is_enough) == ([idle], True)
    eviction = made.registry.evictions([3000], None, RING)
    assert (eviction.adapters, eviction.is_enough) == ([idle, last], False)
    assert idle.version, "a decision changes nothing"
    assert made.registry.evictions([1000], last, RING).adapters == []
    with fails(AdapterError, "no_memory"):
        made.registry.evictions([5000], None, RING)


def test_releasing_an_adapter_keeps_versions_that_sequences_use() -> None:
    made = Registry("4KB")
    first, second = made.add("a"), made.add("b")
    made.running[1] = 1
    assert made.registry.release(first) == 1
    assert set(made.registry.versions) == {1, 2}
    assert made.registry.is_wanted(1)
    made.running[1] = 0
    assert made.registry.release(second) == 2
    assert made.registry.versions == {}


def test_a_version_whose_name_is_gone_is_called_by_its_source() -> None:
    made = Registry("4KB")
    made.add("a")
    assert made.registry.name_of(1) == "a"
    made.registry.remove("a")
    assert made.registry.name_of(1) == "a", "its source"
    assert made.registry.name_of(7) == "version 7"
    assert made.registry.name_of(0) is None
