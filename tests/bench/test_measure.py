"""The figures that scripts/bench computes from records and timelines."""

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest

from scripts.measure import compare, servers, training
from scripts.measure.__main__ import ROWS, report
from scripts.measure.adapters import write
from scripts.measure.hops import hop_seconds
from scripts.measure.rounds import Row, Samples, Settings, in_turn, levels_of, markdown
from scripts.measure.speculation import Answer
from scripts.measure.sums import (
    busy_shares,
    gaps_in,
    ratio,
    steady_tokens_per_second,
    steady_window,
)
from scripts.measure.tasks import tasks
from serve.bench.records import RequestRecord
from serve.lora.files import read_adapter

EARLY = RequestRecord(start=0.0, end=5.0, times=(1.0, 2.0, 3.0, 4.0, 5.0))
LATE = RequestRecord(start=0.0, end=7.0, times=(2.5, 3.5, 4.5, 6.0, 7.0))


def test_the_steady_rate_counts_only_times_when_all_requests_decode() -> None:
    """Before the last first token, prompts are read; after the first end, fewer decode."""
    assert steady_window([EARLY, LATE]) == (2.5, 5.0)
    assert steady_tokens_per_second([EARLY, LATE]) == pytest.approx(5 / 2.5)


def test_a_gap_counts_if_any_part_of_it_is_in_the_window() -> None:
    """The longest gap begins before a disturbance or ends after it."""
    assert gaps_in([EARLY], (2.5, 3.5)) == [1.0, 1.0]
    assert gaps_in([LATE], (5.0, 5.5)) == [1.5]
    assert gaps_in([EARLY], (8.0, 9.0)) == []


def test_busy_shares_count_only_the_part_of_a_span_in_the_window() -> None:
    events = [
        {"ph": "M", "pid": 0, "name": "process_name"},
        {"ph": "X", "pid": 0, "ts": 0.0, "dur": 1.5e6},
        {"ph": "X", "pid": 0, "ts": 2e6, "dur": 0.25e6},
        {"ph": "X", "pid": 1, "ts": 1e6, "dur": 5e6},
        {"ph": "X", "pid": 1, "ts": 9e6, "dur": 5e6},
    ]
    assert busy_shares(events, (1.0, 3.0)) == pytest.approx({0: 0.375, 1: 1.0})


def test_ratio_divides_one_median_by_another_median() -> None:
    assert ratio([1.0, 2.0, 90.0], [4.0]) == 0.5


def test_tables_are_written_as_markdown() -> None:
    assert markdown((["a", "b"], [[1, "x"]])) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_written_adapters_cover_every_linear_module_of_the_model(tmp_path: Path) -> None:
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


def test_a_hop_lasts_from_the_end_of_a_step_on_one_stage_to_its_start_on_the_next() -> None:
    prompt = [span(1, 1, 0.0, 1.0, 9), span(0, 1, 1.5, 2.0, 9)]
    decoding = [span(1, 2, 3.0, 4.0), span(0, 2, 4.25, 5.0), span(1, 3, 5.5, 6.0)]
    later = [span(0, 3, 6.75, 7.0), span(1, 5, 9.0, 9.5), span(0, 5, 10.0, 10.5)]
    forth, back = hop_seconds([{"ph": "M", "pid": 0}, *prompt, *decoding, *later])
    assert forth == pytest.approx([0.25, 0.75, 0.5])
    assert back == pytest.approx([0.5])  # step 4 is not known: nothing is said of its hop


def test_a_training_result_has_a_figure_for_each_column() -> None:
    run = {
        "tokens_per_second": 50.0,
        "utilisation": 0.8,
        "expected_utilisation": 0.9,
        "peak_bytes": [110, 90],
        "forecast": [100, 100],
    }
    rates = {name: 25.0 for name in training.RUNS} | {"2 ranks, 1F1B": 50.0}
    shown = training._shown(rates, "2 ranks, 1F1B", [run, run])
    assert len(shown) == len(training.COLUMNS) - 1
    row = dict(zip(training.COLUMNS[1:], shown, strict=True))
    assert row["÷ one batch at a time"] == "2.00"
    assert row["busy ÷ bound"] == "0.889"


