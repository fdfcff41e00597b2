"""The types that all packages share: Sequence, Group, Step, Event and their parts.

The types are plain data, with no behaviour beyond their fields. Stage is in serve.model.stage,
Transport in serve.ring.transport.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal, TypeVar

import msgspec

from serve.core.ops import AnyOp, Copy, Op
from serve.core.parameters import MAX_INT, Range

OpT = TypeVar("OpT", bound=Op)

# Step numbers, which are int32 on the wire, count up to this limit and then start again at 1.
# Higher numbers belong to a warm-up, which no statistic includes.
FIRST_WARM_UP_STEP = 2**31 - 2**16
NUM_SEQUENCE_IDS = 2**30 - 2**17  # Ids of requests are lower, a warm-up's ids higher.
# Prefixes that were read from disk have ids of their own.
NUM_LOADED_IDS = 2**16
FIRST_LOADED = 2**30 - NUM_LOADED_IDS
# The ids of checkpoints begin above those of sequences, so one set can hold both kinds of ids.
FIRST_CHECKPOINT = 2**30
LAST_TOKEN = -1  # In a step, stands for the token that the row's previous step samples.

FinishReason = Literal["stop", "length", "abort", "error", "refused", "conflict", "overflowed"]

# In a result, in place of a token: why no token could be sampled for this row.
FAILED_TOKEN = -2  # a fault of the engine
REFUSED_TOKEN = -3  # a fault of the request
CONFLICT_TOKEN = -4  # No token is allowed by both the request's grammar and its other fields.
OVERFLOWED_TOKEN = -5  # The logits are not finite numbers.
FAILURES: dict[int, FinishReason] = {
    FAILED_TOKEN: "error",
    REFUSED_TOKEN: "refused",
    CONFLICT_TOKEN: "conflict",
    OVERFLOWED_TOKEN: "overflowed",
}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tokens of the marks around a model's reasoning, and the most tokens that an answer may
    spend between them (None: no limit). is_open says that the prompt ends after a start mark."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool = False
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a sequence. temperature 0 is greedy.

    A field with a range is also a parameter of the APIs, which read its type and range from here.

    Presence and frequency penalties count generated tokens, the repetition penalty also those of
    the prompt. bias_ids and biases have the same length. Empty allowed_ids allow all tokens. No
    token of end_ids is generated within the first min_tokens. An answer follows the grammar, in
    llguidance's format, from its start or after the token free_until. (prompt_)logprobs is the
    number of most likely tokens to report beside each token; None turns scoring off. reasoning is
    None for a model that does not mark its reasoning; its budget overrides all other parameters.
    """

    temperature: Annotated[float, Range(0, 2)] = 1.0
    top_p: Annotated[float, Range(0, 1, excludes_min=True)] = 1.0
    seed: int = 0
    top_k: Annotated[int, Range(-1, MAX_INT)] = 0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Range(0.01, 100)] = 1.0
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
    reasoning: Reasoning | None = None

    @property
    def has_budget(self) -> bool:
        """Whether the engine has to end the reasoning of an answer."""
        return self.reasoning is not None and self.reasoning.budget is not None

    @property
    def has_penalties(self) -> bool:
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0)

    @property
    def reads_tokens(self) -> bool:
        """Whether sampling or scoring needs the tokens so far."""
        if self.grammar is not None or self.prompt_logprobs is not None:
            return True
        return self.has_penalties or bool(self.bad_words) or self.has_budget


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a prompt becomes an embedding: the hidden states after the model's last norm are reduced
    to their mean or to that of one token, cut to the first num_dimensions (None: all), and divided
    by their norm."""

    kind: Literal["mean", "last", "cls"]
    num_dimensions: int | None = None


class Score(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability that the model gives a token, and the most likely tokens (top) at its
    position, best first. Sampling parameters do not change it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one request, and how many of them the stages have computed. max_tokens is 0 if
    it has no answer: then the request wants another output of the whole prompt, such as an
    embedding.

    Once every step issued so far has run, the stages hold keys and values of num_computed tokens,
    and num_pending more tokens are sampled. The steps of num_done tokens have run. is_held says
    whether the stages hold any of the sequence. The first num_cached tokens were copied from
    another sequence. adapter_version is 0 without an adapter. `original` is a sequence with the
    same prompt, which is computed once for both. usage holds the counts of the scheduler's parts
    for the client, by name.
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
    num_done: int = 0
    is_held: bool = False
    original: "Sequence | None" = None
    usage: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_prompt_done(self) -> int:
        if self.output:
            return len(self.prompt)
        num_cached = self.num_cached if self.is_held else 0
        return min(len(self.prompt), max(self.num_done, num_cached))

    @property
    def has_answer(self) -> bool:
        return self.max_tokens > 0

    @property
    def num_to_prefill(self) -> int:
        """The number of tokens that prefill steps feed. The last token of a sequence with an answer
        is not among them: the first decode step feeds it."""
        return self.num_tokens - self.has_answer

    @property
    def num_left(self) -> int:
        return self.max_tokens - len(self.output) - self.num_pending

    def fit(self, max_length: int) -> bool:
        """Limits prompt and answer together to max_length tokens. Returns False if the sequence
        already has that many."""
        max_tokens = max_length - len(self.prompt)
        if not self.has_answer:
            return max_tokens >= 0
        if max_tokens <= len(self.output):
            return False
        self.max_tokens = min(self.max_tokens, max_tokens)
        return True

    def begin_as_copy(self, num_tokens: int) -> None:
        """Begins the sequence with num_tokens tokens that the stages copy, which may be none."""
        self.num_computed = num_tokens
        self.is_held = num_tokens > 0
        if not self.output:
            self.num_cached = num_tokens

    def reset(self) -> None:
        """Resets the sequence after the stages have dropped it. Its answer so far is kept."""
        self.num_computed = 0
        self.num_pending = 0
        self.num_done = 0
        self.is_held = False

    def next_tokens(self, count: int) -> list[int]:
        """Returns the next tokens to feed. LAST_TOKEN stands for one that is not known yet."""
        start = self.num_computed - len(self.prompt)
        if start >= 0:  # Not through `tokens`, which copies the prompt.
            return self.output[start : start + count] or [LAST_TOKEN]
        return self.tokens[self.num_computed : self.num_computed + count]


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that decode together. One step of a group is computed at a time; a second one may
    wait for the tokens of the first. num_chunks counts the prefill steps since its last step."""

    id: int
    sequences: list[Sequence] = field(default_factory=list)
    num_in_flight: int = 0
    num_chunks: int = 0


