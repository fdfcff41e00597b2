"""Prefixes that a pipeline reads from disk after a restart: its answers are those of a computation
without them."""

import os
import queue
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.models.cache import KVCache

from serve.core.addresses import Addresses
from serve.core.messages import (
    ForgetPrefixFiles,
    Order,
    PrefixFileWritten,
    PrefixRead,
    ReadPrefix,
)
from serve.core.ops import Write
from serve.core.types import Row, Sampling, Sequence, Step
from serve.front.parts.disk.cache import DiskRules
from serve.model.stage import Stage
from serve.rank.parts.disk import contents
from serve.rank.parts.disk.part import DiskPart
from serve.rank.parts.disk.store import PrefixStore, open_store
from serve.rank.parts.disk.stored_files import UNFINISHED
from serve.ring.transport import LocalTransport
from tests import architectures
from tests.models import build
from tests.models_page import reuse_of
from tests.rank.loops import loop_of, surroundings_of
from tests.rank.parts.disk.disk_pipeline import disk_pipeline
from tests.rank.test_pipeline import LocalPipeline
from tests.rank.test_reuse import ALL, DEPENDS_ON_CHUNKS, make_in_two_stages

SHORT = DiskRules(segment=16, min_segment=4, min_gain=8)
SHORT_RUNNING = replace(SHORT, running=16)
RUNNING = [
    pytest.param(name, marks=() if name in {"llama", "gemma2"} else pytest.mark.slow)
    for name in architectures.architectures()
]
SHARED = [3 + i % 40 for i in range(75)] + [5, 4, 3, 2, 1]  # longer than all windows
SCORED = Sampling(temperature=0, logprobs=3)


def first_turn(local: LocalPipeline, id: int) -> Sequence:
    local.boundaries[id] = (66, len(SHARED))
    return Sequence(id, [*SHARED, 7, 8, 9], 4, SCORED, frozenset())


def second_turn(local: LocalPipeline, id: int) -> Sequence:
    local.boundaries[id] = (len(SHARED) + 8,)
    return Sequence(id, [*SHARED, *range(10, 20)], 4, SCORED, frozenset())


def long_answers(first_id: int) -> list[Sequence]:
    """Two prompts that differ from their first token on."""
    prompts = [[start, *SHARED] for start in (11, 12)]
    greedy = Sampling(temperature=0)
    return [Sequence(first_id + n, p, 100, greedy, frozenset()) for n, p in enumerate(prompts)]


def scores(local: LocalPipeline, sequence: Sequence) -> list[float]:
    """Runs a sequence, and returns the scores of its answer."""
    local.answer([sequence])
    found: list[float] = []
    for _, score in sorted(local.scores[sequence.id].items()):
        found += [score.logprob, *(logprob for _, logprob in score.top)]
    return found


@pytest.mark.parametrize("name", ALL)
def test_a_second_turn_reuses_a_prefix_from_disk_after_a_restart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = make_in_two_stages(name, monkeypatch)
    reuse = reuse_of(name)
    with disk_pipeline(2, make, tmp_path) as local:
        counts = local.use_disk(SHORT).counts
        expected = scores(local, second_turn(local, 5))
        local.open_disk(reuse)
        scores(local, first_turn(local, 0))
        local.flush()
        assert counts.num_written_files
    with disk_pipeline(2, make, tmp_path) as local:
        counts = local.use_disk(SHORT).counts
        local.open_disk(reuse)
        second = second_turn(local, 1)
        got = scores(local, second)
    assert counts.num_reads == 1
    assert counts.num_damaged_files == 0
    assert second.num_cached >= len(SHARED) - SHORT.segment
    if name not in DEPENDS_ON_CHUNKS:
        assert got == pytest.approx(expected, rel=1e-4, abs=2e-4)


