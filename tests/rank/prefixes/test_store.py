"""Prefixes that a pipeline reads from disk after a restart: its answers are those of a computation
without them."""

import os
import queue
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from serve.core.messages import (
    ForgetPrefixFiles,
    Order,
    PrefixFileWritten,
    PrefixRead,
    ReadPrefix,
)
from serve.core.types import Row, Sampling, Sequence, Step, Write
from serve.front.pipeline.scheduler import Scheduler
from serve.front.prefixes.disk import DiskRules
from serve.model.stage import Stage
from serve.rank.prefixes import contents
from serve.rank.prefixes import store as store_module
from serve.rank.prefixes.contents import StageCaches
from serve.rank.prefixes.store import PrefixStore, facts_digest, open_store, weight_digests
from serve.rank.prefixes.stored_files import UNFINISHED, StoredFile, covering, unusable_file
from serve.rank.step_loop import StepLoop
from serve.ring.transport import LocalTransport
from tests import architectures
from tests.models import build
from tests.models_page import reuse_of
from tests.rank.test_pipeline import LocalPipeline, pipeline
from tests.rank.test_reuse import ALL, DEPENDS_ON_CHUNKS, make_in_two_stages

DIVIDED = [  # gemma4_text has caches that only count positions, qwen3_next has states
    pytest.param(name, marks=() if name in {"gemma4_text", "qwen3_next"} else pytest.mark.slow)
    for name in architectures.architectures()
]
SHORT = DiskRules(segment=16, min_segment=4, min_gain=8)
SHORT_RUNNING = replace(SHORT, running=16)
RUNNING = [
    pytest.param(name, marks=() if name in {"llama", "gemma2"} else pytest.mark.slow)
    for name in architectures.architectures()
]
SHARED = [3 + i % 40 for i in range(75)] + [5, 4, 3, 2, 1]  # longer than all windows
SCORED = Sampling(temperature=0, logprobs=3)


def first_turn(id: int) -> Sequence:
    prompt = [*SHARED, 7, 8, 9]
    return Sequence(id, prompt, 4, SCORED, frozenset(), boundaries=(66, len(SHARED)))


def second_turn(id: int) -> Sequence:
    prompt = [*SHARED, *range(10, 20)]
    return Sequence(id, prompt, 4, SCORED, frozenset(), boundaries=(len(SHARED) + 8,))


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
def test_prefix_store_serves_a_second_turn_after_a_restart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = make_in_two_stages(name, monkeypatch)
    reuse = reuse_of(name)
    with pipeline(2, make, prefix_dir=tmp_path) as local:
        local.scheduler = Scheduler(2, max_num_sequences=32, max_queue=64, prefill_chunk=32)
        expected = scores(local, second_turn(5))
        counts = local.open_disk(SHORT, reuse)
        scores(local, first_turn(0))
        local.flush()
        assert counts.num_written_files
    with pipeline(2, make, prefix_dir=tmp_path) as local:
        local.scheduler = Scheduler(2, max_num_sequences=32, max_queue=64, prefill_chunk=32)
        counts = local.open_disk(SHORT, reuse)
        second = second_turn(1)
        got = scores(local, second)
    assert counts.num_reads == 1
    assert counts.num_damaged_files == 0
    assert second.num_cached >= len(SHARED) - SHORT.segment
    if name not in DEPENDS_ON_CHUNKS:
        assert got == pytest.approx(expected, rel=1e-4, abs=2e-4)


