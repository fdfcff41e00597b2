"""Passes each operation and each message to its part, and everything else to all parts."""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import msgspec

from serve.core.errors import EngineError
from serve.core.messages import Message, Order, Result, Span
from serve.core.ops import AnyOp, Op
from serve.core.sections import AnySection
from serve.core.types import Row, Step
from serve.rank.cache import ForwardPass
from serve.rank.parts.interface import RankPart

MISSING = "missing_part"


class Parts:
    """The parts of an engine. A method calls that of `RankPart` for all parts; add_to calls
    `outputs`."""

    def __init__(self, parts: Iterable[RankPart] = ()) -> None:
        self._all = tuple(parts)
        self._performers: dict[type[Op], RankPart] = {}
        self._receivers: dict[type[Message], RankPart] = {}
        served: set[str] = set()
        for part in self._all:
            self._performers |= dict.fromkeys(part.ops, part)
            self._receivers |= dict.fromkeys(part.messages, part)
            served.update(part.row_fields)
        self._unserved = [each for each in _optional_row_fields() if each[0] not in served]

    def perform(self, op: AnyOp, step: Step) -> None:
        """Makes its part perform an operation. Raises EngineError if there is none."""
        part = self._performers.get(type(op))
        if part is None:
            raise _missing(f"the operation {type(op).__name__} of step {step.number}")
        part.perform(op, step)

    def obey(self, message: Message) -> None:
        """Passes a message to its part. Raises EngineError if there is none."""
        part = self._receivers.get(type(message))
        if part is None:
            raise _missing(f"the message {type(message).__name__}")
        part.obey(message)

    def dropped(self, sequence: int) -> None:
        for part in self._all:
            part.dropped(sequence)

    def prepare(self, step: Step) -> list[mx.array]:
        """Prepares all parts. Raises EngineError if a row asks for something that no part does."""
        for name, default in self._unserved:
            if any(getattr(row, name) != default for row in step.rows):
                raise _missing(f"the {name} of step {step.number}")
        return [array for part in self._all for array in part.prepare(step)]

    def select(self, step: Step, rows: Sequence[int | None]) -> None:
        for part in self._all:
            part.select(step, rows)

    def after_rows(
        self,
        step: Step,
        passes: list[ForwardPass],
        hidden: list[mx.array | None],
    ) -> list[mx.array]:
        return [each for part in self._all for each in part.after_rows(step, passes, hidden)]

    def add_to(self, step: Step, result: Result) -> Result:
        """Returns the result of a step with the outputs of all parts."""
        outputs = list(result.outputs)
        for part in self._all:
            outputs += part.outputs(step, result)
        if len(outputs) == len(result.outputs):
            return result
        return msgspec.structs.replace(result, outputs=tuple(outputs))

    def take_spans(self) -> list[Span]:
        return [each for part in self._all for each in part.take_spans()]

    def announce(self) -> None:
        for part in self._all:
            part.announce()

    def rejoin(self, order: Order) -> list[mx.array]:
        return [each for part in self._all for each in part.rejoin(order)]

    def wait(self) -> None:
        for part in self._all:
            part.wait()

    def leftovers(self) -> list[object]:
        return [each for part in self._all for each in part.leftovers()]

    def loaded(self) -> list[AnySection]:
        return [each for part in self._all for each in part.loaded()]

    def activity(self) -> list[AnySection]:
        return [each for part in self._all for each in part.activity()]

    def bytes_to_come(self) -> int:
        return sum(part.bytes_to_come() for part in self._all)


def _optional_row_fields() -> list[tuple[str, Any]]:
    """Returns the fields of a row that have a default, and that default."""
    fields = msgspec.structs.fields(Row)
    return [(each.name, each.default) for each in fields if each.default is not msgspec.NODEFAULT]


def _missing(asked: str) -> EngineError:
    return EngineError(
        f"This engine has no part for {asked}: see serve/rank/parts/registry.py.", code=MISSING
    )
