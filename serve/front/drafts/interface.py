"""What the scheduler asks about drafts: guesses of the tokens that follow, which a step feeds and
verifies together with the newest token."""

from collections.abc import Sequence as ReadableList
from typing import Protocol

from serve.core.types import Sequence


class Drafting(Protocol):
    """Decides what is guessed. It is pure: no clock, socket or array."""

    def propose(self, sequences: ReadableList[Sequence]) -> list[list[int]]:
        """The drafts of each of these rows, which share a step. A row whose newest token is not
        known, or that has not begun, gets none."""

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        """Whether the next step of these rows should wait until their newest tokens are known, so
        that it can have drafts."""

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Notes how many drafts of a step were right. The sequence has its new tokens."""

    def forget(self, sequence_id: int) -> None:
        """Forgets a sequence. Unknown ones are fine."""