@pytest.mark.parametrize("name", RUNNING)
def test_answers_interrupted_by_the_end_of_an_engine_continue_from_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers share a batch while their contexts are written, and are continued by other
    engines."""
    make = make_in_two_stages(name, monkeypatch)
    reuse = reuse_of(name)
    with disk_pipeline(2, make, tmp_path) as local:
        counts = local.use_disk(SHORT_RUNNING).counts
        whole = local.answer(long_answers(10))
        local.open_disk(reuse)
        begun = long_answers(0)
        local.interrupt(begun, 40)
        assert counts.num_written_files
    with disk_pipeline(2, make, tmp_path) as local:
        counts = local.use_disk(SHORT_RUNNING).counts
        local.open_disk(reuse)
        for sequence in begun:
            sequence.reset()
        continued = local.answer(begun)
    assert counts.num_damaged_files == 0
    num_tokens = [len(begun[0].prompt) - 1] * 2
    if reuse == "any":
        num_tokens = [number + 32 for number in num_tokens]
    assert counts.num_read_tokens >= sum(num_tokens)
    if name not in DEPENDS_ON_CHUNKS:
        assert list(continued.values()) == list(whole.values())


# --- one store


def make_caches() -> list[KVCache]:
    return [KVCache(), KVCache()]


@pytest.fixture
def reports() -> "queue.Queue[PrefixRead | PrefixFileWritten]":
    return queue.Queue()


@contextmanager
def opened(
    folder: Path,
    reports: "queue.Queue[PrefixRead | PrefixFileWritten]",
    max_bytes: int = 1 << 20,
    digest: str = "a" * 32,
) -> Iterator[PrefixStore]:
    store = PrefixStore(folder / "rank-0", digest, max_bytes, make_caches, reports.put)
    try:
        yield store
    finally:
        store.close()


def write(
    store: PrefixStore,
    number: int,
    num_tokens: int = 8,
    num_missing: int = 0,
) -> Write:
    """Makes a store write a file whose keys and values are all equal to this number. It lacks those
    of num_missing tokens."""
    name = f"{number:032x}"
    asked = Write(1, name, "0" * 32, 0, num_tokens + num_missing)
    caches = make_caches()
    for cache in caches:
        cache.update_and_fetch(*[mx.full((1, 2, num_tokens, 4), float(number))] * 2)
    content = contents.segment(caches, 0, num_tokens)
    mx.eval(content.arrays)
    store.write(asked, content)
    return asked


def read(store: PrefixStore, asked: Write) -> None:
    store.obey(ReadPrefix(7, asked.end, (asked.name,)))


def test_a_prefix_store_reads_the_files_that_it_has_written(
    tmp_path: Path, reports: queue.Queue
) -> None:
    with opened(tmp_path, reports) as store:
        asked = write(store, 5)
        written = reports.get(timeout=60)
        assert written == PrefixFileWritten(asked.name, written.num_bytes)
        assert written.num_bytes > 2 * 2 * 2 * 8 * 4 * 4
    with opened(tmp_path, reports) as store:
        (file,) = store.files().files
        assert (file.name, file.end, file.num_bytes) == (asked.name, 8, written.num_bytes)
        read(store, asked)
        assert reports.get(timeout=60) == PrefixRead(7)
        caches = store.take(7)
    assert [cache.offset for cache in caches] == [8, 8]
    assert mx.all(caches[1].values == 5.0).item()
    assert tmp_path.joinpath("rank-0").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("seed", range(8))
def test_a_prefix_store_deletes_a_file_with_a_changed_bit(
    tmp_path: Path, reports: queue.Queue, seed: int
) -> None:
    with opened(tmp_path, reports) as store:
        asked = write(store, 5)
        reports.get(timeout=60)
        (path,) = tmp_path.glob("rank-0/*/*.safetensors")
        data = bytearray(path.read_bytes())
        data[random.Random(seed).randrange(len(data))] ^= 1 << seed
        path.write_bytes(data)
        read(store, asked)
        assert reports.get(timeout=60) == PrefixRead(7, asked.name)
        assert not path.exists()


@pytest.mark.parametrize("num_missing", [1, -1])
def test_a_prefix_store_deletes_a_file_that_lacks_keys_of_some_tokens(
    tmp_path: Path, reports: queue.Queue, num_missing: int
) -> None:
    with opened(tmp_path, reports) as store:
        asked = write(store, 5, num_missing=num_missing)
        assert reports.get(timeout=60).num_bytes
        read(store, asked)
        assert reports.get(timeout=60) == PrefixRead(7, asked.name)
        assert not list(tmp_path.glob("rank-0/*/*"))


def test_writing_tokens_that_are_not_held_is_refused_and_steps_continue(
    tmp_path: Path, reports: queue.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(build("llama"), 0, 4)
    transport = LocalTransport()

    surroundings = surroundings_of(stage)
    caches = surroundings.caches
    folder = tmp_path / "rank-0"
    store = PrefixStore(folder, "a" * 32, 1 << 20, caches.make_caches, reports.put)
    loop = loop_of(surroundings, transport, [DiskPart(store, caches, reports.put)])
    loop.chooser.admit(1, Sampling(temperature=0), 4, [1, 2, 3, 4])
    results = loop.run()
    transport.send(Step(1, 0, (Row(1, 0, 3),), (1, 2, 3), False), [])
    next(results)
    for number, end in enumerate((2, 4, 3), 2):
        asked = Write(1, f"{number:032x}", "0" * 32, 0, end)
        transport.send(Step(number, -1, (), (), False, after=(asked,)), [])
        next(results)
    transport.send(Step(5, 0, (Row(1, 3, 1),), (4,), True), [])
    assert len(next(results).tokens) == 1
    written = [reports.get(timeout=60) for _ in range(3)]
    assert [report.num_bytes > 0 for report in written] == [True, False, True]
    assert "4 tokens of sequence 1 are to be written, and 3 are held here" in caplog.text
    store.close()


def test_a_failed_write_leaves_no_file(
    tmp_path: Path, reports: queue.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, reports) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
        try:
            for number in (1, 2):
                asked = write(store, number, num_tokens=1000)
                assert reports.get(timeout=60) == PrefixFileWritten(asked.name, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not list(tmp_path.glob("rank-0/*/*"))
        write(store, 3)
        assert reports.get(timeout=60).num_bytes
    assert caplog.text.count("event=prefix_cache_disk_failed") == 1


def test_files_of_other_stages_are_deleted_to_make_room(
    tmp_path: Path, reports: queue.Queue
) -> None:
    with opened(tmp_path, reports, digest="b" * 32) as store:
        for number in range(3):
            write(store, number)
            num_bytes = reports.get(timeout=60).num_bytes
    with opened(tmp_path, reports, max_bytes=3 * num_bytes) as store:
        assert not store.files().files
        write(store, 9)
        reports.get(timeout=60)
        assert len(list(tmp_path.glob("rank-0/*/*.safetensors"))) == 3
        store.obey(ForgetPrefixFiles(everything=True))
    assert not list(tmp_path.glob("rank-0/*/*.safetensors"))


def test_files_of_other_versions_are_deleted_whatever_their_names_are(
    tmp_path: Path, reports: queue.Queue
) -> None:
    """Otherwise they would keep their room, and their texts, forever."""
    older = tmp_path / "rank-0" / ("b" * 32)
    older.mkdir(parents=True)
    for name in ("a-b-0-16-01234567.safetensors", f"{UNFINISHED}a.safetensors"):
        older.joinpath(name).write_bytes(bytes(100))
    with opened(tmp_path, reports) as store:
        assert [path.name for path in older.iterdir()] == ["a-b-0-16-01234567.safetensors"]
        store.obey(ForgetPrefixFiles(everything=True))
    assert not older.exists()
    older.mkdir()
    with opened(tmp_path, reports):
        assert not older.exists()


def test_only_one_prefix_store_can_use_a_folder(tmp_path: Path, reports: queue.Queue) -> None:
    with opened(tmp_path, reports), pytest.raises(BlockingIOError), opened(tmp_path, reports):
        raise AssertionError("two stores have the same folder")


def test_prefix_store_keeps_a_new_folder_out_of_the_backups_of_macos(
    tmp_path: Path, reports: queue.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmutil = tmp_path / "tmutil"
    tmutil.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/log\n')
    tmutil.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for _ in range(2):
        with opened(tmp_path, reports):
            pass
    assert (tmp_path / "log").read_text() == f"addexclusion {tmp_path}/rank-0\n"
    assert (tmp_path / "rank-0" / ".metadata_never_index").exists()


def order(prefix_dir: Path | None) -> Order:
    """The order of an engine that is rank 3 of its launch, and the first of a ring of two."""
    return Order(
        rank=0,
        ring=(3, 1),
        hosts=("a", "b"),
        addresses=Addresses(0, (), ()),
        nonce=1,
        model="m",
        commit=None,
        cache_dir=None,
        copies="",
        layers=(0, 1),
        kv_bits=None,
        join_timeout=1.0,
        prefix_dir=str(prefix_dir) if prefix_dir else None,
        prefix_bytes=1 << 20,
    )


def test_no_prefix_store_is_opened_without_a_folder_or_for_a_folder_in_use(
    tmp_path: Path, reports: queue.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_store(order(None), reports.put, make_caches) is None
    store = open_store(order(tmp_path), reports.put, make_caches)
    assert store
    assert open_store(order(tmp_path), reports.put, make_caches) is None
    assert caplog.text.count("event=prefix_cache_disk_failed action=open") == 1
    write(store, 5)
    assert reports.get(timeout=60).num_bytes
    store.close()
    assert len(list(tmp_path.glob("rank-3/*/*.safetensors"))) == 1


@pytest.mark.parametrize(
    "changes",
    [{"layers": (0, 2)}, {"kv_bits": 4}, {"num_shards": 2}, {"rank": 1}, {"commit": "c" * 40}],
    ids=str,
)
def test_files_of_each_model_and_split_and_shard_are_kept_apart(
    tmp_path: Path, reports: queue.Queue, changes: dict[str, Any]
) -> None:
    """They are there again when the split is what it was before."""
    one = msgspec.structs.replace(order(tmp_path), ring=(3, 3), num_shards=2)
    if "num_shards" in changes:
        one = msgspec.structs.replace(one, num_shards=1)
    other = msgspec.structs.replace(one, **changes)
    found: list[int] = []
    for each in (one, other, one):
        store = open_store(each, reports.put, make_caches)
        assert store
        if not found:
            write(store, 5)
            assert reports.get(timeout=60).num_bytes
        found.append(len(store.files().files))
        store.close()
    assert found == [1, 0, 1]


def test_files_are_not_reused_after_weights_were_replaced(
    tmp_path: Path, reports: queue.Queue
) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    local = msgspec.structs.replace(order(tmp_path), model=str(weights.parent))
    digests = set()
    for content in (b"1", b"2"):
        replacement = weights.with_suffix(".new")
        replacement.write_bytes(content)
        replacement.rename(weights)
        store = open_store(local, reports.put, make_caches)
        assert store
        digests.add(store.files().digest)
        store.close()
    assert len(digests) == 2
