"""Shards as threads make the same updates as one rank, whatever they divide."""

from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from serve.lora.sharded import TrainedParts
from serve.model.stage import Stage
from serve.tune.backward import TrainedStage
from serve.tune.loop import Trainer
from serve.tune.mesh import groups_of
from serve.tune.model import DropoutKeys, divide
from serve.tune.transport import LocalLinks
from tests.model.shard_threads import ThreadGroup, sums_between_threads
from tests.tune.ranks import BUILDING, LORA, batches_of, config_of, run_ranks, tuned

BATCHES = [(9, 5), (3,), (12, 11, 4)]
TOLERANCE = 1e-5
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora_parameters": {**LORA, "dropout": 0.3}},
    "full": {"fine_tune_type": "full"},
}
CELLS = [
    pytest.param("deepseek_v3", "lora", 2),
    pytest.param("deepseek_v3", "full", 2, marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "full", 4, marks=pytest.mark.slow),
    pytest.param("llama", "full", 2, marks=pytest.mark.slow),
    pytest.param("qwen3", "full", 2, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "lora", 2, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "full", 2, marks=pytest.mark.slow),
]


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]


def trained(num_shards: int, name: str, kind: str) -> list[Trained]:
    """Returns what each shard reports of 20 updates."""
    changes = {**KINDS[kind], "learning_rate": 1e-3, "max_grad_norm": 0.5}
    config = config_of(num_layers=-1, tensor_parallel_size=num_shards, **changes)
    group = ThreadGroup(num_shards)

    def rank(links: LocalLinks) -> Trained:
        seat = group.seats[links.rank]
        draw = DropoutKeys(config.seed)
        parts = TrainedParts({}, set())
        with BUILDING:
            seat.is_building = True
            model = tuned(config, name, draw)
            if num_shards > 1:
                divide(config, parts, seat, model)
            mx.eval(model.parameters())
            stage = TrainedStage(Stage(model, 0, len(model.layers)), grad_checkpoint=False)
            seat.is_building = False
        groups = groups_of(config.layout(num_shards), links, seat)
        own = Trainer(config, {0: stage}, groups, draw, parts)
        batches = batches_of(BATCHES)
        schedule = own.update_schedule(len(batches))
        updates = [own.update(number, batches, schedule) for number in range(20)]
        return Trained(
            [update.loss for update in updates],
            [update.gradient_norm for update in updates],
        )

    with sums_between_threads():
        return run_ranks(num_shards, rank)


@pytest.mark.parametrize(("name", "kind", "num_shards"), CELLS)
def test_updates_of_shards_equal_those_of_one_rank(name: str, kind: str, num_shards: int) -> None:
    (alone,) = trained(1, name, kind)
    for found in trained(num_shards, name, kind):
        assert found.losses == pytest.approx(alone.losses, rel=TOLERANCE)
        assert found.norms == pytest.approx(alone.norms, rel=TOLERANCE)
    assert alone.losses[-1] < alone.losses[0] / 1.01, "it has learned nothing"
