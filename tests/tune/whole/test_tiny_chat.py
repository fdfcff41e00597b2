"""How the embedded model was made: examples/tiny-chat/train.py in small, and the slow, obvious
loop that its losses must be those of."""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import pytest

from serve.tune.config import FineTuneConfig, read_yaml
from serve.tune.data import examples
from tests.cluster.servers import TINY_CHAT
from tests.tune.runs import losses_of, same

pytestmark = pytest.mark.slow

NUM_UPDATES, NUM_ROWS = 12, 16


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """train.py, whose neighbours are imported by name."""
    sys.path.insert(0, str(TINY_CHAT))
    before = set(sys.modules)
    try:
        yield importlib.import_module("train")
    finally:
        sys.path.remove(str(TINY_CHAT))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(TINY_CHAT)):
                del sys.modules[name]


@pytest.fixture(scope="module")
def work(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole of train.py, with few dialogues for each run and for the score."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    more = ["--iters", str(NUM_UPDATES), "--save-every", str(NUM_UPDATES)]
    more += ["--steps-per-report", "1", "--val-batches", "1", "--batch-size", str(NUM_ROWS)]
    few = [replace(lesson, num_dialogues=1000) for lesson in script.LESSONS]
    words = ["--work", str(folder / "work"), "--out", str(folder / "out"), "--", *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "LESSONS", few)
        patch.setattr(script, "score_folder", partial(script.score_folder, num_dialogues=20))
        patch.setattr(sys, "argv", ["train.py", *words])
        script.main()
    return folder / "work"


@pytest.fixture
def models(work: Path) -> list[Path]:
    """What both runs have written."""
    return [work / "runs" / name / "model" for name in ("basics", "dialogues")]


def schedule(highest: float) -> Callable[[mx.array], mx.array]:
    """Warm up in 100 updates, then fall along a cosine."""
    warmup = optim.linear_schedule(0.0, highest, 100)
    decay = optim.cosine_decay(highest, 6300, highest * 0.01)
    joined: Callable[[mx.array], mx.array] = optim.join_schedules([warmup, decay], [101])
    return joined


def plain_losses(start: Path, folder: Path, adam_rate: float = 3e-3) -> list[float]:
    """Of an unsplit model, a batch at a time, by mlx's own parts."""
    model, tokenizer = mlx_lm.load(str(start))
    settings = {**read_yaml(TINY_CHAT / "basics.yaml"), "batch_size": NUM_ROWS}
    config = FineTuneConfig(model=start, data=folder, **settings)
    split = examples.read_split(folder / "train.jsonl", tokenizer, config)
    muon = optim.Muon(schedule(0.015), momentum=0.95, weight_decay=0.0)
    adamw = optim.AdamW(schedule(adam_rate), betas=[0.9, 0.98], weight_decay=0.0)
    both = optim.MultiOptimizer(
        [muon, adamw], [lambda name, array: "layers" in name and array.ndim == 2]
    )

    def loss_of(model: Any, batch: examples.MicroBatch) -> mx.array:
        losses = nn.losses.cross_entropy(model(batch.inputs), batch.targets) * batch.mask
        return losses.sum() / batch.mask.sum()

    model.train()
    losses = []
    for number in range(NUM_UPDATES):
        chosen = examples.batch_at(split, number, config.batch_size, 7)
        batch = examples.pad([split.examples[n] for n in chosen])
        loss, gradients = nn.value_and_grad(model, loss_of)(model, batch)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        both.update(model, gradients)
        mx.eval(loss, model.state, both.state)
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_losses_of_the_pipeline_equal_those_of_a_plain_loop(work: Path, models: list[Path]) -> None:
    """The negative control: another learning rate of the embedding and the norms."""
    found = list(losses_of(models[0].parent).values())
    assert len(found) == NUM_UPDATES
    assert found[-1] < found[0] - 1
    expected = plain_losses(work / "start", work / "basics")
    assert found == pytest.approx(expected, rel=1e-4)
    other = plain_losses(work / "start", work / "basics", adam_rate=2.9e-3)
    assert found != pytest.approx(other, rel=1e-4)


def test_the_second_training_run_begins_with_the_model_of_the_first_run(models: list[Path]) -> None:
    first, second = (list(losses_of(model.parent).values()) for model in models)
    assert second[0] < first[0] - 0.2, "it did not begin with what the first has learned"
    card = (models[1] / "README.md").read_text()
    assert "brigade launch -n 2 -- fine-tune" in card
    assert "--model runs/basics/model" in card
    assert str(models[0].parents[2]) not in card, "it names the machine it was made on"


def test_the_result_is_a_folder_in_the_form_of_the_embedded_model(
    work: Path, models: list[Path]
) -> None:
    out = work.parent / "out"
    ours, embedded = (mx.load(str(f / "model.safetensors")) for f in (out, TINY_CHAT))
    last = mx.load(str(models[1] / "model.safetensors"))
    assert isinstance(ours, dict)
    assert isinstance(embedded, dict)
    assert isinstance(last, dict)
    shapes = [{name: (a.shape, a.dtype) for name, a in m.items()} for m in (ours, embedded)]
    assert shapes[0] == shapes[1]
    assert same(ours, last)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        found, expected = (json.loads((f / name).read_text()) for f in (out, TINY_CHAT))
        assert found == expected, name
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_text() == (TINY_CHAT / name).read_text()


def test_the_model_card_contains_the_models_accuracy(work: Path) -> None:
    text = (work.parent / "out" / "training.md").read_text()
    assert text.startswith((work / "runs" / "dialogues" / "README.md").read_text())
    assert re.search(r"^\| \*\*all\*\* \| [0-9]+ of [0-9]+ \| [0-9.]+% \|$", text, re.MULTILINE)


def test_each_lesson_has_a_dialogue_for_each_row_of_its_batches(script: ModuleType) -> None:
    """So that everything is learned once."""
    for lesson in script.LESSONS:
        settings = read_yaml(TINY_CHAT / f"{lesson.name}.yaml")
        assert settings["iters"] * settings["batch_size"] == lesson.num_dialogues
