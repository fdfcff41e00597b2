"""Training in half precision: float32 master weights, and loss scaling.

Only the decisions are made here: the trainer holds the arrays, and evaluates them."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from serve.tune.backward import Arrays

HALF = (mx.float16, mx.bfloat16)
MAX_SCALE = 2.0**24
_START_SCALE = 2.0**16
_LOWER = 4  # a power of two, so that scaling and unscaling only move the exponent
_RAISE = 2
_RAISE_AFTER = 500  # after how many updates in a row without an overflow


def master_weights(parameters: Mapping[str, mx.array]) -> Arrays:
    """Makes float32 copies of the parameters that a model holds in half precision, by their names.

    An update of 1e-5 is lost when it is added to a bfloat16 weight of 1, and the state of Adam
    underflows in float16. So the optimizer updates these copies, and the model gets rounded ones.
    """
    half = {name: array for name, array in parameters.items() if array.dtype in HALF}
    return {name: array.astype(mx.float32) for name, array in half.items()}


@dataclass(slots=True)
class LossScale:
    """The factor of the loss in the backward pass, which keeps small float16 gradients from
    becoming 0. The factor is lowered when gradients overflow, and raised after many finite updates.
    """

    value: float = 1.0
    num_finite: int = 0
    max_value: float = 1.0

    @classmethod
    def of_model(cls, *, is_float16: bool) -> "LossScale":
        """Makes the scale of a model. Only float16 needs one: bfloat16 has float32's exponents."""
        if is_float16:
            return cls(_START_SCALE, 0, MAX_SCALE)
        return cls()

    def lower(self) -> bool:
        """Lowers the scale, and returns whether there was a lower value."""
        if self.value <= 1:
            return False
        self.value = max(1.0, self.value / _LOWER)
        self.num_finite = 0
        return True

    def count_finite(self) -> None:
        """Counts an update whose gradients were finite."""
        self.num_finite += 1
        if self.num_finite >= _RAISE_AFTER:
            self.value = min(self.max_value, self.value * _RAISE)
            self.num_finite = 0
