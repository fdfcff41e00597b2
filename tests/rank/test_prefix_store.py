"""Prefixes that a pipeline reads from disk after a restart: its answers are those of a computation
without them."""

import queue
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from serve.core.messages import ForgetPrefixFiles, PrefixFileWritten, PrefixRead, ReadPrefix
from serve.core.types import Sampling, Sequence, Write
from serve.front.pipeline.scheduler import Scheduler
from serve.front.prefixes.disk import DiskRules
from serve.rank import prefix_parts
from serve.rank.prefix_store import PrefixStore, stage_digest
from tests.models_page import reuse_of
from tests.rank.test_pipeline import LocalPipeline, pipeline
from tests.rank.test_reuse import ALL, DEPENDS_ON_CHUNKS, make_in_two_stages

SHORT = DiskRules(segment=16, min_segment=4, min_gain=8)
SHARED = [3 + i % 40 for i in range(75)] + [5, 4, 3, 2, 1]  # longer than all windows
SCORED = Sampling(temperature=0, logprobs=3)


def first_turn(id: int) -> Sequence:
    prompt = [*SHARED, 7, 8, 9]
    return Sequence(id, prompt, 4, SCORED, frozenset(), boundaries=(66, len(SHARED)))


def second_turn(id: int) -> Sequence:
    prompt = [*SHARED, *range(10, 20)]
    return Sequence(id, prompt, 4, SCORED, frozenset(), boundaries=(len(SHARED) + 8,))


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


# --- one store


def make_cache() -> list[KVCache]:
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
    store = PrefixStore(folder / "rank-0", digest, max_bytes, make_cache, reports.put)
    try:
        yield store
    finally:
        store.close()


def write(store: PrefixStore, number: int, num_tokens: int = 8) -> Write:
    """Makes a store write a file whose keys and values are all equal to this number."""
    name = f"{number:032x}"
    asked = Write(1, name, "0" * 32, 0, num_tokens)
    caches = make_cache()
    for cache in caches:
        cache.update_and_fetch(*[mx.full((1, 2, num_tokens, 4), float(number))] * 2)
    content = prefix_parts.segment(caches, 0, num_tokens)
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


def test_prefix_store_locks_its_folder(tmp_path: Path, reports: queue.Queue) -> None:
    with opened(tmp_path, reports), pytest.raises(BlockingIOError), opened(tmp_path, reports):
        raise AssertionError("two stores have the same folder")


def test_stage_digest_depends_on_weights_and_facts() -> None:
    weights = {"a": mx.arange(12.0).reshape(3, 4), "b": mx.ones((4,), mx.bfloat16)}
    digests = {
        stage_digest(weights, {"layers": "0-2"}),
        stage_digest(weights, {"layers": "2-4"}),
        stage_digest(weights | {"b": mx.array([1, 1, 2, 1], mx.bfloat16)}, {"layers": "0-2"}),
        stage_digest({"a": weights["a"][::-1], "b": weights["b"]}, {"layers": "0-2"}),
    }
    assert len(digests) == 4
    assert stage_digest(dict(weights), {"layers": "0-2"}) in digests