@pytest.mark.parametrize("num_ranks", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", DIVIDED)
def test_prefix_store_serves_another_division_into_stages(
    name: str, num_ranks: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank finds the layers that it needs in the folders of all ranks."""
    make = make_in_two_stages(name, monkeypatch)
    reuse = reuse_of(name)
    before, after = num_ranks
    with pipeline(before, make, prefix_dir=tmp_path) as local:
        local.scheduler = Scheduler(before, max_num_sequences=32, max_queue=64, prefill_chunk=32)
        expected = scores(local, second_turn(5))
        local.open_disk(SHORT, reuse)
        scores(local, first_turn(0))
        local.flush()
    with pipeline(after, make, prefix_dir=tmp_path) as local:
        local.scheduler = Scheduler(after, max_num_sequences=32, max_queue=64, prefill_chunk=32)
        counts = local.open_disk(SHORT, reuse)
        second = second_turn(1)
        got = scores(local, second)
    assert counts.num_reads == 1
    assert second.num_cached >= len(SHARED) - SHORT.segment
    if name not in DEPENDS_ON_CHUNKS:
        assert got == pytest.approx(expected, rel=1e-4, abs=2e-4)


@pytest.mark.parametrize("name", RUNNING)
def test_prefix_store_has_the_contexts_of_answers_that_the_end_of_an_engine_interrupts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers share a batch while their contexts are written, and are continued by other
    engines."""
    make = make_in_two_stages(name, monkeypatch)
    reuse = reuse_of(name)
    with pipeline(2, make, prefix_dir=tmp_path) as local:
        local.scheduler = Scheduler(2, max_num_sequences=32, max_queue=64, prefill_chunk=32)
        whole = local.answer(long_answers(10))
        counts = local.open_disk(SHORT_RUNNING, reuse)
        begun = long_answers(0)
        local.interrupt(begun, 40)
        assert counts.num_written_files
    with pipeline(2, make, prefix_dir=tmp_path) as local:
        local.scheduler = Scheduler(2, max_num_sequences=32, max_queue=64, prefill_chunk=32)
        counts = local.open_disk(SHORT_RUNNING, reuse)
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


def make_cache() -> list[KVCache]:
    return [KVCache(), KVCache()]


def of_layers(first: int, end: int) -> StageCaches:
    """The caches of a stage with these layers, each of which has two caches."""
    numbers = range(2 * first, 2 * end)
    return StageCaches(
        (first, end),
        numbers,
        lambda: [KVCache() for _ in numbers],
        lambda caches, num_tokens: None,
    )


@pytest.fixture
def reports() -> "queue.Queue[PrefixRead | PrefixFileWritten]":
    return queue.Queue()


@contextmanager
def opened(
    folder: Path,
    reports: "queue.Queue[PrefixRead | PrefixFileWritten]",
    max_bytes: int = 1 << 20,
    digest: str = "a" * 32,
    layers: tuple[int, int] = (0, 1),
    rank: int = 0,
) -> Iterator[PrefixStore]:
    stage = of_layers(*layers)
    store = PrefixStore(folder / f"rank-{rank}", digest, max_bytes, stage, reports.put)
    try:
        yield store
    finally:
        store.close()


def write(
    store: PrefixStore,
    number: int,
    num_tokens: int = 8,
    layers: tuple[int, int] = (0, 1),
    num_missing: int = 0,
) -> Write:
    """Makes a store write a file whose keys and values are all equal to this number. It lacks those
    of num_missing tokens."""
    name = f"{number:032x}"
    asked = Write(1, name, "0" * 32, 0, num_tokens + num_missing)
    stage = of_layers(*layers)
    caches = stage.make()
    for cache in caches:
        cache.update_and_fetch(*[mx.full((1, 2, num_tokens, 4), float(number))] * 2)
    content = contents.segment(caches, stage.numbers, 0, num_tokens)
    mx.eval(content.arrays)
    store.write(asked, content)
    return asked


def read(store: PrefixStore, asked: Write) -> None:
    store.obey(ReadPrefix(7, asked.end, (asked.name,)))


def test_prefix_store_reads_what_it_has_written(tmp_path: Path, reports: queue.Queue) -> None:
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
def test_prefix_store_drops_a_file_with_a_changed_bit(
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
def test_prefix_store_drops_a_file_without_the_keys_of_its_tokens(
    tmp_path: Path, reports: queue.Queue, num_missing: int
) -> None:
    with opened(tmp_path, reports) as store:
        asked = write(store, 5, num_missing=num_missing)
        assert reports.get(timeout=60).num_bytes
        read(store, asked)
        assert reports.get(timeout=60) == PrefixRead(7, asked.name)
        assert not list(tmp_path.glob("rank-0/*/*"))


def test_prefix_store_refuses_what_a_stage_does_not_hold_and_steps_go_on(
    tmp_path: Path, reports: queue.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(build("llama"), 0, 4)
    transport = LocalTransport()

    def open_own(caches: StageCaches) -> PrefixStore:
        return PrefixStore(tmp_path / "rank-0", "a" * 32, 1 << 20, caches, reports.put)

    loop = StepLoop(stage, transport, batchable=True, open_store=open_own)
    loop.chooser.admit(1, Sampling(temperature=0), 4, [1, 2, 3, 4])
    results = loop.run()
    transport.send(Step(1, 0, (Row(1, 0, 3),), (1, 2, 3), False), [])
    next(results)
    for number, end in enumerate((2, 4, 3), 2):
        asked = Write(1, f"{number:032x}", "0" * 32, 0, end)
        transport.send(Step(number, -1, (), (), False, write=(asked,)), [])
        next(results)
    transport.send(Step(5, 0, (Row(1, 3, 1),), (4,), True), [])
    assert len(next(results).tokens) == 1
    written = [reports.get(timeout=60) for _ in range(3)]
    assert [report.num_bytes > 0 for report in written] == [True, False, True]
    assert "4 tokens of sequence 1 are to be written, and 3 are held here" in caplog.text
    assert loop.prefix_store
    loop.prefix_store.close()


def test_prefix_store_leaves_nothing_of_a_write_that_fails(
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


def test_prefix_store_reads_layers_from_several_folders(
    tmp_path: Path, reports: queue.Queue
) -> None:
    """Two ranks become one, and then two others: the second one lacks a layer."""
    for rank, layers in ((0, (2, 4)), (1, (0, 2))):
        with opened(tmp_path, reports, layers=layers, rank=rank) as store:
            asked = write(store, 5, layers=layers)
            num_bytes = reports.get(timeout=60).num_bytes
    with opened(tmp_path, reports, layers=(0, 4)) as store:
        (file,) = store.files().files
        assert file.num_bytes == num_bytes, "files of others do not count"
        read(store, asked)
        assert reports.get(timeout=60) == PrefixRead(7)
        caches = store.take(7)
        assert [mx.all(cache.keys == 5.0).item() for cache in caches] == [True] * 8
        store.obey(ForgetPrefixFiles((asked.name,)))
    with opened(tmp_path, reports, layers=(2, 4)) as store:
        assert len(store.files().files) == 1, "the files of another division are kept"
    (path,) = tmp_path.glob("rank-0/*/*.safetensors")
    path.unlink()
    with opened(tmp_path, reports, layers=(1, 4)) as store:
        assert not store.files().files


def test_prefix_store_clears_the_folders_of_ranks_that_do_not_run(
    tmp_path: Path, reports: queue.Queue
) -> None:
    for rank in (1, 2):
        with opened(tmp_path, reports, rank=rank) as store:
            write(store, 5)
            reports.get(timeout=60)
    with opened(tmp_path, reports, rank=1), opened(tmp_path, reports) as store:
        store.obey(ForgetPrefixFiles(everything=True))
        store.wait()
        assert not list(tmp_path.glob("rank-2/*/*.safetensors"))
        assert len(list(tmp_path.glob("rank-1/*/*.safetensors"))) == 1, "that one runs"


def test_prefix_store_deletes_files_of_other_stages_for_room(
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


def test_prefix_store_deletes_files_of_other_versions_whatever_their_names_are(
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
    assert not list(older.iterdir())


def test_prefix_store_works_beside_a_folder_that_cannot_be_read(
    tmp_path: Path, reports: queue.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "rank-1" / ("a" * 32)
    locked.mkdir(parents=True)

    def refusing(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def refuse(path: Any) -> Any:
            if Path(path) == locked:
                raise PermissionError
            return function(path)

        return refuse

    for name in ("listdir", "scandir"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, refusing(original))
    with opened(tmp_path, reports) as store:
        assert not store.files().files


def test_covering_prefers_own_files_to_larger_ones_of_other_ranks() -> None:
    def stored(layers: tuple[int, int], is_own: bool) -> StoredFile:
        return replace(unusable_file(Path(__file__)), layers=layers, is_own=is_own)

    own, whole = stored((2, 4), is_own=True), stored((0, 8), is_own=False)
    assert covering([whole, own], (2, 4)) == [own]
    assert covering([whole, own], (2, 6)) == [whole]
    assert covering([own], (2, 6)) == []
    larger = stored((0, 8), is_own=True)
    assert covering([larger, own], (2, 4)) == [own]


def test_prefix_store_locks_its_folder(tmp_path: Path, reports: queue.Queue) -> None:
    with opened(tmp_path, reports), pytest.raises(BlockingIOError), opened(tmp_path, reports):
        raise AssertionError("two stores have the same folder")


def order(prefix_dir: Path | None) -> Order:
    """The order of an engine that is rank 3 of its launch, and the first of a ring of two."""
    return Order(
        rank=0,
        ring=(3, 1),
        hosts=("a", "b"),
        addresses=[],
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


def test_open_store_has_a_folder_for_each_rank_config_and_version(
    tmp_path: Path, reports: queue.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"a": mx.ones((2, 2))}
    for config in ("one", "two"):
        store = open_store(order(tmp_path), config, weights, of_layers(0, 1), reports.put)
        assert store
        assert open_store(order(tmp_path), config, weights, of_layers(0, 1), reports.put) is None
        assert store.files().weights == {
            f"0 of 1: {n}": d for n, d in weight_digests(weights).items()
        }
        write(store, 5)
        assert reports.get(timeout=60).num_bytes
        store.close()
    assert len(list(tmp_path.glob("rank-3/*/*.safetensors"))) == 2
    assert caplog.text.count("event=prefix_cache_disk_failed action=open") == 2, "it was locked"
    assert open_store(order(None), "one", weights, of_layers(0, 1), reports.put) is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: -w,
        lambda w: w[:, ::-1],
        lambda w: w[::-1],
        lambda w: mx.roll(w, 1, axis=1),
        lambda w: mx.concatenate([-w[:, :2], w[:, 2:]], axis=1),
        lambda w: mx.concatenate([w[:, 1:2], w[:, :1], w[:, 2:]], axis=1),
    ],
    ids=["negated", "columns-reversed", "rows-reversed", "rolled", "half-negated", "two-swapped"],
)
def test_weight_digests_depend_on_the_place_of_every_bit(
    dtype: mx.Dtype, change: Callable[[mx.array], mx.array]
) -> None:
    # A sum of bits is the same for all of these, and keys of one model then served another.
    weights = mx.random.normal((8, 16), key=mx.random.key(1)).astype(dtype)
    changed = mx.contiguous(change(weights))
    assert weight_digests({"w": changed}) != weight_digests({"w": weights})


def test_weight_digests_of_a_large_array_are_computed_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = {"w": mx.random.normal((9, 16)), "scalar": mx.array(1.5), "empty": mx.zeros((0, 4))}
    at_once = weight_digests(weights)
    monkeypatch.setattr(store_module, "_HASHED_AT_ONCE", 33)
    assert weight_digests(weights) == at_once


def test_weight_digests_depend_on_every_bit() -> None:
    weights = {"a": mx.arange(12.0).reshape(3, 4), "b": mx.ones((4,), mx.bfloat16)}
    digests = weight_digests(weights)
    assert digests == weight_digests(dict(weights))
    changed = weights | {"b": mx.array([1, 1, 2, 1], mx.bfloat16)}
    assert weight_digests(changed)["a"] == digests["a"]
    assert weight_digests(changed)["b"] != digests["b"]
    assert weight_digests({"a": weights["a"][::-1]})["a"] != digests["a"]
    assert facts_digest({"config": "a"}) != facts_digest({"config": "b"})
