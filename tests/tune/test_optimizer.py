"""Optimizers out of the YAML keys of mlx_lm.lora, and Muon beside AdamW."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import optimizers

from serve.core.errors import UsageError
from serve.tune.optimizer import make_optimizer, num_steps, parts_of, states_of
from tests.errors import fails
from tests.tune.ranks import config_of

SCHEDULE = {"name": "cosine_decay", "arguments": [0.02, 10], "warmup": 3, "warmup_init": 0.0}
BOTH = {
    "muon": {"momentum": 0.9, "weight_decay": 0.0},
    "adamw": {"learning_rate": 0.005, "betas": [0.9, 0.98], "weight_decay": 0.0},
}
MATRIX, NORM, EMBEDDING = "model.layers.3.mlp.w", "model.layers.3.norm.w", "model.embed.w"


def arrays(seed: int) -> dict[str, mx.array]:
    shapes = {MATRIX: (6, 4), NORM: (6,), EMBEDDING: (9, 6)}
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return {n: mx.random.normal(s, key=k) for (n, s), k in zip(shapes.items(), keys, strict=True)}


def stepped(optimizer: Any, names: list[str], num_updates: int = 5) -> dict[str, mx.array]:
    parameters = {name: arrays(0)[name] for name in names}
    optimizer.init(parameters)
    for number in range(1, num_updates + 1):
        gradients = {name: arrays(number)[name] for name in names}
        parameters = optimizer.apply_gradients(gradients, parameters)
    return parameters


def schedule(highest: float) -> Any:
    warmup = optimizers.linear_schedule(0.0, highest, 3)
    return optimizers.join_schedules([warmup, optimizers.cosine_decay(highest, 10)], [4])


def test_muon_and_adamw_each_update_their_own_parameters() -> None:
    both = make_optimizer(config_of(optimizer="muon", optimizer_config=BOTH, lr_schedule=SCHEDULE))
    found = stepped(both, [MATRIX, NORM, EMBEDDING])
    muon = optimizers.Muon(schedule(0.02), momentum=0.9, weight_decay=0.0)
    adamw = optimizers.AdamW(schedule(0.005), betas=[0.9, 0.98], weight_decay=0.0)
    expected = stepped(muon, [MATRIX]) | stepped(adamw, [NORM, EMBEDDING])
    for name, array in expected.items():
        assert mx.allclose(found[name], array, rtol=1e-6, atol=1e-7), name
    assert num_steps(both) == 5
    assert both.learning_rate.item() == pytest.approx(muon.learning_rate.item())


def test_muon_updates_all_parameters_unless_adamw_has_a_learning_rate() -> None:
    config = {**BOTH, "adamw": {"betas": [0.9, 0.98]}}
    one = make_optimizer(config_of(optimizer="muon", optimizer_config=config))
    assert type(one) is optimizers.Muon
    other = make_optimizer(config_of(optimizer="sgd", optimizer_config=BOTH))
    assert type(other) is optimizers.SGD


@pytest.mark.parametrize("names", [[MATRIX], [NORM], [], [MATRIX, EMBEDDING]])
def test_optimizer_state_can_be_saved_and_restored_for_each_parameter(names: list[str]) -> None:
    """A rank may have parameters of one kind only, or none."""
    config = config_of(optimizer="muon", optimizer_config=BOTH, lr_schedule=SCHEDULE)
    whole = stepped(make_optimizer(config), names)
    first = make_optimizer(config)
    half = stepped(first, names, 3)
    kept = {name: dict(state) for name, state in states_of(first).items()}
    assert kept.keys() == set(names)
    again = make_optimizer(config)
    again.init(half)
    for name, state in states_of(again).items():
        state.update(kept[name])
    for part in parts_of(again):
        part.state["step"] = mx.array(num_steps(first), mx.uint64)
    for number in (4, 5):
        half = again.apply_gradients({name: arrays(number)[name] for name in names}, half)
    assert all(mx.array_equal(half[name], whole[name]) for name in names)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer_config": {**BOTH, "adamw": {"learning_rate": 0.1, "beta": 1}}},
        {"optimizer_config": {**BOTH, "adamw": {"learning_rate": "much"}}},
        {"optimizer_config": {"muon": 3}},
        {"lr_schedule": {"name": "cosine_decay", "arguments": [0.0, 10]}},
    ],
)
def test_options_that_do_not_suit_muon_are_refused(changes: dict[str, Any]) -> None:
    fields = {"optimizer": "muon", "optimizer_config": BOTH, "lr_schedule": SCHEDULE, **changes}
    with fails(UsageError, "wrong_setting", match="muon"):
        make_optimizer(config_of(**fields))
