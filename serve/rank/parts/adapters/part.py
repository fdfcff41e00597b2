"""Adapters as a part: the rows of a step name their versions, and the parent says what to read.

`serve.lora.table` holds the adapters themselves.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import mlx.core as mx

from serve.core.messages import (
    AdapterRead,
    AdapterRefused,
    FromEngine,
    LoadAdapter,
    Message,
    Order,
)
from serve.core.ops import AnyOp, Unload
from serve.core.sections import AdapterMemory
from serve.core.types import Step
from serve.lora.table import Adapters
from serve.rank.parts.interface import RankPart, Surroundings

_logger = logging.getLogger(__name__)


class AdapterPart(RankPart):
    """Reads adapters in a thread of its own, so that no stream waits meanwhile."""

    ops = (Unload,)
    messages = (LoadAdapter,)
    row_fields = ("adapter_version",)

    def __init__(self, adapters: Adapters, send: Callable[[FromEngine], None]) -> None:
        self.adapters = adapters
        self._send = send
        self._reader = ThreadPoolExecutor(1, "adapters")

    @classmethod
    def build(cls, surroundings: Surroundings) -> Self:
        order = surroundings.order
        adapters = Adapters(
            surroundings.stage,
            Path(order.cache_dir) if order.cache_dir else None,
            Path(order.copies),
            surroundings.divisions,
        )
        return cls(adapters, surroundings.send)

    def perform(self, op: AnyOp, step: Step) -> None:
        assert isinstance(op, Unload)
        self.adapters.unload(op.adapter_version)

    def prepare(self, step: Step) -> Sequence[mx.array]:
        return self.adapters.install(step.rows)

    def select(self, step: Step, rows: Sequence[int | None]) -> None:
        self.adapters.select(step, rows)

    def obey(self, message: Message) -> None:
        assert isinstance(message, LoadAdapter)
        self._reader.submit(self._read, message)

    def rejoin(self, order: Order) -> Sequence[mx.array]:
        return self.adapters.free_all_but(order.adapters)

    def wait(self) -> None:
        self._reader.submit(lambda: None).result()

    def leftovers(self) -> Sequence[object]:
        self._reader.shutdown()
        return ()

    def activity(self) -> Sequence[AdapterMemory]:
        return [AdapterMemory(self.adapters.num_bytes)]

    def bytes_to_come(self) -> int:
        # Rank 0 reserves memory for all adapters, even for those that are loaded already.
        return -self.adapters.num_bytes

    def _read(self, message: LoadAdapter) -> None:
        """Reads an adapter and answers rank 0. No step uses it yet, so an error ends nothing."""
        answer: AdapterRead | AdapterRefused
        try:
            answer = self.adapters.answer(message)
        except Exception as error:  # The top of this thread: an exception would be lost.
            _logger.exception("event=adapter_failed version=%d", message.version)
            reason = f"reading failed ({type(error).__name__})"
            answer = AdapterRefused(message.version, reason, 500)
        self._send(answer)
        self.adapters.copy()
