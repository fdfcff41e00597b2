"""The nouns that everybody speaks: Sequence, Group, Step, Event and their parts.

Plain data, no behaviour beyond what follows from the fields. Stage lives in
serve.rank.stage, Transport in serve.rank.transport.
"""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token of a sequence is chosen. temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and how far the stages have come with them.

    num_computed counts the tokens whose keys and values the stages hold once
    every step issued so far has run.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    eos_ids: frozenset[int]
    output: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def last_token(self) -> int:
        return (self.output or self.prompt)[-1]


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that decode together; at most one step of it is in flight."""

    id: int
    sequences: list[Sequence] = field(default_factory=list)
    step_in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What one sequence feeds in a step: num_tokens tokens from position on."""

    sequence: int
    position: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """The scheduler's one product: all that a stage needs to know to run once.

    After the sequences in drop are gone, `group` holds exactly `rows`, in this
    order: a stage moves a row from the group where it finds it, and starts one at
    position 0 with an empty cache. All rows feed the same number of tokens.
    tokens is row after row. A step that does not sample only fills caches.
    """

    number: int
    group: int
    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    sample: bool
    drop: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """What became of a sequence: a token, its end, or both."""

    sequence: int
    token: int | None = None
    finish_reason: FinishReason | None = None
