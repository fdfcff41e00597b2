"""What a new engine finds of the adapters that the one before it had read."""

import logging
import shutil
import socket
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from serve.core.addresses import Addresses
from serve.core.messages import LoadAdapter, Order
from serve.rank.worker import Parent, Worker
from tests import adapters
from tests.lora.test_table import ALL, LLAMA, Pipeline

CUTS = [1, 3]  # three ranks
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"keys": ALL},
    "dora": {"dora": True, "keys": [*adapters.KEYS, "lm_head"]},
    "not on every rank": {"num_layers": 1},
}


@pytest.fixture
def parents(tmp_path: Path) -> list[Path]:
    """The folder that each rank's parent keeps."""
    folders = [tmp_path / f"rank-{rank}" for rank in range(len(CUTS) + 1)]
    for folder in folders:
        folder.mkdir()
    return folders


def ask(
    pipeline: Pipeline, parents: list[Path], version: int, folder: Path, held: tuple[int, ...] = ()
) -> list[Any]:
    """The answers of all ranks."""
    message = LoadAdapter(version, str(folder), None, None, held=list(held))
    for own, parent in zip(pipeline.adapters, parents, strict=True):
        own._copies = parent
    answers = [own.answer(message) for own in pipeline.adapters]
    for own in pipeline.adapters:
        own.copy()
    return answers


def there(parents: list[Path]) -> list[list[str]]:
    return [sorted(file.stem for file in parent.iterdir()) for parent in parents]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fate", ["written over", "gone"])
def test_a_new_engine_uses_copies_of_adapters_whose_files_have_changed(
    tmp_path: Path, parents: list[Path], kind: str, fate: str
) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA(), **KINDS[kind])
    before = Pipeline(LLAMA, CUTS)
    answers = ask(before, parents, 7, folder)
    if fate == "gone":
        shutil.rmtree(folder)
    else:
        adapters.save_adapter(folder, LLAMA(), seed=1, **KINDS[kind])
    after = Pipeline(LLAMA, CUTS)
    assert ask(after, parents, 7, folder, held=(7,)) == answers
    assert [own.num_bytes for own in after.adapters] == [a.num_bytes for a in answers]
    for old, new in zip(before.logits([7, 0, 7]), after.logits([7, 0, 7]), strict=True):
        assert mx.array_equal(old, new), "to the last bit"
    base = after.logits([0])[0]
    assert not mx.array_equal(after.logits([7])[0], base), "the adapter says nothing"


def test_the_adapters_own_files_are_read_if_there_is_no_copy(
    tmp_path: Path, parents: list[Path]
) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA())
    answers = ask(Pipeline(LLAMA, CUTS), parents, 1, folder)
    for file in parents[1].iterdir():
        file.unlink()  # as if that rank's parent were a new one
    assert ask(Pipeline(LLAMA, CUTS), parents, 1, folder, held=(1,)) == answers
    assert there(parents) == [["1"]] * 3


def test_a_copy_made_for_another_rank_0_is_not_reused(tmp_path: Path, parents: list[Path]) -> None:
    """A rank may outlive rank 0. The next rank 0 begins with version 1 again."""
    folders = [adapters.save_adapter(tmp_path / name, LLAMA(), i) for i, name in enumerate("ab")]
    old = ask(Pipeline(LLAMA, CUTS), parents, 1, folders[0])
    new = ask(Pipeline(LLAMA, CUTS), parents, 1, folders[1])
    assert [a.checksum for a in new] != [a.checksum for a in old]
    assert ask(Pipeline(LLAMA, CUTS), parents, 1, folders[0], held=(1,)) == new


def test_copies_of_unloaded_versions_are_deleted_at_the_next_load(
    tmp_path: Path, parents: list[Path]
) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA())
    pipeline = Pipeline(LLAMA, CUTS)
    for version in (1, 2, 3):
        ask(pipeline, parents, version, folder, held=tuple(range(1, version)))
    assert there(parents) == [["1", "2", "3"]] * 3
    ask(pipeline, parents, 14, folder, held=(2,))
    assert there(parents) == [["14", "2"]] * 3


def test_an_adapter_that_is_refused_leaves_no_copy(tmp_path: Path, parents: list[Path]) -> None:
    answers = ask(Pipeline(LLAMA, CUTS), parents, 1, tmp_path / "nowhere")
    assert [answer.status for answer in answers] == [404] * 3
    assert there(parents) == [[]] * 3


def test_an_adapter_loads_without_disk_space_for_its_copy(
    tmp_path: Path, parents: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA())
    parents[0].rmdir()
    pipeline = Pipeline(LLAMA, CUTS)
    with caplog.at_level(logging.WARNING):
        answers = ask(pipeline, parents, 1, folder)
    assert "event=adapter_not_copied version=1" in caplog.text
    pipeline.logits([1, 0])
    assert ask(Pipeline(LLAMA, CUTS), parents, 1, folder, held=(1,)) == answers


def test_an_engine_whose_parent_was_killed_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its threads would end the process of the tests.
    for name in ("_run_engine", "_watch"):
        monkeypatch.setattr(Worker, name, lambda _: None)
    copies = tmp_path / "copies"
    copies.mkdir()
    (copies / "1.safetensors").touch()
    here, there = socket.socketpair()
    there.close()
    with here:
        worker = Worker(
            Parent(here),
            Order(
                0,
                (0,),
                ("a",),
                Addresses(0, (), ()),
                0,
                ".",
                None,
                None,
                str(copies),
                (0, 2),
                None,
                1.0,
            ),
        )
        worker.run()
    assert not copies.exists()


def test_an_engine_with_other_layers_reads_the_adapters_own_files(
    tmp_path: Path, parents: list[Path]
) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA())
    whole = ask(Pipeline(LLAMA, []), parents[:1], 1, folder)
    for cuts in ([1, 3], [2], [2, 3], []):  # some layers more on a rank, some fewer, and again
        num_ranks = len(cuts) + 1
        pipeline = Pipeline(LLAMA, cuts)
        answers = ask(pipeline, parents[:num_ranks], 1, folder, held=(1,))
        assert sorted(name for answer in answers for name in answer.own) == whole[0].own
        expected = Pipeline(LLAMA, cuts)
        for own in expected.adapters:
            own.read(1, str(folder), None)
        for one, other in zip(pipeline.logits([1, 0]), expected.logits([1, 0]), strict=True):
            assert mx.array_equal(one, other)


def test_a_truncated_copy_of_an_adapter_is_ignored(tmp_path: Path, parents: list[Path]) -> None:
    """An engine may be killed while it writes."""
    folder = adapters.save_adapter(tmp_path / "a", LLAMA())
    answers = ask(Pipeline(LLAMA, CUTS), parents, 1, folder)
    for parent in parents:
        (file,) = parent.iterdir()
        file.write_bytes(file.read_bytes()[:-7])
        (parent / "2.part.safetensors").write_bytes(b"half")
    assert ask(Pipeline(LLAMA, CUTS), parents, 1, folder, held=(1,)) == answers
    assert there(parents) == [["1"]] * 3
