"""Chat data sets that nobody here wrote, out of packages that are fetched by name: 128 chats of
one and more turns (tinker-cookbook, Apache 2.0), and 300 of many turns with tools (Glaive's, in
the sources of LLaMA-Factory, Apache 2.0). The first as it is, of the second the names rewritten."""

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from serve.tune.events import Started, Validated
from serve.tune.results import checkpoint
from tests.tune.runs import finish, flags, launch, losses_of, ran

pytestmark = pytest.mark.slow

CHATS = "tinker_cookbook/example_data/conversations.jsonl"
TOOL_CHATS = "llamafactory-0.9.5/data/glaive_toolcall_en_demo.json"


def fetched(folder: Path, package: str, *how: str) -> Path:
    words = ["pip", "download", "--quiet", "--no-deps", *how, package, "-d", str(folder)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package registry: {done.stderr[-200:]}")
    (path,) = folder.iterdir()
    return path


def write_splits(folder: Path, lines: Sequence[str], num_train: int) -> Path:
    (folder / "train.jsonl").write_text("".join(lines[:num_train]))
    (folder / "valid.jsonl").write_text("".join(lines[num_train:]))
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    wheel = fetched(folder, "tinker-cookbook==0.6.1", "--only-binary", ":all:")
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(CHATS).decode().splitlines(keepends=True)
    return write_splits(folder, lines, 104)


@pytest.mark.parametrize("packing", [False, True])
def test_a_model_of_another_architecture_learns_without_special_handling(
    chats: Path, tmp_path: Path, packing: bool
) -> None:
    more = {"packing": True, "max_seq_length": 512, "batch_size": 2} if packing else {}
    events = ran(chats, tmp_path / "out", epochs=3, learning_rate=5e-4, steps_per_eval=13, **more)
    (started,) = (event for event in events if isinstance(event, Started))
    assert started.size.startswith("104 examples")
    assert (started.num_cut, started.num_dropped) == (0, 0)
    validations = [event.loss for event in events if isinstance(event, Validated)]
    assert min(validations) < 0.8 * validations[0], validations
    assert roles_of(chats) == {"system", "user", "assistant"}


def roles_of(folder: Path) -> set[str]:
    lines = (folder / "train.jsonl").read_text().splitlines()
    return {message["role"] for line in lines for message in json.loads(line)["messages"]}


# --- tools


@pytest.fixture(scope="module")
def tool_chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    sources = fetched(folder, "llamafactory==0.9.5", "--no-binary", "llamafactory")
    with tarfile.open(sources) as archive:
        file = archive.extractfile(TOOL_CHATS)
        assert file
        chats = json.load(file)
    lines = [json.dumps(renamed(chat)) + "\n" for chat in chats]
    assert len(lines) == 300
    return write_splits(folder, lines, 270)


def renamed(chat: dict[str, Any]) -> dict[str, Any]:
    """From ShareGPT's names to OpenAI's."""
    functions = json.loads(chat["tools"]) if chat["tools"] else []
    tools = [{"type": "function", "function": function} for function in functions]
    messages = list(renamed_turns(chat["conversations"]))
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def renamed_turns(turns: Sequence[dict[str, str]]) -> Iterator[dict[str, Any]]:
    roles = {"human": "user", "gpt": "assistant", "observation": "tool"}
    for turn in turns:
        if turn["from"] == "function_call":
            call = {"type": "function", "function": json.loads(turn["value"])}
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            yield {"role": roles[turn["from"]], "content": turn["value"]}


@pytest.mark.timeout(240)
def test_training_on_chats_with_tools_is_the_same_on_one_and_two_ranks(
    tool_chats: Path, tmp_path: Path
) -> None:
    """Every turn of the assistant is learned, calls among them."""
    assert roles_of(tool_chats) == {"user", "assistant", "tool"}
    more = ["--learning-rate", "1e-3", "--batch-size", "2", "--val-batches", "4"]
    outs = [tmp_path / "one", tmp_path / "two"]
    for num_ranks, out in enumerate(outs, start=1):
        said = finish(launch(num_ranks, flags(tool_chats, out, *more)))
        assert "269 examples, " in said
        assert "36 examples are cut at --max-seq-length, 1 are left out" in said
    one, two = (losses_of(out) for out in outs)
    assert len(one) == 8
    assert two == pytest.approx(one, rel=1e-3)
    metrics = checkpoint.read_metrics(outs[0])
    validations = [m["loss"] for m in metrics if m.get("name") == "valid"]
    assert validations[-1] < 0.8 * validations[0], validations
