"""Decides how many drafts each row gets. Drafts have to pay off, which depends on how often the
guesses about a row were right, and on what one more token costs on this cluster."""

from collections.abc import Mapping
from collections.abc import Sequence as ReadableList

from serve.core.config import ServeConfig
from serve.core.errors import PlanError
from serve.core.plan import MAX_DRAFT_ROWS
from serve.core.types import Sequence
from serve.front.parts.drafts.acceptance import Acceptance, HitShares, net_gain
from serve.front.parts.drafts.costs import (
    MIN_TOKEN_COST,
    draft_model_costs,
    row_costs,
    token_cost,
)
from serve.front.parts.drafts.draft import MAX_DRAFTS, Draft
from serve.front.parts.drafts.drafting import Drafting
from serve.front.parts.drafts.guesses import TextGuesses
from serve.front.parts.drafts.model_guesses import (
    MAX_GUESSES,
    ModelCosts,
    ModelGuesses,
    ModelShare,
    best_number,
)
from serve.front.parts.drafts.warm_up import WarmUpDrafts
from serve.front.pipeline.status import StageStatus, first_shards

_MIN_GAIN = 1.05
_WAITING_GAIN = 0.1  # the gain, in tokens per step and row, that is worth a wait for the front end
# Drafts cannot pay if one more token in each row costs more than this share of a step.
_MAX_ROWS_COST = 0.5
_UNKNOWN_TOKEN_COST = 0.06


