"""What scripts/bench works out of records and timelines."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.measure import kill, servers, training
from scripts.measure.__main__ import ROWS, markdown, report
from scripts.measure.adapters import write
from scripts.measure.hops import hop_seconds
from scripts.measure.limits import Part, run_passes
from scripts.measure.settings import Row, Settings
from scripts.measure.sums import (
    busy_shares,
    gaps_in,
    ratio,
    steady_tokens_per_second,
    steady_window,
)
from serve.bench.records import Record
from serve.lora.files import read_adapter
from tests.models import save

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


def test_a_row_of_training_has_a_figure_for_each_column() -> None:
    run = {
        "tokens_per_second": 50.0,
        "utilisation": 0.8,
        "expected_utilisation": 0.9,
        "busy_seconds": 8.0,
        "cpu_seconds": [5.0, 7.0],
        "peak_bytes": [110, 90],
        "forecast": [100, 100],
    }
    rates = {name: 25.0 for name in training.RUNS} | {"2 ranks, 1F1B": 50.0}
    shown = training._shown(rates, "2 ranks, 1F1B", [run, run])
    assert len(shown) == len(training.COLUMNS) - 1
    row = dict(zip(training.COLUMNS[1:], shown, strict=True))
    assert row["÷ one batch at a time"] == "2.00"
    assert row["CPU ÷ busy seconds"] == "1.50"
    assert row["busy ÷ bound"] == "0.889"


def test_schedule_and_size_of_micro_batches_are_told_apart() -> None:
    """A row differs from the one before in one of them alone."""
    rows = list(training.RUNS.values())
    apart = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(rows)]
    assert apart == [1] * (len(rows) - 1)


@pytest.mark.long
def test_the_cpu_seconds_of_a_run_are_those_of_each_rank(tmp_path: Path) -> None:
    """Ranks that do nothing but say what a run says, and compute between it."""
    (tmp_path / "launcher.py").write_text(
        "import os, subprocess, sys\n"
        "ranks = [subprocess.Popen([sys.executable, sys.argv[1], 'serve.cli.fine_tune'],"
        " env={**os.environ, 'MLX_RANK': str(r)}) for r in (0, 1)]\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    )
    (tmp_path / "rank.py").write_text(
        "import os, time\n"
        "first = os.environ['MLX_RANK'] == '0'\n"
        "time.sleep(0.3)\n"
        "if first: print('1 trained parameters', flush=True)\n"
        "end = time.process_time() + (0.4 if first else 0.2)\n"
        "while time.process_time() < end: pass\n"
        "time.sleep(1.0 if first else 1.5)\n"
        "if first: print('tokens_per_second=1', flush=True)\n"
        "time.sleep(1)\n"
    )
    words = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "rank.py")]
    first, second = training._watched("a", words)
    assert first == pytest.approx(0.4, abs=0.15)
    assert second == pytest.approx(0.2, abs=0.15)


@pytest.mark.slow
def test_passes_of_uncoupled_shards_need_no_other_process(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", vocab_size=512)
    settings = Settings(folder, (1,), 1, 1, pass_seconds=0.2, seed=0)
    parts = [Part(0, 4, num_shards=2, shard=number) for number in range(2)]
    for seconds in run_passes(settings, parts, batch=2):
        assert len(seconds) > 1


def test_kill_names_the_kind_of_which_no_round_was_measured() -> None:
    with pytest.raises(servers.StartError, match=kill.READ):
        kill._row({kill.REPLAYED: [1.0], kill.READ: []}, [7900], {kill.REPLAYED: 0})


def test_report_goes_on_after_a_row_that_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: Settings) -> Row:
        raise servers.StartError("the server did not start")

    monkeypatch.setitem(ROWS, "kill", fail)
    monkeypatch.setitem(ROWS, "hops", lambda _: Row({"hops": 1}, {}))
    settings = Settings(tmp_path, (1,), 1, 1, 1.0, 0)
    with pytest.raises(SystemExit, match="not measured: kill"):
        report(settings, ["kill", "hops"], tmp_path)
    assert "kill: the server did not start" in capsys.readouterr().err
    assert '"hops": 1' in (tmp_path / "results.json").read_text()
