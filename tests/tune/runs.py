"""Whole runs on the embedded model: their data, flags and what they leave."""

import json
import os
import random
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from serve.core.config import Cluster
from serve.tune.config import FineTuneConfig
from serve.tune.events import Event
from serve.tune.results import checkpoint, run_folder
from serve.tune.run import run
from tests.cluster.servers import BIN, ROOT, TINY_CHAT
from tests.models import save

WITHOUT_CHARTS = str(Path(__file__).parent / "without_charts")
QUESTIONS = [(a, b) for a in range(2, 20) for b in (1, 3, 8)]


def write_data(folder: Path) -> Path:
    """Chats of one and of two turns."""
    order = random.Random(5)
    for name, count in (("train", 40), ("valid", 6), ("test", 6)):
        lines = []
        for _ in range(count):
            messages = []
            for a, b in order.sample(QUESTIONS, order.randint(1, 2)):
                answer = f"It is {a + b}, friend."
                messages.append({"role": "user", "content": f"What is {a} plus {b}?"})
                messages.append({"role": "assistant", "content": answer})
            lines.append(json.dumps({"messages": messages}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def with_tokenizer(folder: Path, name: str) -> Path:
    """Saves a model with heads enough for four shards. Three shards have two heads, one and one."""
    save(folder, name, num_hidden_layers=4, num_key_value_heads=4, vocab_size=1024)
    for file in TINY_CHAT.iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder


def flags(data: Path, out: Path, *more: str) -> list[str]:
    words = ["--model", str(TINY_CHAT), "--data", str(data), "--adapter-path", str(out)]
    words += ["--mask-prompt", "--num-layers", "6", "--learning-rate", "1e-4", "--iters", "8"]
    return [*words, "--save-every", "4", "--steps-per-report", "1", *more]


def config_of(data: Path, out: Path, **changes: Any) -> FineTuneConfig:
    fields = {"model": TINY_CHAT, "data": data, "adapter_path": out, "mask_prompt": True}
    fields |= {"num_layers": 6, "learning_rate": 1e-4, "iters": 8, "save_every": 4}
    return FineTuneConfig(**{**fields, "steps_per_report": 1, **changes})


def ran(data: Path, out: Path, **changes: Any) -> list[Event]:
    """The events of a run on one rank in this process."""
    events: list[Event] = []
    run(config_of(data, out, **changes), Cluster(), events.append)
    return events


def launch(num_ranks: int, words: Sequence[str]) -> list[str]:
    command = [str(BIN / "brigade")]
    if num_ranks > 1:
        command += ["launch", "-n", str(num_ranks), "--"]
    return [*command, "fine-tune", *words]


def finish(command: Sequence[str], code: int = 0, seconds: float = 90) -> str:
    """What it said. Nobody may be left."""
    mark = str(uuid.uuid4())
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "200"}
    paths = [WITHOUT_CHARTS, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": ":".join(paths), "MARK": mark},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    # Other tests run at the same time: each is known by its environment.
    assert not [p for p in psutil.process_iter(["environ"]) if mark in str(p.info["environ"])]
    return said


def arrays_of(out: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(out / run_folder.ADAPTERS))
    assert isinstance(arrays, dict)
    return arrays


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[n], b[n]).item() for n in a)


def losses_of(out: Path) -> dict[int, float]:
    return _reported(out, "loss")


def norms_of(out: Path) -> dict[int, float]:
    return _reported(out, "gradient_norm")


def _reported(out: Path, name: str) -> dict[int, float]:
    lines = checkpoint.read_metrics(out)
    return {line["iteration"]: line[name] for line in lines if "gradient_norm" in line}


def valid_losses_of(out: Path) -> dict[int, float]:
    lines = checkpoint.read_metrics(out)
    return {line["iteration"]: line["loss"] for line in lines if line.get("name") == "valid"}
