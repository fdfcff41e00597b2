"""Gives the steps of a warm-up the shapes that requests' steps have with drafts."""

from collections.abc import Sequence as ReadableList

from serve.core.config import ServeConfig
from serve.core.types import Sequence
from serve.front.parts.drafts.draft import MAX_DRAFTS, Draft
from serve.front.parts.drafts.drafting import Drafting
from serve.front.parts.interface import NUM_PLAIN_STEPS

_NUM_DRAFTS = 2


class WarmUpDrafts(Drafting):
    """Guesses a few tokens of each row after its plain steps, right or wrong. Each further step has
    fewer drafts, so that rows end in different columns. The row that is timed has 0 drafts, then 1,
    and so on up to MAX_DRAFTS, and then fewer again, as long as all of them are wrong."""

    num_warm_up_steps = 3
    num_timed_steps = 2 * (MAX_DRAFTS + 1)

    def __init__(self, config: ServeConfig, *, has_model: bool) -> None:
        super().__init__(config)
        self._has_model = has_model

    def propose(self, sequences: ReadableList[Sequence]) -> list[Draft]:
        return [self._guess(sequence) for sequence in sequences]

    def _guess(self, sequence: Sequence) -> Draft:
        if sequence.num_pending or not _is_due(sequence):
            return Draft()
        num_drafts = _NUM_DRAFTS
        if self._is_timed(sequence):
            num_drafts = len(sequence.output) - NUM_PLAIN_STEPS
        # After a prompt that repeats a token, most models repeat one, so another is a wrong guess.
        other_token = int(sequence.output[-1] == 0)
        return Draft([other_token] * min(num_drafts, sequence.num_left - 1))

    def _is_timed(self, sequence: Sequence) -> bool:
        return sequence.max_tokens > NUM_PLAIN_STEPS + self.num_warm_up_steps

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        return any(_is_due(sequence) for sequence in sequences)

    def plan_guesses(self, sequences: ReadableList[Sequence], num_busy_groups: int) -> list[int]:
        if not self._has_model:
            return [0 for _ in sequences]
        return [self._num_guesses(sequence) for sequence in sequences]

    def _num_guesses(self, sequence: Sequence) -> int:
        return _NUM_DRAFTS if _is_due(sequence) and not self._is_timed(sequence) else 0


def _is_due(sequence: Sequence) -> bool:
    """Whether the tokens of the plain steps are sampled, or will be by steps under way."""
    return len(sequence.output) + sequence.num_pending >= NUM_PLAIN_STEPS
