"""Fine-tuning: two ranks with 1F1B, the same one batch or micro-batch at a time, and one rank."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from scripts.measure.clients import TIMEOUT
from scripts.measure.rounds import Row, Settings, in_turn
from scripts.measure.servers import NotMeasuredError
from serve.bench.prompts import random_words

EXAMPLES = 8  # of a batch
TOKENS = 128  # of each example
UPDATES = 8
# Ranks, schedule, and into how many micro-batches a batch is cut. Both schedules have a row with
# the small micro-batches: what these cost alone is not the schedule's gain.
RUNS = {
    "1 rank": (1, "naive", 1),
    "2 ranks, one batch at a time": (2, "naive", 1),
    "2 ranks, one micro-batch at a time": (2, "naive", EXAMPLES),
    "2 ranks, 1F1B": (2, "1f1b", EXAMPLES),
}
COLUMNS = (
    *("ranks, schedule", "tokens/s", "÷ one batch at a time", "busy", "bound", "busy ÷ bound"),
    "memory of each rank, measured ÷ forecast",
)


def training(settings: Settings) -> Row:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        data = _write_data(Path(folder) / "data", settings.seed)

        def run(name: str, round_: int) -> None:
            runs[name].append(_run(settings.model, data, Path(folder) / f"{name} {round_}", name))

        in_turn(settings.rounds, tuple(RUNS), run)
    rates = {name: median(run["tokens_per_second"] for run in runs[name]) for name in RUNS}
    rows = [[name, *_shown(rates, name, runs[name])] for name in RUNS]
    return Row(data={"training": runs}, tables={"fine-tuning": (COLUMNS, rows)})


def _shown(rates: dict[str, float], name: str, runs: list[dict[str, Any]]) -> list[str]:
    busy, bound = (median(r[key] for r in runs) for key in ("utilisation", "expected_utilisation"))
    # Of each rank, the round that is furthest from the forecast.
    ratios = [[m / f for m, f in zip(r["peak_bytes"], r["forecast"], strict=True)] for r in runs]
    worst = [max(rank, key=lambda ratio: abs(ratio - 1)) for rank in zip(*ratios, strict=True)]
    return [
        f"{rates[name]:.0f}",
        f"{rates[name] / rates['2 ranks, one batch at a time']:.2f}",
        f"{busy:.1%}",
        f"{bound:.1%}",
        f"{busy / bound:.3f}",
        ", ".join(f"{ratio:.2f}" for ratio in worst),
    ]


def _write_data(folder: Path, seed: int) -> Path:
    """Writes examples of random words, about twice as long as --max-seq-length, which cuts them."""
    folder.mkdir()
    random = Random(seed)
    lines = [json.dumps({"text": random_words(random, 2 * TOKENS)}) for _ in range(64)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def _run(model: Path, data: Path, out: Path, name: str) -> dict[str, Any]:
    num_ranks, schedule, num_micro_batches = RUNS[name]
    words = [sys.executable, "-m", "launcher.cli", "launch", "-n", str(num_ranks), "--"]
    words += ["fine-tune", "--model", str(model), "--data", str(data), "--adapter-path", str(out)]
    for flag, value in {
        "--num-layers": -1,
        "--batch-size": EXAMPLES,
        "--micro-batches": num_micro_batches,
        "--max-seq-length": TOKENS + 1,
        "--schedule": schedule,
        "--iters": UPDATES,
        "--steps-per-report": UPDATES,
    }.items():
        words += [flag, str(value)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT)
    if ended.returncode:
        raise NotMeasuredError(f"{name}: {(ended.stdout + ended.stderr)[-3000:]}")
    report, finished = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {
        "tokens_per_second": report["tokens_per_second"],
        "utilisation": finished["utilisation"],
        "expected_utilisation": finished["expected_utilisation"],
        "peak_bytes": finished["peak_bytes"],
        "forecast": finished["forecast"]["peak_bytes"],
    }
