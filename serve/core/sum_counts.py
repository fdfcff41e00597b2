"""Counts of the sums that the shards of a stage compute together."""

import msgspec


class SumCounts(msgspec.Struct, frozen=True, array_like=True):
    """The sums that a shard has computed with the other shards of its stage, and the bytes that it
    sent for them. num_measured of its steps were measured: they took step_seconds, of which
    seconds were spent in sums, waiting for the other shards included."""

    num_sums: int = 0
    num_bytes: int = 0
    num_measured: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0

    def with_sum(self, num_bytes: int, seconds: float) -> "SumCounts":
        return msgspec.structs.replace(
            self,
            num_sums=self.num_sums + 1,
            num_bytes=self.num_bytes + num_bytes,
            seconds=self.seconds + seconds,
        )

    def with_step(self, seconds: float) -> "SumCounts":
        """Returns the counts with one more measured step, which took these seconds."""
        return msgspec.structs.replace(
            self,
            num_measured=self.num_measured + 1,
            step_seconds=self.step_seconds + seconds,
        )

    def to_json(self) -> dict[str, float]:
        return {
            "num_sums": self.num_sums,
            "num_bytes": self.num_bytes,
            "num_measured_steps": self.num_measured,
            "seconds": round(self.seconds, 5),
            "step_seconds": round(self.step_seconds, 5),
        }
