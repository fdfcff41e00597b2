"""Counts how useful the prefix cache was, over all lives of the engines."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class PrefixCounts:
    """Counts sequences that began as copies, tokens that this saved, and evictions."""

    num_reuses: int = 0
    num_reused_tokens: int = 0
    num_evicted_sequences: int = 0
    num_evicted_checkpoints: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)
