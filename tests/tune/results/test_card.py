"""Model card and charts of a run."""

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from serve.tune import forecast
from serve.tune.forecast import OpRecord, OpSpan
from serve.tune.results import card, checkpoint, plot, run_folder
from serve.tune.schedule import OpCost, PipelineOp, Shape, make_schedule, simulate
from tests.tune.ranks import config_of

METRICS: list[dict[str, Any]] = [
    {"iteration": 0, "name": "valid", "loss": 3.25},
    *(
        {"iteration": n, "loss": 3 / n, "learning_rate": 1e-4, "gradient_norm": 1.5}
        for n in range(1, 5)
    ),
    {"iteration": 2, "name": "valid", "loss": 1.5},
    {"iteration": 4, "name": "valid", "loss": 2.5},
    {"iteration": 4, "name": "test", "loss": 2.0},
    {"iteration": 4, "utilisation": 0.9},
]
FACTS = card.Facts(
    command="brigade fine-tune --data 'my data'",
    model_digest="0123",
    data={"train": ("40 examples in 9 rows", "4567"), "valid": ("6 examples", "89ab")},
    num_ranks=2,
)


def spans() -> list[OpSpan]:
    schedule = make_schedule("1f1b", Shape(2, 4))
    timeline = simulate(schedule, [OpCost(1, 2, 0.5)] * 2)
    return [OpSpan(*op, start, end) for ops in timeline.spans for op, start, end in ops]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "poet"
    folder.mkdir()
    for line in METRICS:
        checkpoint.add_metrics(folder, line)
    return folder


def test_the_model_card_contains_the_command_and_data_and_losses(folder: Path) -> None:
    written = card.write(config_of(adapter_path=folder), FACTS, spans())
    assert [path.name for path in written.paths] == ["README.md", "curves.svg", "schedule.svg"]
    text = (folder / "README.md").read_text()
    for part in (
        "base_model: m\n",
        "# poet",
        FACTS.command,
        "m (digest 0123)",
        "| train.jsonl | 40 examples in 9 rows (digest 4567) |",
        "| train loss | 3.0000 (first, batch 1), 0.7500 (best, batch 4), 0.7500 (last, batch 4) |",
        "| valid loss | 3.2500 (first, batch 0), 1.5000 (best, batch 2), 2.5000 (last, batch 4) |",
        "| test loss | 2.0000",
    ):
        assert part in text, part


def test_charts_show_every_curve_and_every_operation(folder: Path) -> None:
    card.write(config_of(adapter_path=folder), FACTS, spans())
    for name, texts in (
        ("curves.svg", ("training", "validation", "norm of the gradient")),
        ("schedule.svg", ("stage 0", "stage 1", "forward", "1f1b, the last update")),
    ):
        source = (folder / name).read_text()
        ElementTree.fromstring(source)
        for text in texts:
            assert f"<!-- {text} -->" in source, text
    # One number of a micro-batch in each bar.
    assert (folder / "schedule.svg").read_text().count("<!-- 4 -->") >= len("FBW") * 2


def test_the_chart_of_the_schedule_is_kept_if_nothing_is_left_to_train(folder: Path) -> None:
    (folder / "schedule.svg").write_text("of the updates that were made")
    written = card.write(config_of(adapter_path=folder), FACTS, [])
    assert [path.name for path in written.paths] == ["README.md", "curves.svg"]
    assert (folder / "schedule.svg").read_text() == "of the updates that were made"


def test_a_run_without_validation_has_a_chart_without_a_validation_curve(tmp_path: Path) -> None:
    for line in METRICS[1:3]:
        checkpoint.add_metrics(tmp_path, line)
    card.write(config_of(adapter_path=tmp_path), FACTS, spans()[:1])
    assert "<!-- validation -->" not in (tmp_path / "curves.svg").read_text()


def test_a_constant_learning_rate_has_no_chart(folder: Path) -> None:
    card.write(config_of(adapter_path=folder), FACTS, [])
    source = (folder / "curves.svg").read_text()
    assert "<!-- learning rate -->" not in source
    assert "<!-- loss, at learning rate 0.0001 -->" in source
    checkpoint.add_metrics(folder, {**METRICS[1], "iteration": 5, "learning_rate": 5e-5})
    card.write(config_of(adapter_path=folder), FACTS, [])
    assert "<!-- learning rate -->" in (folder / "curves.svg").read_text()


def test_a_loss_that_is_not_a_number_is_not_reported_as_the_best_loss(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    for iteration, loss in enumerate((math.nan, 2.0, math.nan, 3.0)):
        line = {"iteration": iteration, "name": "valid", "loss": loss}
        checkpoint.add_metrics(folder, line)
    text = card.card(config_of(), FACTS, checkpoint.read_metrics(folder))
    assert "2.0000 (best, batch 1)" in text


def test_the_module_of_charts_does_not_import_the_model_card() -> None:
    source = Path(plot.__file__).read_text()
    assert "serve.tune.results.card" not in source


def test_the_model_card_is_written_without_matplotlib_and_a_hint_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card.importlib.util, "find_spec", lambda _: None)
    written = card.write(config_of(adapter_path=folder), FACTS, spans())
    assert [path.name for path in written.paths] == ["README.md"]
    assert written.without is not None
    assert "pip install matplotlib" in written.without
    assert not (folder / "curves.svg").exists()


def test_a_line_of_metrics_truncated_at_any_byte_is_skipped(tmp_path: Path) -> None:
    """Also where what is there ends as a whole line does."""
    checkpoint.add_metrics(tmp_path, METRICS[0])
    length = (tmp_path / run_folder.METRICS).stat().st_size
    checkpoint.add_metrics(tmp_path, {"forecast": {"utilisation": 0.9}, "iteration": 8})
    text = (tmp_path / run_folder.METRICS).read_bytes()
    for end in range(length, len(text)):
        (tmp_path / run_folder.METRICS).write_bytes(text[:end])
        assert checkpoint.read_metrics(tmp_path) == METRICS[:1]


def test_spans_of_a_chart_are_the_times_of_operations() -> None:
    records = [OpRecord(PipelineOp("B", 3, 1), 0.5, 0.75, 0, 0, 0)]
    assert forecast.spans(records) == [("B", 3, 1, 0.5, 0.75)]
