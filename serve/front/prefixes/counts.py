"""Counts how useful the prefix cache was, over all lives of the engines."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class PrefixCounts:
    """The number of sequences that began as a copy, of the tokens that this saved, and of what was
    dropped to make room."""

    num_reuses: int = 0
    num_reused_tokens: int = 0
    num_evicted_sequences: int = 0
    num_evicted_checkpoints: int = 0

    def reused(self, num_tokens: int) -> None:
        self.num_reuses += 1
        self.num_reused_tokens += num_tokens

    def evicted(self, num_sequences: int, num_checkpoints: int) -> None:
        self.num_evicted_sequences += num_sequences
        self.num_evicted_checkpoints += num_checkpoints

    def to_json(self) -> dict[str, int]:
        return asdict(self)
