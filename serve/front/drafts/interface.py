"""The scheduler's view of drafts: guesses of the next tokens of a row, which a step feeds after the
newest token and verifies."""

from collections.abc import Sequence as ReadableList
from typing import Literal, NamedTuple, Protocol

from serve.core.types import Sequence

# What made a draft: the text so far, the answer that the client predicts, or the draft model.
Drafter = Literal["suffixes", "prediction", "model"]


class Draft(NamedTuple):
    """The guesses of the tokens that follow the newest token of a row, and their source."""

    tokens: ReadableList[int] = ()
    drafter: Drafter = "suffixes"


class Drafting(Protocol):
    """Makes drafts. It is pure: no clock, socket or array."""

    def propose(self, sequences: ReadableList[Sequence]) -> list[Draft]:
        """Returns each row's draft: empty if its last token is unknown or no stage holds it."""

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        """Whether a step should wait for its newest tokens, so that it can feed drafts."""

    def plan_guesses(self, sequences: ReadableList[Sequence], num_busy_groups: int) -> list[int]:
        """Returns for each row of a step how many tokens rank 0's draft model should guess after
        it. num_busy_groups groups take turns on rank 0."""

    def learn(self, sequence: Sequence) -> None:
        """Learns a sequence's new tokens."""

    def remove(self, sequence_id: int) -> None:
        """Removes the state of a sequence. Unknown sequences are ignored."""
