"""The nouns that everybody speaks: Sequence, Group, Step, Event and their parts.

Plain data, no behaviour beyond what follows from the fields. Stage lives in
serve.model.stage, Transport in serve.ring.transport.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

# Steps are int32 on the wire. They are counted up to here, and from 1 again; those above are of a
# warm-up, and no figure counts them.
FIRST_WARM_UP_STEP = 2**31 - 2**16
NUM_SEQUENCE_IDS = 2**30 - 2**16  # those of requests; a warm-up has some above
LAST_TOKEN = -1  # In a step: the token that the step before of this row samples.

FinishReason = Literal["stop", "length", "abort", "error", "refused", "conflict", "overflowed"]

# In a result: no token could be drawn for this row, by a fault of ours or of its request, or
# because its logits are not finite numbers.
FAILED_TOKEN = -2
REFUSED_TOKEN = -3
# Its grammar and its other fields allow nothing in common.
CONFLICT_TOKEN = -4
OVERFLOWED_TOKEN = -5
FAILURES: dict[int, FinishReason] = {
    FAILED_TOKEN: "error",
    REFUSED_TOKEN: "refused",
    CONFLICT_TOKEN: "conflict",
    OVERFLOWED_TOKEN: "overflowed",
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token of a sequence is chosen. temperature 0 is greedy.

    Presence and frequency count generated tokens, repetition those of the prompt too.
    bias_ids and biases go together. Of allowed_ids nothing means all. No end_ids come
    within the first min_tokens. An answer follows the grammar, which is llguidance's, from
    its start or after the token free_until. (prompt_)logprobs is how many of the likeliest
    tokens to tell beside each one; None is not to score them at all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    grammar: str | None = None
    free_until: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        unused = 0.0, 0.0, 1.0
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != unused

    @property
    def reads_tokens(self) -> bool:
        """Whether choosing or scoring needs the tokens so far."""
        asked = self.grammar, self.prompt_logprobs
        return self.has_penalties or bool(self.bad_words) or asked != (None, None)


class Score(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability that the model gives a token, and the likeliest ones in its
    place, best first; before any parameter of sampling."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and how far the stages have come with them.

    Once every step issued so far has run, the stages hold keys and values of
    num_computed tokens, and num_pending more tokens are sampled. is_held says whether
    they hold anything. The first num_cached tokens came from another sequence. adapter is
    the version of its LoRA adapter, 0 for none. original has the same prompt, which is
    computed once for both. Keys and values of its prompt are shared only within cache_scope.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    end_ids: frozenset[int]
    adapter_version: int = 0
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int = 0
    is_held: bool = False
    original: "Sequence | None" = None
    cache_scope: str = ""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_left(self) -> int:
        """Tokens that it may still ask for."""
        return self.max_tokens - len(self.output) - self.num_pending

    def fit(self, most: int) -> bool:
        """Has it end where prompt and answer are so many tokens; False if they are already."""
        self.max_tokens = min(self.max_tokens, most - len(self.prompt))
        return self.max_tokens > len(self.output)

    def begin_anew(self) -> None:
        """The stages hold nothing of it any more; what it has answered stays."""
        self.num_computed = 0
        self.num_pending = 0
        self.is_held = False
        if not self.output:
            self.num_cached = 0

    def next_tokens(self, count: int) -> list[int]:
        """Returns the next tokens to feed, with LAST_TOKEN for one that is not known yet."""
        start = self.num_computed - len(self.prompt)
        if start >= 0:  # Not through `tokens`, which copies the prompt.
            return self.output[start : start + count] or [LAST_TOKEN]
        return self.tokens[self.num_computed : self.num_computed + count]


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that decode together. One step of it is computed at a time, a second
    one may wait for the tokens of the first."""

    id: int
    sequences: list[Sequence] = field(default_factory=list)
    num_in_flight: int = 0


class Row(msgspec.Struct, frozen=True, array_like=True):
    """The part of a step that belongs to one sequence: num_tokens tokens from position on, for the
    model with this version of an adapter, 0 for none."""

    sequence: int
    position: int
    num_tokens: int
    adapter_version: int = 0


class Take(msgspec.Struct, frozen=True, array_like=True):
    """A new sequence begins as a copy of the first num_tokens of another one."""

    sequence: int
    source: int
    num_tokens: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The scheduler's one product: all that a stage needs to know to run once.

    First what take says is copied, then the sequences in drop are gone, and the adapter
    versions in unload. After that
    `group` holds exactly `rows`, in this order: a stage moves a row from the group where
    it finds it, and starts one at position 0 with an empty cache. Rows that have begun
    feed the same number of tokens, new ones may differ. tokens is row after row. A step
    that does not sample only fills caches.
    """

    number: int
    group: int
    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    sample: bool
    drop: tuple[int, ...] = ()
    take: tuple[Take, ...] = ()
    unload: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if sum(row.num_tokens for row in self.rows) != len(self.tokens):
            raise ValueError("the rows of a step announce another number of tokens than it has")

    @property
    def begun(self) -> list[int]:
        """Sequences of which the stages hold nothing before it."""
        new = [row.sequence for row in self.rows if row.position == 0]
        return new + [take.sequence for take in self.take]

    @property
    def sequences(self) -> set[int]:
        """All that it has to do with."""
        taken = {id for take in self.take for id in (take.sequence, take.source)}
        return {row.sequence for row in self.rows}.union(self.drop, taken)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a sequence: a token, its end, or both. It has a score if one was asked for."""

    sequence: int
    token: int | None = None
    finish_reason: FinishReason | None = None
    score: Score | None = None
