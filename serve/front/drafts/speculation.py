"""Decides how many drafts each row gets. Drafts have to pay: this depends on how often the guesses
about a row were right, and on what one more token costs on this cluster."""

from collections.abc import Sequence as ReadableList

from serve.core.plan import MAX_DRAFT_ROWS
from serve.core.types import Sequence
from serve.front.drafts.acceptance import Acceptance, HitShares, net_gain
from serve.front.drafts.guesses import TextGuesses
from serve.front.drafts.interface import Draft
from serve.front.drafts.model_guesses import (
    MAX_GUESSES,
    ModelCosts,
    ModelGuesses,
    ModelShare,
    best_number,
)

MAX_DRAFTS = 16
_MIN_GAIN = 1.05
_WAITING_GAIN = 0.1  # tokens per step and row that make up for waiting for the front end
# Drafts cannot pay if one more token in each row costs more than this share of a step.
_MAX_ROWS_COST = 0.5
_UNKNOWN_TOKEN_COST = 0.06
_MIN_TOKEN_COST = 0.01  # Because of noise, it can be measured as nothing.


class Speculation:
    """Makes drafts. The caller sets is_possible (stages can drop rejected drafts), token_cost (one
    more token's share of a one-token step) and model_costs (None without a draft model)."""

    def __init__(self) -> None:
        self.is_possible = False
        self.token_cost = _UNKNOWN_TOKEN_COST
        self.model_costs: ModelCosts | None = None
        self._acceptance = Acceptance()
        self._hit_shares = HitShares()
        self._guesses: dict[int, TextGuesses] = {}
        self._model_share = ModelShare()
        self._model_guesses: dict[int, ModelGuesses] = {}

    def propose(self, sequences: ReadableList[Sequence]) -> list[Draft]:
        if not self._can_pay(len(sequences)):
            return [Draft() for _ in sequences]
        token_cost = self._relative_cost(len(sequences))
        drafts = [self._best(sequence, token_cost) for sequence in sequences]
        gains = [self._gains(*pair) for pair in zip(sequences, drafts, strict=True)]
        num_drafts, _ = best_number(gains, token_cost, min_gain=_MIN_GAIN)
        return [draft._replace(tokens=draft.tokens[:num_drafts]) for draft in drafts]

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        num_rows = len(sequences)
        if not self._can_pay(num_rows):
            return False
        # All rows wait for the draft of one row.
        token_cost = num_rows * self._relative_cost(num_rows)
        gains = [self._guesses_of(sequence).waiting_gain(token_cost) for sequence in sequences]
        return sum(gains) > _WAITING_GAIN * num_rows

    def plan_guesses(self, sequences: ReadableList[Sequence], num_busy_groups: int) -> list[int]:
        num_rows = len(sequences)
        has_memory = num_rows * num_busy_groups <= MAX_DRAFT_ROWS
        if self.model_costs is None or not has_memory or not self._can_pay(num_rows):
            return [0] * num_rows
        # While the draft model guesses for one group, rank 0 computes nothing for the others.
        share = num_busy_groups / self._step_cost(num_rows)
        costs = ModelCosts(*(share * cost for cost in self.model_costs))
        token_cost = self._relative_cost(num_rows)
        gains = [self._model_gains(sequence, costs, token_cost) for sequence in sequences]
        number, _ = best_number(gains, token_cost, costs.guess)
        return [min(number, len(chances)) for chances in gains]

    def learn(self, sequence: Sequence) -> None:
        if guesses := self._guesses.get(sequence.id):
            guesses.catch_up(sequence)
        if model_guesses := self._model_guesses.get(sequence.id):
            model_guesses.learn(sequence)

    def remove(self, sequence_id: int) -> None:
        self._guesses.pop(sequence_id, None)
        self._model_guesses.pop(sequence_id, None)

    def _can_pay(self, num_rows: int) -> bool:
        return self.is_possible and num_rows * self._relative_cost(num_rows) < _MAX_ROWS_COST

    def _relative_cost(self, num_rows: int) -> float:
        """Returns the time that one more token takes, as a share of a step of num_rows rows."""
        return max(_MIN_TOKEN_COST, self.token_cost) / self._step_cost(num_rows)

    def _step_cost(self, num_rows: int) -> float:
        return 1 + (num_rows - 1) * max(_MIN_TOKEN_COST, self.token_cost)

    def _guesses_of(self, sequence: Sequence) -> TextGuesses:
        guesses = self._guesses.get(sequence.id)
        if guesses is None:
            guesses = TextGuesses(
                sequence, Acceptance(self._acceptance), HitShares(self._hit_shares)
            )
            self._guesses[sequence.id] = guesses
        return guesses

    def _best(self, sequence: Sequence, token_cost: float) -> Draft:
        """Returns the longest draft allowed for a row, from the drafter with the higher expected
        gain; none while its newest token is unknown or no stage holds the row."""
        max_drafts = min(MAX_DRAFTS, sequence.num_left - 1)
        if sequence.num_pending or not sequence.num_computed or max_drafts < 1:
            return Draft()
        guesses = self._guesses_of(sequence)
        is_ready = guesses.catch_up(sequence)
        drafts = [Draft(sequence.guesses[:max_drafts], "model")]
        if is_ready:
            drafts.append(guesses.draft(max_drafts))
        return max(drafts, key=lambda draft: net_gain(self._gains(sequence, draft), token_cost))

    def _gains(self, sequence: Sequence, draft: Draft) -> list[float]:
        num_tokens = len(draft.tokens)
        if not num_tokens:
            return []
        if draft.drafter == "model":
            return self._model_guesses_of(sequence).gains(num_tokens)
        return self._guesses[sequence.id].gains(num_tokens)

    def _model_gains(
        self,
        sequence: Sequence,
        costs: ModelCosts,
        token_cost: float,
    ) -> list[float]:
        """Returns the chances of the draft model's guesses after the next token; none if they do
        not pay, or if the text gives better drafts."""
        max_guesses = min(MAX_GUESSES, sequence.num_left - 1)
        model_guesses = self._model_guesses_of(sequence)
        if max_guesses < 1 or not sequence.may_draft:
            return []
        if not model_guesses.reading_pays(sequence, costs, token_cost):
            return []
        gains = model_guesses.gains(max_guesses)
        gain_of_text = self._guesses_of(sequence).next_gain(MAX_DRAFTS, token_cost)
        return gains if net_gain(gains, token_cost + costs.guess) > gain_of_text else []

    def _model_guesses_of(self, sequence: Sequence) -> ModelGuesses:
        guesses = self._model_guesses.get(sequence.id)
        if guesses is None:
            guesses = ModelGuesses(sequence, self._model_share)
            self._model_guesses[sequence.id] = guesses
        return guesses
