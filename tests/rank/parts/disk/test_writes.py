"""A stage sends its outputs before it copies what goes to its disk, and no later step changes the
copies."""

import queue
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from serve.core.ops import Drop, Write
from serve.core.types import Row, Step
from serve.model.stage import Stage
from serve.rank.parts.disk.contents import FileContent, MakeCaches
from serve.rank.parts.disk.part import DiskPart
from serve.rank.parts.disk.store import PrefixStore
from serve.rank.step_loop import StepLoop
from serve.ring.transport import LocalTransport, local_ring
from tests.models import build
from tests.rank.loops import loop_of, part_of, surroundings_of

TOKENS = (3, 1, 4, 1, 5)
OTHER_TOKENS = (2, 7, 1, 8, 2)


class ObservedStore(PrefixStore):
    """A store that also notes its contents, and whether the stage had sent something by then."""

    def __init__(
        self, folder: Path, outbox: "queue.SimpleQueue[Any]", make_caches: MakeCaches
    ) -> None:
        super().__init__(folder, "0", 1 << 30, make_caches, lambda message: None)
        self.outbox = outbox
        self.contents: list[FileContent] = []
        self.has_sent: list[bool] = []

    def write(self, write: Write, content: FileContent) -> None:
        self.has_sent.append(not self.outbox.empty())
        self.contents.append(content)
        super().write(write, content)


def make_loop(folder: Path, layers: tuple[int, int], transport: LocalTransport) -> StepLoop:
    surroundings = surroundings_of(Stage(build("llama"), *layers), transport)
    caches = surroundings.caches
    store = ObservedStore(folder, transport._left._inbox, caches.make_caches)
    return loop_of(surroundings, transport, [DiskPart(store, caches, surroundings.send)])


def prefill(number: int, sequence: int, tokens: tuple[int, ...], **fields: Any) -> Step:
    row = Row(sequence, 0, len(tokens))
    return Step(number, -1, (row,), tokens, sample=False, **fields)


def write_of(sequence: int) -> Write:
    return Write(sequence, "a" * 32, "b" * 32, 0, len(TOKENS))


def observed(loop: StepLoop) -> ObservedStore:
    store = part_of(loop, DiskPart).store
    assert isinstance(store, ObservedStore)
    return store


@pytest.fixture
def expected(tmp_path: Path) -> FileContent:
    """The file of a sequence to which no other step came."""
    last, first = local_ring(2)
    loop = make_loop(tmp_path / "expected", (0, 2), first)
    last.send(prefill(1, 1, TOKENS, after=(write_of(1),)), [])
    first.close()
    assert not list(loop.run())
    (content,) = observed(loop).contents
    observed(loop).close()
    return content


def test_a_step_is_sent_on_before_its_prefix_is_copied_for_writing(
    tmp_path: Path, expected: FileContent
) -> None:
    """The next steps wait already: one drops the sequence, and another takes its place."""
    last, first = local_ring(2)
    loop = make_loop(tmp_path / "first", (0, 2), first)
    last.send(prefill(1, 1, TOKENS, after=(write_of(1),)), [])
    last.send(prefill(2, 2, OTHER_TOKENS, before=(Drop(1),)), [])
    last.send(prefill(3, 3, OTHER_TOKENS), [])
    first.close()
    assert not list(loop.run())
    store = observed(loop)
    store.close()
    assert store.has_sent == [True]
    (content,) = store.contents
    assert content.arrays.keys() == expected.arrays.keys()
    for name, array in content.arrays.items():
        assert mx.array_equal(array, expected.arrays[name]).item(), name


def test_a_result_is_returned_before_its_prefix_is_copied_for_writing(tmp_path: Path) -> None:
    (only,) = local_ring(1)
    loop = make_loop(tmp_path / "only", (0, 4), only)
    only.send(prefill(1, 1, TOKENS, after=(write_of(1),)), [])
    only.close()
    results = loop.run()
    next(results)
    store = observed(loop)
    assert not store.contents
    busy_seconds = loop.work.busy_seconds
    assert not list(results)
    store.close()
    assert len(store.contents) == 1
    assert loop.work.busy_seconds > busy_seconds