def test_each_training_case_differs_from_the_previous_case_in_one_setting() -> None:
    rows = list(training.RUNS.values())
    apart = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(rows)]
    assert apart == [1] * (len(rows) - 1)


def test_rounds_alternate_the_order_of_servers_and_skip_a_server_that_does_not_start() -> None:
    ran: list[str] = []

    def run(name: str, round_: int) -> None:
        if name == "b" and not round_:
            raise servers.NotMeasuredError("it did not start")
        ran.append(f"{name}{round_}")

    in_turn(2, ["a", "b"], run)
    assert ran == ["a0", "b1", "a1"]


def test_tables_show_the_medians_of_samples_and_their_ratio() -> None:
    samples = Samples("one", "two")
    samples.add("one", 1.0, 2.0, 90.0)
    samples.add("two", 4.0)
    row = samples.row("key", "title", ("one", "two"))
    assert row.data == {"key": {"one": [1.0, 2.0, 90.0], "two": [4.0], "one ÷ two": 0.5}}
    (table,) = row.tables.values()
    assert table[1] == [["one", "2"], ["two", "4"], ["one ÷ two", "0.500"]]


def test_a_figure_that_no_round_measured_is_an_error() -> None:
    samples = Samples("one", "two")
    samples.add("one", 1.0)
    with pytest.raises(servers.NotMeasuredError, match="^two: not measured"):
        samples.row("key", "title", ("two", "one"))


def test_numbers_of_clients_must_be_above_zero() -> None:
    assert levels_of("1,8,32") == (1, 8, 32)
    for text in ("", "0", "1,", "a"):
        with pytest.raises(argparse.ArgumentTypeError, match="numbers such as"):
            levels_of(text)


def test_a_comparison_leaves_out_rounds_that_only_one_checkout_has() -> None:
    before = {0: {"hop": 1.0}, 1: {"hop": 5.0}, 2: {"hop": 2.0}}
    after = {0: {"hop": 2.0}, 2: {"hop": 1.0}}
    columns, rows = compare.table_of({compare.BEFORE: before, compare.AFTER: after})
    assert rows == [["hop", "1.5", "1.5", "1.250", "2.000 0.500"]]
    assert len(columns) == len(rows[0])
    with pytest.raises(servers.NotMeasuredError, match="no round"):
        compare.table_of({compare.BEFORE: before, compare.AFTER: {}})


def test_the_time_per_token_does_not_count_the_first_event() -> None:
    """Eight tokens in five steps; how long the first took is not known."""
    answer = Answer("", times=[1.0, 2.0, 3.0, 5.0], num_tokens=8, num_accepted=3)
    assert answer.token_seconds == pytest.approx(4.0 / 4 * 5 / 8)
    assert Answer("", [1.0], 8, 7).token_seconds is None


def test_each_kind_of_task_has_the_same_number_of_tasks() -> None:
    counts = {kind: 0 for kind in (task.kind for task in tasks(2))}
    for task in tasks(2):
        counts[task.kind] += 1
    assert len(counts) == 8
    assert set(counts.values()) == {2}


def test_a_report_continues_after_a_row_that_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: Settings) -> Row:
        raise servers.NotMeasuredError("the server did not start")

    monkeypatch.setitem(ROWS, "kill", fail)
    monkeypatch.setitem(ROWS, "hops", lambda _: Row({"hops": 1}, {}))
    settings = Settings(tmp_path, (1,), 1, 1, 0)
    with pytest.raises(SystemExit, match="not measured: kill"):
        report(settings, ["kill", "hops"], tmp_path)
    assert "kill: the server did not start" in capsys.readouterr().err
    assert '"hops": 1' in (tmp_path / "results.json").read_text()