class Speculation(Drafting):
    """Makes drafts. is_possible says whether the stages can forget drafts, token_cost is the cost
    of one more token as a share of a one-token step, row_costs are the costs that a warm-up has
    measured, and model_costs is None without a draft model."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self.is_possible = False
        self.token_cost = _UNKNOWN_TOKEN_COST
        self.row_costs = [1.0]
        self.model_costs: ModelCosts | None = None
        self._acceptance = Acceptance()
        self._hit_shares = HitShares()
        self._model_share = ModelShare()

    # --- the stages

    def settle(self, stages: ReadableList[StageStatus]) -> None:
        self.is_possible = all(
            stage.loaded.can_rewind and stage.loaded.is_causal for stage in stages
        )
        self.model_costs = draft_model_costs(first_shards(stages))
        if self.config.has_drafter and not self.is_possible:
            raise PlanError(
                "--draft-model: the model cannot forget wrong guesses "
                "(reuse=checkpoints in event=kv_room), so nothing can be guessed: leave it out."
            )

    def measured(self, stages: ReadableList[StageStatus]) -> None:
        if (cost := token_cost(stages)) is not None:
            self.token_cost = cost
        self.model_costs = draft_model_costs(stages)

    def timed(self, seconds: Mapping[int, float]) -> None:
        self.row_costs = row_costs(seconds)

    @property
    def reads_tokens(self) -> bool:
        return self.config.has_drafter

    def for_warm_up(self) -> WarmUpDrafts | None:
        if not self.is_on or not self.is_possible:
            return None
        return WarmUpDrafts(self.config, has_model=self.model_costs is not None)

    # --- decisions

    def propose(self, sequences: ReadableList[Sequence]) -> list[Draft]:
        token_cost = self._relative_cost(len(sequences))
        if not self._can_pay(len(sequences), token_cost):
            return [Draft() for _ in sequences]
        drafts = [self._best(sequence, token_cost) for sequence in sequences]
        gains = [self._gains(*pair) for pair in zip(sequences, drafts, strict=True)]
        num_drafts, _ = best_number(gains, self._step_cost, min_gain=_MIN_GAIN)
        return [draft._replace(tokens=draft.tokens[:num_drafts]) for draft in drafts]

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        num_rows = len(sequences)
        token_cost = self._relative_cost(num_rows)
        if not self._can_pay(num_rows, token_cost):
            return False
        # All rows wait for the draft of one row.
        cost = num_rows * token_cost
        gains = [self._text_of(sequence).waiting_gain(cost) for sequence in sequences]
        return sum(gains) > _WAITING_GAIN * num_rows

    def plan_guesses(self, sequences: ReadableList[Sequence], num_busy_groups: int) -> list[int]:
        num_rows = len(sequences)
        has_memory = num_rows * num_busy_groups <= MAX_DRAFT_ROWS
        if self.model_costs is None or not has_memory:
            return [0] * num_rows
        token_cost = self._relative_cost(num_rows)
        if not self._can_pay(num_rows, token_cost):
            return [0] * num_rows
        # While the draft model guesses for one group, rank 0 computes nothing for the others.
        share = num_busy_groups / self._step_cost(num_rows)
        costs = ModelCosts(*(share * cost for cost in self.model_costs))
        gains = [self._model_gains(sequence, costs, token_cost) for sequence in sequences]
        number, _ = best_number(gains, self._step_cost, costs.guess)
        return [min(number, len(chances)) for chances in gains]

    def took(self, sequence: Sequence, tokens: ReadableList[int]) -> None:
        drafted = self.drafted.get(sequence.id)
        if drafted is None:
            return
        if drafted.text:
            drafted.text.catch_up(sequence)
        if drafted.model:
            drafted.model.learn(sequence, drafted.guesses)

    def _can_pay(self, num_rows: int, token_cost: float) -> bool:
        return self.is_possible and num_rows * token_cost < _MAX_ROWS_COST

    def _relative_cost(self, num_rows: int) -> float:
        """Returns the time that one draft adds, as a share of a step of num_rows rows without
        drafts. Every row is assumed to have the number of drafts that makes this time shortest."""
        plain = self._step_cost(num_rows)
        numbers = range(num_rows, max(num_rows + 1, len(self.row_costs)), num_rows)
        cost = min((self._step_cost(num_rows + n) - plain) / n for n in numbers)
        return max(MIN_TOKEN_COST, cost) / plain

    def _step_cost(self, num_tokens: int) -> float:
        """Returns the time of a step, as a multiple of one with one token. Beyond the measured
        costs, each token adds token_cost."""
        num_known = min(num_tokens, len(self.row_costs))
        num_further = num_tokens - num_known
        return self.row_costs[num_known - 1] + num_further * max(MIN_TOKEN_COST, self.token_cost)

    def _text_of(self, sequence: Sequence) -> TextGuesses:
        drafted = self.state_of(sequence)
        if drafted.text is None:
            drafted.text = TextGuesses(
                sequence,
                drafted.prediction,
                Acceptance(self._acceptance),
                HitShares(self._hit_shares),
            )
        return drafted.text

    def _best(self, sequence: Sequence, token_cost: float) -> Draft:
        """Returns the longest draft allowed for a row, from the drafter with the higher expected
        gain; none while its newest token is unknown or no stage holds the row."""
        max_drafts = min(MAX_DRAFTS, sequence.num_left - 1)
        if sequence.num_pending or not sequence.num_computed or max_drafts < 1:
            return Draft()
        text = self._text_of(sequence)
        is_ready = text.catch_up(sequence)
        guesses = self.state_of(sequence).guesses
        drafts = [Draft(guesses[:max_drafts], "model")]
        if is_ready:
            drafts.append(text.draft(max_drafts))
        return max(drafts, key=lambda draft: net_gain(self._gains(sequence, draft), token_cost))

    def _gains(self, sequence: Sequence, draft: Draft) -> list[float]:
        num_tokens = len(draft.tokens)
        if not num_tokens:
            return []
        if draft.drafter == "model":
            return self._model_of(sequence).gains(num_tokens)
        return self._text_of(sequence).gains(num_tokens)

    def _model_gains(
        self,
        sequence: Sequence,
        costs: ModelCosts,
        token_cost: float,
    ) -> list[float]:
        """Returns the chances of the draft model's guesses after the next token; none if they do
        not pay, or if the text gives better drafts."""
        max_guesses = min(MAX_GUESSES, sequence.num_left - 1)
        model = self._model_of(sequence)
        if max_guesses < 1 or not self.state_of(sequence).may_draft:
            return []
        if not model.reading_pays(sequence, costs, token_cost):
            return []
        gains = model.gains(max_guesses)
        gain_of_text = self._text_of(sequence).next_gain(MAX_DRAFTS, token_cost)
        return gains if net_gain(gains, token_cost + costs.guess) > gain_of_text else []

    def _model_of(self, sequence: Sequence) -> ModelGuesses:
        drafted = self.state_of(sequence)
        if drafted.model is None:
            drafted.model = ModelGuesses(sequence, self._model_share)
        return drafted.model
