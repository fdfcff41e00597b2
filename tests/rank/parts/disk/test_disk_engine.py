"""What becomes of the files of an engine that gets other layers."""

from pathlib import Path

from serve.rank.parts.disk.part import DiskPart
from serve.rank.parts.disk.store import PrefixStore
from tests.rank.loops import part_of
from tests.rank.ordered import Ordered


def store_of(ordered: Ordered) -> PrefixStore:
    assert ordered.worker.loop
    store = part_of(ordered.worker.loop, DiskPart).store
    assert store
    return store


def test_an_engine_that_gets_other_layers_uses_other_files_in_the_same_folder(
    ordered: Ordered, tmp_path: Path
) -> None:
    """The folder is locked, and the first store has to let it go."""
    ordered.load(layers=(0, 2), prefix_dir=str(tmp_path / "prefixes"), prefix_bytes=1 << 20)
    first = store_of(ordered)
    ordered.load(layers=(0, 4))
    second = store_of(ordered)
    assert second.files().digest != first.files().digest
    second.close()
