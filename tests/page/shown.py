"""An engine that shows a pipeline at work without a cluster: what it says is made up."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from serve.core.messages import Span
from serve.core.sections import MemoryUse
from serve.front.pipeline.status import StageSpan
from tests.front.fakes import FakeEngine

STEP_SECONDS = 0.05
NUM_CLIENTS = 4
GB = 10**9


class ShownEngine(FakeEngine):
    """Its stages take turns on the steps of four sequences; every eighth step is prefill."""

    def __init__(self, tokenizer: Any, num_ranks: int = 2) -> None:
        super().__init__(tokenizer)
        self.num_ranks = num_ranks
        self.num_clients = NUM_CLIENTS  # With one, the ranks take turns on its steps.
        self.cluster: dict[str, Any] = {"name": "working", "what": "the engines get steps"}
        self.num_waiting = 0
        self.busy_shares: dict[int, float] = {}  # of each rank that is not always busy
        self.stage_fields: dict[int, dict[str, Any]] = {}

    def state(self) -> dict[str, Any]:
        return {
            "reason": None,
            "has_worked": True,
            "missing": [],
            "fault": None,
            "fault_seconds_ago": None,
            **self.cluster,
        }

    def pipeline(self) -> dict[str, Any]:
        return {
            **super().pipeline(),
            "num_ranks": self.num_ranks,
            "stages": [self.stage(rank) for rank in range(self.num_ranks)],
            "num_running": NUM_CLIENTS,
            "num_waiting": self.num_waiting,
            "kv_tokens": 18_200,
            "max_kv_tokens": 65_536,
            "better_split": None,
        }

    def stage(self, rank: int) -> dict[str, Any]:
        first = 16 * (self.num_ranks - 1 - rank)
        return {
            "rank": rank,
            "host": f"10.0.0.{rank + 1}",
            "pid": 1000 + rank,
            "layers": [first, first + 16],
            "state": "ready",
            "bytes_done": 0,
            "bytes_total": 0,
            "bytes_owned": int(8.4 * GB),
            "bytes_read": int(8.4 * GB),
            "bytes_fetched": 0,
            "busy_share": 0.9,
            "busy_seconds": 100.0,
            "decode_seconds": STEP_SECONDS,
            "kv_bytes": int(1.2 * GB),
            "adapter_bytes": 0,
            "memory": MemoryUse(*(int(n * GB) for n in (9.6, 1.5, 12, 80))).to_json(),
            "num_hops": 100 if rank < self.num_ranks - 1 else 0,
            "hop_seconds": 0.08,
            **self.stage_fields.get(rank, {}),
        }

    def spans_after(self, numbers: Mapping[int, int], seconds: float) -> list[StageSpan]:
        now = time.time()
        return [
            span
            for rank in range(self.num_ranks)
            for span in self.spans_of(rank, numbers.get(rank, 0), now - seconds, now)
        ]

    def spans_of(self, rank: int, number: int, since: float, now: float) -> Iterator[StageSpan]:
        """The spans of a rank that have ended, the latest first. Those of the rank with the head
        come later."""
        is_alone = self.num_clients == 1
        period = self.num_ranks * STEP_SECONDS if is_alone else STEP_SECONDS
        length = self.busy_shares.get(rank, 0.97) * STEP_SECONDS
        delay = (self.num_ranks - 1 - rank) * (STEP_SECONDS if is_alone else STEP_SECONDS / 2)
        last = math.floor((now - delay - length) / period)
        for step in range(last, max(number, math.floor(since / period)), -1):
            start = step * period + delay
            num_tokens = 256 if step % 8 == 0 else 1
            span = Span(step, 0, 1, num_tokens, start, start + length)
            yield StageSpan(rank, step, span, (step % self.num_clients,))
