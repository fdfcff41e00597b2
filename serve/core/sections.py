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
    """A GPU runs this rank's steps, and should finish each step within this time."""

    max_seconds: float


class MemoryUse(Section, frozen=True):
    """The memory of a rank in bytes: of MLX's arrays, of freed arrays that MLX keeps, of all that
    programs on its host have wired (None where the system does not say), and what steps may still
    take. bytes_per_token is the memory of a prompt's token while it is computed; 0 while
    unknown."""

    active_bytes: int
    cached_bytes: int
    wired_bytes: int | None
    head_room_bytes: int
    bytes_per_token: float = 0.0

    def to_json(self) -> dict[str, int | None]:
        return {
            "active_bytes": self.active_bytes,
            "cached_bytes": self.cached_bytes,
            "wired_bytes": self.wired_bytes,
            "head_room_bytes": self.head_room_bytes,
        }


AnySection: TypeAlias = (
    HiddenSize | DraftCosts | SharedHeadLimit | AdapterMemory | StepLimit | MemoryUse
)


def section_of(sections: Iterable[Section], kind: type[SectionT]) -> SectionT | None:
    """Returns the section of one kind, if there is one."""
    for section in sections:
        if isinstance(section, kind):
            return section
    return None