class Row(msgspec.Struct, frozen=True, array_like=True):
    """The part of a step that belongs to one sequence: num_tokens tokens from position on, computed
    with this version of an adapter (0 for none)."""

    sequence: int
    position: int
    num_tokens: int
    adapter_version: int = 0


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The output of the scheduler: everything that a stage needs to know for one run.

    A stage performs the operations of before, in their order. Then it makes group hold exactly
    rows, in this order: it moves each row from the group in which it finds it, and starts a row at
    position 0 with an empty cache. tokens lists the tokens of all rows, one row after the other.
    When the rows have run, the stage performs the operations of after. A step that does not sample
    only fills caches: rows begun earlier feed the same number of tokens, new rows may differ.

    A step that samples draws a token after each token that it feeds. A row feeds one token, and may
    feed drafts after it: guesses of the tokens that follow. The next step of the sequence says by
    its position how many drafts were right, and a stage first forgets the wrong ones.
    """

    number: int
    group: int
    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    sample: bool
    before: tuple[AnyOp, ...] = ()
    after: tuple[AnyOp, ...] = ()

    def __post_init__(self) -> None:
        if sum(row.num_tokens for row in self.rows) != len(self.tokens):
            raise ValueError("the rows of a step and its tokens differ in number")

    @property
    def tokens_fed(self) -> list[tuple[int, ...]]:
        ends = itertools.accumulate(row.num_tokens for row in self.rows)
        pairs = zip(self.rows, ends, strict=True)
        return [self.tokens[end - row.num_tokens : end] for row, end in pairs]

    @property
    def num_drafts(self) -> int:
        return len(self.tokens) - len(self.rows) if self.sample else 0

    def ops(self, kind: type[OpT]) -> list[OpT]:
        """Returns the operations of one kind."""
        return [op for op in (*self.before, *self.after) if isinstance(op, kind)]

    @property
    def begun(self) -> list[int]:
        """The sequences that begin with this step: the stages hold nothing of them before."""
        new = [row.sequence for row in self.rows if row.position == 0]
        return new + [copy.sequence for copy in self.ops(Copy)]

    @property
    def touched(self) -> set[int]:
        """The ids of all sequences and checkpoints that this step computes, copies or drops. Steps
        that touch the same id have to run in order."""
        found = {row.sequence for row in self.rows}
        for op in (*self.before, *self.after):
            found.update(op.touched)
        return found


def tokens_of_rows(tokens: tuple[int, ...], num_accepted: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Divides the tokens of a step among its rows, from fields of a Result."""
    if not num_accepted:
        return [(token,) for token in tokens]
    rows: list[tuple[int, ...]] = []
    start = 0
    for accepted in num_accepted:
        rows.append(tokens[start : start + accepted + 1])
        start += accepted + 1
    return rows


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a sequence: a token, the end of the sequence, or both. It carries a score if the
    request asked for one."""

    sequence: int
    token: int | None = None
    finish_reason: FinishReason | None = None
    score: Score | None = None


class StageState(StrEnum):
    """The state of a stage's engine."""

    RENEWING = "renewing"  # The engine is asked to end or to leave its ring.
    LEAVING = "leaving"  # The engine waits for its last step to end.
    STARTING = "starting"
    JOINING = "joining"
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"


class SumCounts(msgspec.Struct, frozen=True, array_like=True):
    """The sums that a shard has computed with the other shards of its stage, and the bytes that it
    sent for them. num_measured of its steps were measured: they took step_seconds, of which
    seconds were spent in sums, waiting for the other shards included. separate_in_decode says that
    decode steps evaluate each sum separately, too (`serve.ring.sums`)."""

    num_sums: int = 0
    num_bytes: int = 0
    num_measured: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    separate_in_decode: bool = False

    def with_sum(self, num_bytes: int, seconds: float) -> "SumCounts":
        return msgspec.structs.replace(
            self,
            num_sums=self.num_sums + 1,
            num_bytes=self.num_bytes + num_bytes,
            seconds=self.seconds + seconds,
        )

    def with_step(self, seconds: float) -> "SumCounts":
        return msgspec.structs.replace(
            self,
            num_measured=self.num_measured + 1,
            step_seconds=self.step_seconds + seconds,
        )

    def to_json(self) -> dict[str, float]:
        return {
            "num_sums": self.num_sums,
            "num_bytes": self.num_bytes,
            "num_measured_steps": self.num_measured,
            "seconds": round(self.seconds, 5),
            "step_seconds": round(self.step_seconds, 5),
            "separate_in_decode": self.separate_in_decode,
        }
