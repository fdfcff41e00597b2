"""The sections of a stage's report that only some stages have. A report lists them, and each is for
the part of the front end that reads it.
"""

from collections.abc import Iterable
from typing import TypeAlias, TypeVar

import msgspec


class Section(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all sections."""


SectionT = TypeVar("SectionT", bound=Section)


class HiddenSize(Section, frozen=True):
    """Rank 0's model returns hidden states of this size, from which embeddings can be made."""

    size: int


class DraftCosts(Section, frozen=True):
    """The bytes of the weights of rank 0's draft model, and the seconds of one guess."""

    num_bytes: int
    guess_seconds: float


class SharedHeadLimit(Section, frozen=True):
    """Rank 0 shares the head with the other shards in steps of at most this many tokens."""

    max_tokens: int


class AdapterMemory(Section, frozen=True):
    """The bytes of the adapters that a stage holds."""

    num_bytes: int


class StepLimit(Section, frozen=True):
    """A GPU runs the steps of this rank, and should have done each within this time."""

    max_seconds: float


AnySection: TypeAlias = HiddenSize | DraftCosts | SharedHeadLimit | AdapterMemory | StepLimit


def section_of(sections: Iterable[Section], kind: type[SectionT]) -> SectionT | None:
    """Returns the section of one kind, if there is one."""
    for section in sections:
        if isinstance(section, kind):
            return section
    return None
