"""The validations of a run: which one was the best, and when to stop early. Pure."""

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class LossHistory:
    """The validation losses of a run as (batches done, loss), the first from before training."""

    losses: list[tuple[int, float]] = field(default_factory=list)

    def add(self, iteration: int, loss: float) -> bool:
        """Adds a loss. Returns whether it is lower than all before; never for the first one."""
        self.losses.append((iteration, loss))
        is_first = len(self.losses) == 1
        return not is_first and self.best == self.losses[-1]

    @property
    def best(self) -> tuple[int, float] | None:
        """The lowest finite loss; among equal losses, the first."""
        lowest = None
        for iteration, loss in self.losses:
            if math.isfinite(loss) and (lowest is None or loss < lowest[1]):
                lowest = iteration, loss
        return lowest

    def has_stalled(self, patience: int | None) -> bool:
        """Whether none of the last `patience` losses is lower than the best before them."""
        best = self.best
        if patience is None or best is None:
            return False
        num_since_best = len(self.losses) - 1 - self.losses.index(best)
        return num_since_best >= patience
