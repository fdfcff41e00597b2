"""Writes the model card and the charts of a run, on rank 0."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve import __version__
from serve.tune.config import FineTuneConfig
from serve.tune.events import Written
from serve.tune.forecast import OpSpan
from serve.tune.results import checkpoint, run_folder

CURVES = "curves.svg"
SCHEDULE = "schedule.svg"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a run other than its metrics. data are the size and digest of each split."""

    command: str
    model_digest: str
    data: dict[str, tuple[str, str]]
    num_ranks: int


def write(config: FineTuneConfig, facts: Facts, ran: Sequence[OpSpan]) -> Written:
    """Writes the model card, and the charts if matplotlib is installed."""
    folder = config.adapter_path
    metrics = checkpoint.read_metrics(config.adapter_path)
    text = card(config, facts, metrics)
    checkpoint.write_text(folder / run_folder.CARD, text)
    if importlib.util.find_spec("matplotlib") is None:
        return Written([folder / run_folder.CARD], "charts: pip install matplotlib")
    from serve.tune.results.plot import draw_curves, draw_schedule

    with checkpoint.writing(folder):
        draw_curves(folder / CURVES, metrics)
        if ran:
            draw_schedule(folder / SCHEDULE, f"{config.schedule}, the last update", ran)
    names = [run_folder.CARD, CURVES]
    if ran:
        names.append(SCHEDULE)
    return Written([folder / name for name in names], None)


def card(config: FineTuneConfig, facts: Facts, metrics: Sequence[dict[str, Any]]) -> str:
    """Returns the model card as Markdown, with the header that the Hugging Face hub reads."""
    name = config.adapter_path.resolve().name
    rows = [("model", f"{config.model} (digest {facts.model_digest})")]
    for split, (size, digest) in facts.data.items():
        rows.append((f"{split}.jsonl", f"{size} (digest {digest})"))
    rows.append(("ranks, schedule", f"{facts.num_ranks}, {config.schedule}"))
    rows += _losses(metrics)
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    if config.fine_tune_type == "full":
        kind = "All weights"
    else:
        kind = config.fine_tune_type
    return f"""---
base_model: {config.model}
library_name: mlx
pipeline_tag: text-generation
tags: [mlx, {config.fine_tune_type}]
---

# {name}

{kind} of {config.model}, trained with mlx-brigade {__version__}:

```sh
{facts.command}
```

| | |
|---|---|
{table}

All settings are in `{run_folder.CONFIG}`, all losses in `{run_folder.METRICS}`.
"""


def _losses(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns a row for each kind of loss, with the first, the best and the last."""
    with_loss = [each for each in metrics if "loss" in each]
    rows = []
    for kind in ("train", "valid", "test"):
        found = [each for each in with_loss if each.get("name", "train") == kind]
        if not found:
            continue
        marked = {
            "first": found[0],
            "best": min(found, key=_finite_first),
            "last": found[-1],
        }
        texts = []
        for word, each in marked.items():
            texts.append(f"{each['loss']:.4f} ({word}, batch {each['iteration']})")
        rows.append((f"{kind} loss", ", ".join(texts)))
    return rows


def _finite_first(metrics: dict[str, Any]) -> tuple[bool, float]:
    """Returns a sort key by which a loss that is not a number is never the best."""
    loss = float(metrics["loss"])
    return math.isnan(loss), loss
