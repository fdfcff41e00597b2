"""mlx's optimizers, made as mlx_lm.lora makes them. Parameters are flat: arrays by full name."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import optimizers
from mlx_lm.tuner.utils import build_schedule

from serve.core.errors import UsageError
from serve.tune.config import FineTuneConfig

_OPTIMIZERS = {
    "adam": optimizers.Adam,
    "adamw": optimizers.AdamW,
    "muon": optimizers.Muon,
    "sgd": optimizers.SGD,
    "adafactor": optimizers.Adafactor,
}


class MuonAndAdamW(optimizers.MultiOptimizer):
    """Muon for the matrices of the layers, AdamW for embedding, head, norms and biases."""

    def _split_dictionary(self, flat: dict[str, mx.array]) -> list[dict[str, mx.array]]:
        muon: dict[str, mx.array] = {}
        adamw: dict[str, mx.array] = {}
        for name, array in flat.items():
            chosen = muon if _is_matrix_of_a_layer(name, array) else adamw
            chosen[name] = array
        return [muon, adamw]


def _is_matrix_of_a_layer(name: str, array: mx.array) -> bool:
    # Layers are in a list, so the name of a layer's array contains a number.
    parts = name.split(".")
    is_of_a_layer = any(part.isdecimal() for part in parts)
    return array.ndim == 2 and is_of_a_layer


def make_optimizer(config: FineTuneConfig) -> Any:
    """Makes the optimizer of a run. If muon's options contain a learning_rate for adamw, the two
    are combined. Raises UsageError if the options do not fit."""
    options = config.optimizer_config or {}
    try:
        own = dict(options.get(config.optimizer) or {})
        adamw = dict(options.get("adamw") or {})
        optimizer = _OPTIMIZERS[config.optimizer](learning_rate=_rate(config), **own)
        if config.optimizer == "muon" and "learning_rate" in adamw:
            rate = _rate(config, adamw.pop("learning_rate"))
            rest = optimizers.AdamW(rate, **adamw)
            return MuonAndAdamW([optimizer, rest], [_is_matrix_of_a_layer])
        return optimizer
    except (ArithmeticError, TypeError, ValueError, LookupError) as error:
        raise UsageError(
            f"optimizer_config or lr_schedule does not fit {config.optimizer}: {error}.",
            code="wrong_setting",
        ) from error


def _rate(config: FineTuneConfig, highest: float | None = None) -> Any:
    """Returns the learning rate or its schedule. With `highest`, the schedule is scaled to this
    highest rate."""
    if not config.lr_schedule:
        if highest is None:
            return config.learning_rate
        return highest
    schedule: Callable[[mx.array], mx.array] = build_schedule(config.lr_schedule)
    schedule(mx.array(0))
    if highest is None:
        return schedule
    share = highest / config.lr_schedule["arguments"][0]
    return lambda step: schedule(step) * share


def parts_of(optimizer: Any) -> list[Any]:
    """Returns the optimizers that this one combines, or itself."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


def states_of(optimizer: Any) -> dict[str, dict[str, mx.array]]:
    """Returns the optimizer's arrays for each parameter. Callers may replace them."""
    states = {}
    for part in parts_of(optimizer):
        for name, state in part.state.items():
            if isinstance(state, dict):
                states[name] = state
    return states


def num_steps(optimizer: Any) -> int:
    return int(parts_of(optimizer)[0].step.item())
