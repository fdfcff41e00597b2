"""Feeds drafts, takes the draft model's guesses, and counts how many were right."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass
from typing import Any

from serve.core.config import ServeConfig
from serve.core.messages import Result
from serve.core.ops import Guess
from serve.core.outputs import Guesses
from serve.core.types import Group, Sequence
from serve.front.parts.drafts.counts import DraftCounts
from serve.front.parts.drafts.draft import Draft, Drafter
from serve.front.parts.drafts.guesses import TextGuesses
from serve.front.parts.drafts.model_guesses import ModelGuesses
from serve.front.parts.interface import Fed, SchedulerPart
from serve.front.pipeline.interface import Prompt

_ACCEPTED = "accepted_prediction_tokens"
_REJECTED = "rejected_prediction_tokens"


@dataclass(slots=True)
class Drafted:
    """What is known about the drafts of a sequence. drafter made the latest drafts. guesses are the
    draft model's, for the tokens after the newest token. text and model are None until they are
    needed."""

    prediction: tuple[int, ...] = ()
    drafter: Drafter = "suffixes"
    may_draft: bool = True
    guesses: tuple[int, ...] = ()
    text: TextGuesses | None = None
    model: ModelGuesses | None = None


class Drafting(SchedulerPart, ABC):
    """The common part of all that makes drafts. During prefill there are no drafts: steps with
    drafts take longer, and only a few chunks may run between two of them."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self.is_on = config.draft_model != "none"
        self.counts = DraftCounts()
        self.drafted: dict[int, Drafted] = {}  # the drafts of each sequence, by its id
        self._awaited: set[int] = set()  # sequences with drafts or guesses under way
        self._guessed: set[int] = set()  # sequences with guesses

    # --- decisions

    @abstractmethod
    def propose(self, sequences: ReadableList[Sequence]) -> list[Draft]:
        """Returns each row's draft, empty if its newest token or its text is not known yet."""

    @abstractmethod
    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        """Whether a step should wait until its newest tokens are known, to have drafts."""

    @abstractmethod
    def plan_guesses(self, sequences: ReadableList[Sequence], num_busy_groups: int) -> list[int]:
        """Returns for each row of a step how many tokens rank 0's draft model should guess after
        it. num_busy_groups groups take turns on rank 0."""

    # --- a sequence

    def state_of(self, sequence: Sequence) -> Drafted:
        """Returns what is known about the drafts of a sequence."""
        drafted = self.drafted.get(sequence.id)
        if drafted is None:
            drafted = self.drafted[sequence.id] = Drafted()
        return drafted

    def added(self, sequence: Sequence, prompt: Prompt) -> None:
        sequence.usage.update({_ACCEPTED: 0, _REJECTED: 0})
        if self.is_on and prompt.prediction:
            self.drafted[sequence.id] = Drafted(prompt.prediction)

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int | None) -> None:
        drafted = self.state_of(sequence)
        if num_accepted is None:
            drafted.may_draft = False
        if not num_drafts:
            return
        num_right = num_accepted or 0
        sequence.usage[_ACCEPTED] += num_right
        sequence.usage[_REJECTED] += num_drafts - num_right
        self.counts.verified(drafted.drafter, num_drafts, num_right)

    def reset(self, sequence: Sequence) -> None:
        self._awaited.discard(sequence.id)
        if drafted := self.drafted.get(sequence.id):
            self._store_guesses(sequence, drafted, ())
            if drafted.model:
                drafted.model.reset()

    def ended(self, sequence: Sequence) -> None:
        self._awaited.discard(sequence.id)
        self._guessed.discard(sequence.id)
        self.drafted.pop(sequence.id, None)

    # --- a step

    def must_wait(self, group: Group, is_prefilling: bool) -> bool:
        if self._awaited and any(s.id in self._awaited for s in group.sequences):
            return True
        if is_prefilling or not group.num_in_flight or not group.sequences:
            return False
        return self.is_worth_waiting(group.sequences)

    def drafts(
        self,
        sequences: ReadableList[Sequence],
        is_prefilling: bool,
    ) -> list[ReadableList[int]] | None:
        if is_prefilling:
            return None
        drafts: list[ReadableList[int]] = []
        for sequence, draft in zip(sequences, self.propose(sequences), strict=True):
            if not draft.tokens:
                drafts.append(())
                continue
            drafted = self.state_of(sequence)
            drafted.drafter = draft.drafter
            drafts.append(draft.tokens if drafted.may_draft else ())
        return drafts

    def after(self, fed: Fed) -> list[Guess]:
        if fed.group is None:
            return []
        if fed.drafts:
            pairs = zip(fed.sequences, fed.drafts, strict=True)
            self._awaited.update(sequence.id for sequence, draft in pairs if draft)
        if fed.is_prefilling:
            return []
        num_busy_groups = sum(bool(group.sequences) for group in fed.groups)
        asked = self.plan_guesses(fed.sequences, num_busy_groups)
        if not any(asked):
            return []
        pairs_asked = zip(fed.sequences, asked, strict=True)
        self._awaited.update(sequence.id for sequence, number in pairs_asked if number)
        return [Guess(tuple(asked))]

    def on_result(self, sequences: ReadableList[Sequence], result: Result) -> None:
        """Stores the draft model's guesses, for rows of which no later step is under way."""
        outputs = result.outputs_of(Guesses)
        if not outputs and not self._awaited and not self._guessed:
            return  # Most steps end here.
        for n, sequence in enumerate(sequences):
            if sequence.num_pending:
                continue
            self._awaited.discard(sequence.id)
            if drafted := self.drafted.get(sequence.id):
                self._store_guesses(sequence, drafted, outputs[0].rows[n] if outputs else ())

    def _store_guesses(
        self,
        sequence: Sequence,
        drafted: Drafted,
        guesses: tuple[int, ...],
    ) -> None:
        drafted.guesses = guesses
        if guesses:
            self._guessed.add(sequence.id)
        else:
            self._guessed.discard(sequence.id)

    # --- what others see

    def to_json(self) -> Mapping[str, Any]:
        return {"drafts": self.counts.to_json()}
