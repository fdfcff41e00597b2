"""The draft model: a small model on rank 0 that guesses the next tokens of sequences.

The draft model guesses after a step, for the rows that the step names. Its guesses may be wrong
without harm, so it reads only the end of a long text, and keeps nothing that could not be computed
again.
"""

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from serve.core.errors import PlanError
from serve.core.messages import Span
from serve.core.plan import MAX_DRAFT_ROWS, MAX_DRAFT_TOKENS
from serve.core.types import NUM_SEQUENCE_IDS, Row, Sampling, Step
from serve.model.stage import Stage
from serve.rank.cache import ForwardPass, GroupCaches
from serve.rank.chooser import Chooser
from serve.rank.sampling import Sampler, sample

# The last tokens of a text that a new row reads. More would delay the first guesses.
NUM_TOKENS_READ = 256
# The most new tokens that a row reads in the step of its first guess, which computes logits for all
# of them.
_MAX_READ_WITH_GUESS = 4
_NUM_TRIALS = 3
_NUM_TRIED = 4  # the guesses in a trial


class GuessRequest(NamedTuple):
    """A request to guess num_guesses tokens after text: all tokens of a sequence so far."""

    sequence: int
    text: list[int]
    sampling: Sampling
    num_guesses: int


@dataclass(slots=True)
class _Row:
    """A sequence with keys and values of the tokens `held`, which begin at start in its text."""

    start: int
    sampler: Sampler
    held: list[int] = field(default_factory=list)


