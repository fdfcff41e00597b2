"""The outputs of a step other than tokens. A result lists them, and each is for the part of the
front end that asked for it.
"""

import math
from typing import TypeAlias, TypeVar

import msgspec

from serve.core.types import Score


class Output(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all outputs."""


class SequenceOutput(Output, frozen=True):
    """The base of outputs for the client of a sequence."""

    sequence: int

    @property
    def is_finite(self) -> bool:
        """Whether the numbers from which the output was made were finite."""
        return True


class Scores(SequenceOutput, frozen=True):
    """The scores of a sequence's tokens from a position on."""

    position: int
    scores: tuple[Score, ...]

    @property
    def is_finite(self) -> bool:
        # -inf is a valid score: that token cannot be generated.
        return not any(math.isnan(score.logprob) for score in self.scores)


class Embedding(SequenceOutput, frozen=True):
    """The embedding of a sequence's prompt: float32 numbers in little-endian bytes; None if they
    are not finite."""

    numbers: bytes | None

    @property
    def is_finite(self) -> bool:
        return self.numbers is not None


class Guesses(Output, frozen=True):
    """The tokens that rank 0's draft model expects after each row of the step."""

    rows: tuple[tuple[int, ...], ...]


AnyOutput: TypeAlias = Scores | Embedding | Guesses
OutputT = TypeVar("OutputT", bound=Output)
