"""Counts the drafts of each drafter, over all lives of the engines."""

from dataclasses import dataclass, field
from typing import get_args

from serve.front.parts.drafts.draft import Drafter


@dataclass(slots=True)
class DraftCounts:
    """The drafts that the stages verified, and those accepted, by drafter."""

    drafted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(Drafter), 0))
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(Drafter), 0))

    def verified(self, drafter: str, num_drafts: int, num_accepted: int) -> None:
        self.drafted[drafter] += num_drafts
        self.accepted[drafter] += num_accepted

    def to_json(self) -> dict[str, dict[str, int]]:
        return {
            name: {"drafted": self.drafted[name], "accepted": self.accepted[name]}
            for name in self.drafted
        }