class Drafter(ABC):
    """Guesses each token with the random key that the model will use at that position: equal random
    numbers make both agree more often. make_cache returns plain caches of a row. Logits are cut or
    padded to vocabulary_size. refusal is the error for caches that cannot forget tokens."""

    refusal: ClassVar[str]

    def __init__(
        self,
        make_cache: Callable[[], list[Any]],
        vocabulary_size: int,
        *,
        batchable: bool,
    ) -> None:
        self._caches = GroupCaches(make_cache, batchable)
        if not self._caches.can_rewind:
            raise PlanError(self.refusal)
        self._vocabulary_size = vocabulary_size
        self._rows: OrderedDict[int, _Row] = OrderedDict()  # the most recently used row last
        self._gone: list[int] = []
        self._runs: list[Span] = []

    @property
    def num_bytes(self) -> int:
        """The bytes of the drafter's own weights."""
        return sum(array.nbytes for array in self._weights())

    def try_out(self) -> float:
        """Guesses a few tokens. Returns the time of one guess in seconds."""
        greedy = Sampling(temperature=0)
        request = GuessRequest(NUM_SEQUENCE_IDS, [0, 0], greedy, _NUM_TRIED)
        seconds: list[float] = []
        for _ in range(_NUM_TRIALS):
            self.guess(0, [request])
            *_, run = self.take_runs()
            num_guesses = max(1, run.num_drafts)
            seconds.append((run.end - run.start) / num_guesses)
        self.forget([NUM_SEQUENCE_IDS])
        return min(seconds)

    def forget(self, sequences: Collection[int]) -> None:
        """Frees the rows of ended sequences. Unknown sequences are ignored."""
        for sequence in sequences:
            self._free(sequence)

    def clear(self) -> None:
        """Frees the rows of all sequences, at once."""
        self._rows.clear()
        self._gone.clear()
        self._caches.keep_only({})

    def keep(self, _step: Step, _passes: list[ForwardPass], _chooser: Chooser) -> list[mx.array]:
        """Takes the hidden states that it needs from a step that has not run. Returns arrays to
        evaluate with it."""
        return []

    def take_runs(self) -> list[Span]:
        """Returns the runs since the last call, which belong to no step yet."""
        runs, self._runs = self._runs, []
        return runs

    def guess(self, group: int, requests: list[GuessRequest]) -> list[tuple[int, ...]]:
        """Returns guesses of the tokens that follow each text: up to num_guesses, and none for rows
        that there is no memory for. Rows of the same group stay together."""
        admitted = self._admitted(requests)
        if not admitted:
            return [() for _ in requests]
        self._read(group, admitted)
        guesses = self._guess_all(group, admitted)
        return [tuple(guesses.get(each.sequence, ())) for each in requests]

    def _admitted(self, requests: list[GuessRequest]) -> list[GuessRequest]:
        """Chooses requests that there is memory for. The rows unused for longest make room."""
        possible = [each for each in requests if each.num_guesses > 0 and self._can_guess(each)]
        admitted = possible[:MAX_DRAFT_ROWS]
        for each in admitted:
            self._prepare(each)
        while len(self._rows) > MAX_DRAFT_ROWS:
            oldest = next(iter(self._rows))
            self._free(oldest)
        return admitted

    def _guess_all(self, group: int, requests: list[GuessRequest]) -> dict[int, list[int]]:
        """Guesses one token after the other for all rows. Returns the guesses by sequence."""
        started = time.monotonic()
        guesses: dict[int, list[int]] = {each.sequence: [] for each in requests}
        unfinished = requests
        num_tokens = 0
        while unfinished:
            num_tokens += self._guess_next(group, unfinished, guesses)
            unfinished = [each for each in unfinished if _continues(guesses[each.sequence], each)]
        longest = max(map(len, guesses.values()))
        self._note_run(group, len(requests), num_tokens, longest, started)
        return guesses

    @abstractmethod
    def _weights(self) -> Iterable[mx.array]:
        """Returns the drafter's own weights, without those that it shares with the model."""

    @abstractmethod
    def _logits(self, step: Step, own: ForwardPass) -> mx.array:
        """Returns the logits (B, L, vocabulary) of a forward pass of the drafter, lazily."""

    def _can_guess(self, request: GuessRequest) -> bool:
        return bool(request.text)

    def _first_position(self, request: GuessRequest) -> int:
        """Returns the position at which a new row begins to read the text of its sequence."""
        return max(0, len(request.text) - NUM_TOKENS_READ)

    def _free(self, sequence: int) -> None:
        if self._rows.pop(sequence, None):
            self._gone.append(sequence)

    def _prepare(self, request: GuessRequest) -> None:
        """Makes a row for a text, or cuts its row to the tokens that still agree with it."""
        row = self._rows.get(request.sequence)
        first = self._first_position(request)
        if row is not None:
            text = request.text[row.start :]
            num_same = _common_prefix(row.held, text)
            num_held = len(text) + request.num_guesses
            is_far_behind = row.start + num_same < first
            is_full = num_held > MAX_DRAFT_TOKENS
            if is_far_behind or is_full or not num_same:
                self._free(request.sequence)
                row = None
            else:
                # A last token that is held is fed again, because its logits are not kept.
                num_kept = min(num_same, len(text) - 1)
                self._rewind(request.sequence, row, num_kept)
        if row is None:
            sampling = _without_history(request.sampling)
            sampler = Sampler(sampling)
            row = _Row(first, sampler)
            self._rows[request.sequence] = row
        self._rows.move_to_end(request.sequence)

    def _rewind(self, sequence: int, row: _Row, num_tokens: int) -> None:
        if num_tokens < len(row.held):
            self._caches.rewind(sequence, num_tokens)
            del row.held[num_tokens:]

    def _read(self, group: int, requests: list[GuessRequest]) -> None:
        """Feeds all new tokens but the last one to the rows that have many."""
        started = time.monotonic()
        feeds: dict[int, list[int]] = {}
        for each in requests:
            new = self._not_held(each)
            if len(new) > _MAX_READ_WITH_GUESS:
                feeds[each.sequence] = new[:-1]
        if not feeds:
            return
        step, _ = self._fed(group, feeds)
        states = self._caches.states(step)
        mx.eval(states)  # without the logits, which nobody needs
        self._note_run(group, len(feeds), len(step.tokens), 0, started)

    def _note_run(
        self, group: int, num_rows: int, num_tokens: int, num_guesses: int, started: float
    ) -> None:
        ended = time.monotonic()
        run = Span(0, group, num_rows, num_tokens, started, ended, num_guesses, is_draft=True)
        self._runs.append(run)

    def _not_held(self, request: GuessRequest) -> list[int]:
        """Returns the tokens of a text whose keys and values are not held."""
        row = self._rows[request.sequence]
        end = row.start + len(row.held)
        return request.text[end:]

    def _guess_next(
        self,
        group: int,
        requests: list[GuessRequest],
        guesses: dict[int, list[int]],
    ) -> int:
        """Adds the next guess of each row. Returns the number of tokens that were fed."""
        feeds: dict[int, list[int]] = {}
        for each in requests:
            own_guesses = guesses[each.sequence]
            feeds[each.sequence] = self._not_held(each) or own_guesses[-1:]
        step, logits = self._fed(group, feeds)
        last: list[mx.array] = []
        samplers: list[Sampler] = []
        positions: list[int] = []
        for n, each in enumerate(requests):
            last.append(logits[n][-1])
            samplers.append(self._rows[each.sequence].sampler)
            own_guesses = guesses[each.sequence]
            position = len(each.text) + len(own_guesses)
            positions.append(position)
        fitting = self._of_vocabulary(mx.stack(last))
        tokens = sample(fitting, samplers, positions)
        # The next tokens are fed as numbers, so that rows of different lengths can share a batch.
        states = self._caches.states(step)
        mx.eval(tokens, states)
        drawn: list[int] = tokens.tolist()  # type: ignore[assignment]
        for each, token in zip(requests, drawn, strict=True):
            guesses[each.sequence].append(token)
        return len(step.tokens)

    def _fed(self, group: int, feeds: dict[int, list[int]]) -> tuple[Step, dict[int, mx.array]]:
        """Feeds tokens to rows. Returns the step and their lazy logits (num_tokens, vocabulary)."""
        rows: list[Row] = []
        tokens: list[int] = []
        for sequence, new in feeds.items():
            held = self._rows[sequence].held
            row = Row(sequence, len(held), len(new))
            rows.append(row)
            tokens += new
            held += new
        for sequence in self._gone:
            self._caches.drop(sequence)
        self._gone = []
        step = Step(0, group, tuple(rows), tuple(tokens), sample=True)
        passes = self._caches.arrange(step)
        moved = self._caches.moved()
        mx.eval(moved)  # GroupCaches wants this before the forward pass.
        logits: dict[int, mx.array] = {}
        for each in passes:
            logits |= each.outputs_of_rows(step, self._logits(step, each))
        return step, logits

    def _of_vocabulary(self, logits: mx.array) -> mx.array:
        """Cuts or pads logits (B, V) to the other model's vocabulary: models round it up
        differently, and equal random numbers need equal shapes."""
        num_missing = self._vocabulary_size - logits.shape[-1]
        if num_missing > 0:
            return mx.pad(logits, [(0, 0), (0, num_missing)], constant_values=-mx.inf)
        return logits[:, : self._vocabulary_size]


