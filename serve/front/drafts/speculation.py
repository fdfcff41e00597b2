"""Decides how many drafts each row gets. Drafts have to pay: this depends on how often the guesses
about a row were right, and on what one more token costs on this cluster."""

from collections.abc import Sequence as ReadableList

from serve.core.types import Sequence
from serve.front.drafts.acceptance import Acceptance, HitShares
from serve.front.drafts.guesses import Guesses
from serve.front.drafts.interface import Draft

MAX_DRAFTS = 16
_MIN_GAIN = 1.05
_WAITING_GAIN = 0.1  # tokens per step and row that make up for waiting for the front end
# Drafts cannot pay if one more token in each row costs more than this share of a step.
_MAX_ROWS_COST = 0.5
_UNKNOWN_TOKEN_COST = 0.06
_MIN_TOKEN_COST = 0.01  # Because of noise, it can be measured as nothing.


class Speculation:
    """Makes the drafts for the scheduler's steps.

    is_possible says whether the stages can forget wrong drafts. token_cost is the time that one
    more token takes, as a share of a step with one token. The caller sets both.
    """

    def __init__(self) -> None:
        self.is_possible = False
        self.token_cost = _UNKNOWN_TOKEN_COST
        self._acceptance = Acceptance()
        self._hit_shares = HitShares()
        self._guesses: dict[int, Guesses] = {}

    def propose(self, sequences: ReadableList[Sequence]) -> list[Draft]:
        if not self._can_pay(len(sequences)):
            return [Draft() for _ in sequences]
        drafts = [self._longest(sequence) for sequence in sequences]
        gains = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            num_tokens = len(draft.tokens)
            gains.append(self._guesses[sequence.id].gains(num_tokens) if num_tokens else [])
        num_drafts = best_length(gains, self._relative_cost(len(sequences)))
        return [draft._replace(tokens=draft.tokens[:num_drafts]) for draft in drafts]

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        num_rows = len(sequences)
        if not self._can_pay(num_rows):
            return False
        # All rows wait for the draft of one row.
        token_cost = num_rows * self._relative_cost(num_rows)
        gains = [self._guesses_of(sequence).waiting_gain(token_cost) for sequence in sequences]
        return sum(gains) > _WAITING_GAIN * num_rows

    def learn(self, sequence: Sequence) -> None:
        if guesses := self._guesses.get(sequence.id):
            guesses.catch_up(sequence)

    def forget(self, sequence_id: int) -> None:
        self._guesses.pop(sequence_id, None)

    def _can_pay(self, num_rows: int) -> bool:
        return self.is_possible and num_rows * self._relative_cost(num_rows) < _MAX_ROWS_COST

    def _relative_cost(self, num_rows: int) -> float:
        """The time that one more token takes, as a share of a step of num_rows rows."""
        token_cost = max(_MIN_TOKEN_COST, self.token_cost)
        return token_cost / (1 + (num_rows - 1) * token_cost)

    def _guesses_of(self, sequence: Sequence) -> Guesses:
        guesses = self._guesses.get(sequence.id)
        if guesses is None:
            guesses = Guesses(sequence, Acceptance(self._acceptance), HitShares(self._hit_shares))
            self._guesses[sequence.id] = guesses
        return guesses

    def _longest(self, sequence: Sequence) -> Draft:
        """The longest draft that a row may have. Its newest token has to be known, and the stages
        have to hold some of the row."""
        max_drafts = min(MAX_DRAFTS, sequence.num_left - 1)
        if sequence.num_pending or not sequence.num_computed or max_drafts < 1:
            return Draft()
        guesses = self._guesses_of(sequence)
        is_ready = guesses.catch_up(sequence)
        return guesses.draft(max_drafts) if is_ready else Draft()


def best_length(gains: ReadableList[ReadableList[float]], token_cost: float) -> int:
    """Returns the number of drafts for each row (rows with fewer drafts get all of theirs) at which
    a step gives the most tokens per time. Returns 0 if drafts do not clearly help.

    gains has the chance of each draft of each row to be accepted. token_cost is the time that one
    more token takes, as a share of a step without drafts.
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
