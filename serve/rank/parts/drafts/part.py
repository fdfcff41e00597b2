"""The draft model as a part: rank 0 guesses the tokens that follow the rows of a step."""

from collections.abc import Sequence
from typing import Self

import mlx.core as mx
import msgspec

from serve.core.messages import Order, Result, Span
from serve.core.ops import AnyOp, Guess
from serve.core.outputs import Guesses
from serve.core.sections import DraftCosts
from serve.core.types import FIRST_WARM_UP_STEP, Step
from serve.rank.cache import ForwardPass
from serve.rank.chooser import Chooser
from serve.rank.parts.drafts.draft_model import Drafter, GuessRequest
from serve.rank.parts.drafts.loading import LoadedDraft, load_drafter
from serve.rank.parts.interface import RankPart, Surroundings


class DraftsPart(RankPart):
    """Guesses with a draft model or a prediction head. `draft` is either of these before it was
    bound to the stage, and planned_bytes the memory for its weights, keys and values."""

    ops = (Guess,)

    def __init__(
        self,
        draft: LoadedDraft,
        drafter: Drafter,
        chooser: Chooser,
        planned_bytes: int,
    ) -> None:
        self.drafter = drafter
        self._draft = draft
        self._chooser = chooser
        self._planned_bytes = planned_bytes
        self._guesses: list[tuple[int, ...]] = []  # the guesses of the step under way
        self._spans: list[Span] = []

    @classmethod
    def build(cls, surroundings: Surroundings) -> Self | None:
        order = surroundings.order
        if order.draft is None:
            return None
        draft = surroundings.leftover(LoadedDraft)
        if draft is None:
            draft = load_drafter(order.draft, surroundings.progress)
        drafter = draft.for_logits_of(surroundings.stage)
        return cls(draft, drafter, surroundings.chooser, order.draft_bytes)

    def perform(self, op: AnyOp, step: Step) -> None:
        """Guesses as many tokens after each row as the operation says."""
        assert isinstance(op, Guess)
        requests: list[GuessRequest] = []
        for row, num_guesses in zip(step.rows, op.num_tokens, strict=True):
            sampler = self._chooser.sampler(row.sequence)
            each = GuessRequest(row.sequence, sampler.tokens, sampler.sampling, num_guesses)
            requests.append(each)
        self._guesses = self.drafter.guess(step.group, requests)
        runs = self.drafter.take_runs()
        if step.number < FIRST_WARM_UP_STEP:
            self._spans = [msgspec.structs.replace(run, step=step.number) for run in runs]

    def dropped(self, sequence: int) -> None:
        self.drafter.forget([sequence])

    def after_rows(
        self,
        step: Step,
        passes: list[ForwardPass],
        hidden: list[mx.array | None],
    ) -> Sequence[mx.array]:
        return self.drafter.keep(step, passes, self._chooser)

    def outputs(self, step: Step, result: Result) -> Sequence[Guesses]:
        if not self._guesses:
            return ()
        guesses, self._guesses = self._guesses, []
        return [Guesses(tuple(guesses))]

    def take_spans(self) -> Sequence[Span]:
        spans, self._spans = self._spans, []
        return spans

    def rejoin(self, order: Order) -> Sequence[mx.array]:
        self.drafter.clear()
        return ()

    def leftovers(self) -> Sequence[object]:
        return [self._draft]

    def loaded(self) -> Sequence[DraftCosts]:
        return [DraftCosts(self.drafter.num_bytes, self.drafter.try_out())]

    def bytes_to_come(self) -> int:
        return max(0, self._planned_bytes - self.drafter.num_bytes)
