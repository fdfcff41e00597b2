"""What a run tells TensorBoard and Weights & Biases, with their own libraries."""

import importlib.util
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from serve.cli.fine_tune import check
from serve.cli.report_to import FOLDER, Reports, services
from serve.core.errors import UsageError
from serve.tune.events import Reported, Started
from tests.cluster.servers import TINY_CHAT
from tests.errors import fails
from tests.tune.ranks import config_of
from tests.tune.runs import finish, flags, launch
from tests.tune.whole.test_view import EVENTS

(STARTED,) = (event for event in EVENTS if isinstance(event, Started))
(REPORTED,) = (event for event in EVENTS if isinstance(event, Reported))


def scalars_of(folder: Path) -> dict[str, dict[int, float]]:
    """By name and step. A file is of records: length, its checksum, an event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):  # the steps from here on are reported again
                for steps in found.values():
                    for step in [step for step in steps if step >= event.step]:
                        del steps[step]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard_gets_every_figure_under_the_name_that_mlx_lm_uses(tmp_path: Path) -> None:
    config = config_of(adapter_path=tmp_path, report_to="tensorboard")
    reports = Reports(config)
    for event in EVENTS:
        reports(event)
    reports.close()
    found = scalars_of(tmp_path / FOLDER)
    assert found == {
        "train_loss": {10: 1.5},
        "learning_rate": {10: pytest.approx(1e-4)},
        "gradient_norm": {10: 2.5},
        "tokens_per_second": {10: 1000.0},
        "iterations_per_second": {10: 4.0},
        "utilisation": {10: pytest.approx(0.7)},
        "peak_memory": {10: pytest.approx(0.003)},
        "val_loss": {10: 1.25},
    }


def test_a_resumed_run_deletes_metrics_that_it_will_report_again(tmp_path: Path) -> None:
    """Of a run that was killed after batch 10, with a checkpoint of batch 4."""
    config = config_of(adapter_path=tmp_path, report_to="tensorboard")
    for started, losses in (
        (replace(STARTED, iteration=0), {4: 3.0, 8: 2.0, 10: 1.0}),
        (replace(STARTED, iteration=4), {8: 2.5}),
    ):
        reports = Reports(config)
        reports(started)
        for iteration, loss in losses.items():
            reports(replace(REPORTED, iteration=iteration, loss=loss))
        reports.close()
        time.sleep(1)  # Its files have the second in their names.
    assert scalars_of(tmp_path / FOLDER)["train_loss"] == {4: 3.0, 8: 2.5}


def test_no_report_is_written_before_training_or_unless_asked_for(tmp_path: Path) -> None:
    for asked, events in ((None, EVENTS), ("tensorboard", EVENTS[1:])):
        reports = Reports(config_of(adapter_path=tmp_path, report_to=asked))
        for event in events:
            reports(event)
        reports.close()
    assert not list(tmp_path.iterdir())


def test_a_missing_library_for_reports_is_noticed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}')
    words = ["--model", str(TINY_CHAT), "--data", str(tmp_path), "--report-to"]
    assert services(check([*words, "tensorboard, TensorBoard,"], 1)) == ["tensorboard"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with fails(UsageError, "missing_package", match="wandb"):
        check([*words, "WandB"], 1)
    assert check([*words, "wandb"], 2, rank=1).report_to == "wandb", "rank 0 says it"


@pytest.mark.long
def test_a_run_on_two_ranks_reports_each_metric_once(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(launch(2, flags(folder, out, "--report-to", "tensorboard", "--iters", "4")))
    found = scalars_of(out / FOLDER)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {m["iteration"]: m["loss"] for m in metrics if "gradient_norm" in m}
    assert found["train_loss"] == pytest.approx(losses, rel=1e-6)
    assert found["val_loss"].keys() == {0, 4}
    assert len(list((out / FOLDER).iterdir())) == 1, "more than one rank has written"


def wandb_records(path: Path) -> Iterator[bytes]:
    """Of a file as LevelDB's logs are: blocks of 32 KiB, in them parts of records, each after its
    checksum, length and kind (whole, first, middle, last)."""
    data, offset, record = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if (1 << 15) - offset % (1 << 15) < 7:
            offset += (1 << 15) - offset % (1 << 15)
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_gets_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network it keeps them in a file."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    from wandb.proto.wandb_internal_pb2 import Record

    config = config_of(adapter_path=tmp_path, report_to="wandb", project_name="tiny")
    reports = Reports(config)
    for event in EVENTS:
        reports(event)
    reports.close()
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows: dict[str, object] = {}
    for record in map(Record.FromString, wandb_records(path)):
        rows |= {"project": record.run.project} if record.run.project else {}
        for item in record.history.item:
            rows[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    assert rows["project"] == "tiny"
    assert (rows["_step"], rows["train_loss"], rows["val_loss"]) == (10, 1.5, 1.25)
