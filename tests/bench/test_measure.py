"""What scripts/bench works out of records and timelines."""

from pathlib import Path
from typing import Any

import pytest

from scripts.measure.__main__ import markdown
from scripts.measure.adapters import write
from scripts.measure.hops import hop_seconds
from scripts.measure.sums import (
    busy_shares,
    gaps_in,
    ratio,
    steady_tokens_per_second,
    steady_window,
)
from serve.bench.records import Record
from serve.rank.adapter_files import read_adapter

EARLY = Record(start=0.0, end=5.0, times=(1.0, 2.0, 3.0, 4.0, 5.0))
LATE = Record(start=0.0, end=7.0, times=(2.5, 3.5, 4.5, 6.0, 7.0))


def test_the_steady_rate_leaves_out_what_is_not_pure_decode() -> None:
    """Before the last first token, prompts are read; after the first end, fewer decode."""
    assert steady_window([EARLY, LATE]) == (2.5, 5.0)
    assert steady_tokens_per_second([EARLY, LATE]) == pytest.approx(5 / 2.5)


def test_a_gap_counts_where_any_part_of_it_is_in_the_window() -> None:
    """The longest gap begins before a disturbance or ends after it."""
    assert gaps_in([EARLY], (2.5, 3.5)) == [1.0, 1.0]
    assert gaps_in([LATE], (5.0, 5.5)) == [1.5]
    assert gaps_in([EARLY], (8.0, 9.0)) == []


def test_busy_shares_count_what_is_in_the_window() -> None:
    events = [
        {"ph": "M", "pid": 0, "name": "process_name"},
        {"ph": "X", "pid": 0, "ts": 0.0, "dur": 1.5e6},
        {"ph": "X", "pid": 0, "ts": 2e6, "dur": 0.25e6},
        {"ph": "X", "pid": 1, "ts": 1e6, "dur": 5e6},
        {"ph": "X", "pid": 1, "ts": 9e6, "dur": 5e6},
    ]
    assert busy_shares(events, (1.0, 3.0)) == pytest.approx({0: 0.375, 1: 1.0})


def test_ratios_are_of_medians() -> None:
    assert ratio([1.0, 2.0, 90.0], [4.0]) == 0.5


def test_tables_are_markdown() -> None:
    assert markdown((["a", "b"], [[1, "x"]])) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_the_adapters_are_for_every_linear_module_of_the_model(tmp_path: Path) -> None:
    write(tmp_path / "a", seed=1, rank=2)
    files = read_adapter("a", str(tmp_path))
    assert files.rank == 2
    assert len(files.targets) == 7 * 16
    shapes = {name.rpartition(".layers.0.")[2]: t.shape for name, t in files.tensors.items()}
    assert shapes["self_attn.k_proj.lora_b"] == (2, 128)
    assert shapes["mlp.down_proj.lora_a"] == (2752, 2)


def span(rank: int, step: int, start: float, end: float, tokens: int = 1) -> dict[str, Any]:
    args = {"step": step, "rows": 1, "tokens": tokens}
    return {"ph": "X", "pid": rank, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args}


def test_hops_lie_between_the_end_on_a_stage_and_the_beginning_on_the_next() -> None:
    prompt = [span(1, 1, 0.0, 1.0, 9), span(0, 1, 1.5, 2.0, 9)]
    decoding = [span(1, 2, 3.0, 4.0), span(0, 2, 4.25, 5.0), span(1, 3, 5.5, 6.0)]
    later = [span(0, 3, 6.75, 7.0), span(1, 5, 9.0, 9.5), span(0, 5, 10.0, 10.5)]
    forth, back = hop_seconds([{"ph": "M", "pid": 0}, *prompt, *decoding, *later])
    assert forth == pytest.approx([0.25, 0.75, 0.5])
    assert back == pytest.approx([0.5])  # step 4 is not known: nothing is said of its hop
