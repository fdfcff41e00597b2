"""Ranks as threads of one process, small models with something to train, and the slow,
obvious gradients of the unsplit model."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from serve.core.errors import ClusterError
from serve.core.plan import even_split
from serve.model.stage import Stage
from serve.tune.backward import Arrays, TrainedStage, loss_sum
from serve.tune.config import FineTuneConfig
from serve.tune.data.examples import MicroBatch
from serve.tune.loop import Trainer
from serve.tune.mesh import groups_of
from serve.tune.model import DropoutKeys, make_trainable
from serve.tune.schedule import Shape
from serve.tune.transport import Links, LocalLinks, gather, local_links
from tests.models import build

Result = TypeVar("Result")
# One after another, as in processes: seeds and the trial's seams are global.
BUILDING = threading.Lock()


def config_of(**changes: Any) -> FineTuneConfig:
    fields = {"model": Path("m"), "data": Path("d"), "lora_parameters": LORA}
    return FineTuneConfig(**{**fields, **changes})


LORA = {"rank": 4, "dropout": 0.0, "scale": 2.0}


def run_ranks(num_ranks: int, rank: Callable[[LocalLinks], Result]) -> list[Result]:
    """What each rank returns. The first error ends the others."""

    def top(links: LocalLinks) -> Result:
        try:
            return rank(links)
        except BaseException:
            # Not close, after which whoever has another neighbour would wait for it.
            for inbox in links._inboxes:
                inbox.fail(ClusterError(f"Rank {links.rank} has ended."))
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(top, links) for links in local_links(num_ranks)]
    for future in sorted(futures, key=lambda f: "has ended" in str(f.exception())):
        future.result()
    return [future.result() for future in futures]


def tuned(
    config: FineTuneConfig,
    name: str = "llama",
    draw: DropoutKeys | None = None,
    make: Callable[[str], nn.Module] = build,
) -> nn.Module:
    """With adapters that are not zero, so that every gradient is something."""
    model = make(name)
    make_trainable(config, draw or DropoutKeys(config.seed), model)
    mx.random.seed(3)
    trained = sorted(dict(tree_flatten(model.trainable_parameters())).items())
    moved = [
        (key, array + 0.05 * mx.random.normal(array.shape, array.dtype)) for key, array in trained
    ]
    model.update(tree_unflatten(moved))
    mx.eval(model.parameters())
    return model


def trainer(
    config: FineTuneConfig,
    links: Links,
    name: str = "llama",
    make: Callable[[str], nn.Module] = build,
) -> Trainer:
    """A trainer of this rank's part of the same model."""
    draw = DropoutKeys(config.seed)
    groups = groups_of(config.layout(links.num_ranks), links)
    shape = Shape(groups.layout.pipeline_size, 1, config.num_chunks())
    with BUILDING:
        layers = even_split(len(make(name).layers), shape.num_stages)[::-1]
        stages = {
            n: TrainedStage(
                Stage(tuned(config, name, draw, make), *layers[n]), config.grad_checkpoint
            )
            for n in shape.stages(groups.pipeline.rank)
        }
    return Trainer(config, stages, groups, draw)


def batches_of(lengths: Sequence[Sequence[int]], seed: int = 1) -> list[MicroBatch]:
    """Micro-batches of rows of these lengths, with labels at random."""
    random, made = np.random.default_rng(seed), []
    for rows in lengths:
        tokens = random.integers(1, 96, (len(rows), max(rows)))
        inside = np.arange(max(rows))[None] < np.array(rows)[:, None]
        mask = (random.random(tokens.shape) < 0.6) & inside
        tokens = (tokens * inside).astype(np.int32)
        labels = mask[:, 1:].astype(np.float32)
        arrays = mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:]), mx.array(labels)
        made.append(MicroBatch(*arrays, int(labels.sum()), sum(rows) - len(rows)))
    return made


def unsplit_gradients(model: nn.Module, batches: Sequence[MicroBatch]) -> tuple[float, Arrays]:
    """The mean loss over all labels of all batches, and its gradients."""
    num_labels = sum(batch.num_labels for batch in batches)

    def loss(parameters: Any) -> mx.array:
        model.update(parameters)
        return sum(loss_sum(model(b.inputs), b) for b in batches) / num_labels

    parameters = model.trainable_parameters()
    value, gradients = mx.value_and_grad(loss)(parameters)
    model.update(parameters)
    mx.eval(value, gradients)
    return float(value.item()), dict(tree_flatten(gradients))


def largest_difference(found: Arrays, expected: Arrays) -> float:
    """Of two sets of arrays with the same names: the worst norm of a difference, relative to
    the norm of what is expected. NaN if there is one anywhere, which max would pass over."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    apart = [
        mx.linalg.norm(found[n] - expected[n]) / mx.maximum(mx.linalg.norm(expected[n]), 1e-30)
        for n in expected
    ]
    return float(np.max([each.item() for each in apart]))


# --- an update against the unsplit model


class Kept:
    """In the place of an optimizer: keeps the gradients, and changes no parameter."""

    def __init__(self) -> None:
        self.state: Arrays = {}
        self.gradients: Arrays = {}

    def apply_gradients(self, gradients: Arrays, parameters: Arrays) -> Arrays:
        self.gradients = dict(gradients)
        return parameters


Found = tuple[float, Arrays]
"""A loss, and gradients by the names of their parameters."""


def update_of(own: Trainer, batches: Sequence[MicroBatch]) -> Found:
    """The loss of one update, and on rank 0 what the optimizers of all ranks get."""
    kept = own.optimizer = Kept()
    update = own.update(0, batches, own.schedule(len(batches)))
    return update.loss, gather(own.links, kept.gradients)


def error_of(found: Found, expected: Found) -> float:
    """The largest of the loss and all gradients, relative."""
    loss = abs(found[0] - expected[0]) / abs(expected[0])
    return float(np.max([loss, largest_difference(found[1], expected[1])]))


def deep(name: str) -> nn.Module:
    """With layers enough for two slices on each of four ranks."""
    return build(name, num_hidden_layers=8)


def quantized(name: str) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    model = build(name, num_hidden_layers=8, **sizes)
    nn.quantize(model, group_size=32, bits=4)
    return model


class Kind(NamedTuple):
    """What is trained, and of which model."""

    fine_tune_type: str
    name: str
    make: Callable[[str], nn.Module]


KINDS = {
    "lora": Kind("lora", "llama", deep),
    "dora": Kind("dora", "qwen3", deep),
    "full": Kind("full", "llama-tied", deep),
    "lora, 4 bits": Kind("lora", "llama", quantized),
    "dora, 4 bits": Kind("dora", "qwen3", quantized),
}

# Unequal numbers of rows, lengths and labels; as many as every schedule can do on up to 4 ranks.
MICRO_BATCHES = [
    *[(9, 5), (3,), (12, 11, 4), (7, 7), (2, 6), (10,)],
    *[(8, 3, 5), (4,), (11, 9), (6,), (13, 2), (5, 5, 5)],
]
