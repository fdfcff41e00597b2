"""The tokens that a step draws, while it still runs: the next step takes them from the array."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from serve.core.types import Step


@dataclass(frozen=True, slots=True)
class Drawing:
    """A step under way, and its tokens (B,), one for each of its rows. The tokens may not be
    evaluated yet."""

    step: Step
    tokens: mx.array

    def of(self, sequences: Sequence[int | None]) -> mx.array:
        """Returns, lazily, the tokens of these sequences. In place of a token that was not drawn,
        any token may be fed, because the output is not used."""
        rows = {row.sequence: n for n, row in enumerate(self.step.rows)}
        indices = [0 if each is None else rows.get(each, 0) for each in sequences]
        return mx.maximum(self.tokens[mx.array(indices)], 0)
