"""What a step makes besides tokens. A result lists these outputs, and each is for the part of the
front end that asked for it.
"""

import math
from typing import TypeAlias

import msgspec

from serve.core.types import Score


class Output(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all outputs."""


class Scores(Output, frozen=True):
    """The scores of a sequence's tokens from a position on."""

    sequence: int
    position: int
    scores: tuple[Score, ...]

    @property
    def is_finite(self) -> bool:
        """Whether the logits were finite. -inf is a valid score: that token cannot be
        generated."""
        return not any(math.isnan(score.logprob) for score in self.scores)


class Embedding(Output, frozen=True):
    """The embedding of a sequence's prompt: float32 numbers in little-endian bytes; None if they
    are not finite."""

    sequence: int
    numbers: bytes | None


class Guesses(Output, frozen=True):
    """The tokens that rank 0's draft model expects after each row of the step."""

    rows: tuple[tuple[int, ...], ...]


AnyOutput: TypeAlias = Scores | Embedding | Guesses