class DraftModel(Drafter):
    """A small model that guesses tokens. Its stage contains all layers."""

    refusal = (
        "--draft-model: this model cannot forget wrong guesses, because its layers keep windows or "
        "states: choose one with plain attention."
    )

    def __init__(self, stage: Stage, vocabulary_size: int, *, batchable: bool) -> None:
        super().__init__(stage.make_cache, vocabulary_size, batchable=batchable)
        self._stage = stage

    def _weights(self) -> Iterable[mx.array]:
        return self._stage.weights().values()

    def _logits(self, step: Step, own: ForwardPass) -> mx.array:
        (logits,) = self._stage(own.tokens(step), own.caches, [])
        return logits


def _continues(guesses: list[int], request: GuessRequest) -> bool:
    """Whether a row gets another guess. A negative guess says that the row's numbers overflowed."""
    if guesses[-1] < 0:
        guesses.pop()
        return False
    return len(guesses) < request.num_guesses


def _common_prefix(held: list[int], text: list[int]) -> int:
    for n, (one, other) in enumerate(zip(held, text, strict=False)):
        if one != other:
            return n
    return min(len(held), len(text))


def _without_history(sampling: Sampling) -> Sampling:
    """Returns the sampling without settings that depend on earlier, perhaps unread tokens."""
    return replace(
        sampling,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
        bad_words=(),
        grammar=None,
        reasoning=None,
        logprobs=None,
        prompt_logprobs=None,
    )
