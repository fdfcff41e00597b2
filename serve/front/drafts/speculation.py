"""Decides which rows get drafts, and how many: those that pay, by how often the guesses of each row
came true and by what a token more costs on this cluster."""

from collections.abc import Sequence as ReadableList
from dataclasses import dataclass

from serve.core.types import Sequence
from serve.front.drafts.acceptance import Acceptance
from serve.front.drafts.guesses import Guesses

MAX_DRAFTS = 16
_MIN_GAIN = 1.05
_WAITING_GAIN = 0.1  # tokens of a step and row for which a step waits for the front end
_MAX_ROWS_COST = 0.5  # of a step's time, for one more token in each row: beyond, nothing pays
_UNKNOWN_TOKEN_COST = 0.06
_MIN_TOKEN_COST = 0.01  # Noise may make it look like nothing.


@dataclass(slots=True)
class Counts:
    """How many drafts were sent, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0


class Speculation:
    """Drafts for the rows of the scheduler's steps. token_cost is what a step takes longer with one
    token more, as a share of the time of a step with one token; it is set from what was measured.
    is_possible says whether the stages can forget wrong drafts.
    """

    def __init__(self) -> None:
        self.is_possible = False
        self.token_cost = _UNKNOWN_TOKEN_COST
        self.counts: dict[str, Counts] = {"suffixes": Counts(), "prediction": Counts()}
        self._acceptance = Acceptance()
        self._guesses: dict[int, Guesses] = {}

    def propose(self, sequences: ReadableList[Sequence]) -> list[list[int]]:
        nothing: list[list[int]] = [[] for _ in sequences]
        if not self._can_pay(len(sequences)):
            return nothing
        proposed = [self._guess(sequence) for sequence in sequences]
        gains = []
        for sequence, drafts in zip(sequences, proposed, strict=True):
            gains.append(self._guesses[sequence.id].gains(len(drafts)) if drafts else [])
        num_drafts = best_length(gains, self._relative_cost(len(sequences)))
        return [drafts[:num_drafts] for drafts in proposed]

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        if not self._can_pay(len(sequences)):
            return False
        shares = [self._guesses_of(sequence).hit_share for sequence in sequences]
        return sum(shares) > _WAITING_GAIN * len(shares)

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        guesses = self._guesses.get(sequence.id)
        if guesses is None:
            return
        if num_drafts:
            counts = self.counts[guesses.drafter]
            counts.drafted += num_drafts
            counts.accepted += num_accepted
        guesses.catch_up(sequence)

    def forget(self, sequence_id: int) -> None:
        self._guesses.pop(sequence_id, None)

    def _can_pay(self, num_rows: int) -> bool:
        return self.is_possible and num_rows * self._relative_cost(num_rows) < _MAX_ROWS_COST

    def _relative_cost(self, num_rows: int) -> float:
        """The cost of one more token, as a share of a step of so many rows."""
        token_cost = max(_MIN_TOKEN_COST, self.token_cost)
        return token_cost / (1 + (num_rows - 1) * token_cost)

    def _guesses_of(self, sequence: Sequence) -> Guesses:
        guesses = self._guesses.get(sequence.id)
        if guesses is None:
            guesses = self._guesses[sequence.id] = Guesses(sequence, Acceptance(self._acceptance))
        return guesses

    def _guess(self, sequence: Sequence) -> list[int]:
        """The longest draft of a row that may have one. The newest token has to be known, and a
        stage has to hold something of the row."""
        max_drafts = min(MAX_DRAFTS, sequence.num_left - 1)
        if sequence.num_pending or not sequence.num_computed or max_drafts < 1:
            return []
        guesses = self._guesses_of(sequence)
        guesses.catch_up(sequence)
        return guesses.draft(max_drafts)


def best_length(gains: ReadableList[ReadableList[float]], token_cost: float) -> int:
    """The number of drafts of each row, as far as it has so many, with which a step gives the most
    tokens in its time. gains has the chance of each draft of each row to be accepted; token_cost is
    what one more token costs, as a share of a step without drafts. 0 if nothing gives clearly more.
    """
    num_rows = len(gains)
    tokens = float(num_rows)
    cost = 1.0
    best = 0
    best_rate = _MIN_GAIN * num_rows
    for length in range(1, max(map(len, gains), default=0) + 1):
        for chances in gains:
            if length <= len(chances):
                tokens += chances[length - 1]
                cost += token_cost
        if tokens / cost > best_rate:
            best = length
            best_rate = tokens / cost
    return best
