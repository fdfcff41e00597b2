"""The interface of a part of an engine: one feature, in a folder beside this file, with a line in
`registry`. Nothing else imports it, and everything else works without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self, TypeVar

import mlx.core as mx

from serve.core.messages import FromEngine, Message, Order, Result, Span
from serve.core.ops import AnyOp, Op
from serve.core.outputs import AnyOutput
from serve.core.sections import AnySection
from serve.core.types import Step
from serve.model.sharding import Divisions
from serve.model.stage import Stage
from serve.model.weights import Progress
from serve.rank.cache import ForwardPass, GroupCaches
from serve.rank.chooser import Chooser

LeftoverT = TypeVar("LeftoverT")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the engine that a feature can use. has_head is true on rank 0, whose chooser
    chooses tokens. `send` sends a message to the parent, from any thread. progress is as for
    load_stage. leftovers come from an earlier engine's parts."""

    order: Order
    stage: Stage
    divisions: Divisions
    caches: GroupCaches
    chooser: Chooser
    has_head: bool
    send: Callable[[FromEngine], None]
    progress: Progress
    leftovers: Sequence[object] = field(default=())

    def leftover(self, kind: type[LeftoverT]) -> LeftoverT | None:
        """Returns the leftovers of this type from an earlier engine."""
        for each in self.leftovers:
            if isinstance(each, kind):
                return each
        return None


class RankPart:
    """The base of all parts, which does nothing. The thread that runs MLX calls all methods, unless
    a method says otherwise.

    ops are the operations that the part performs, messages the parent's messages that it obeys, and
    row_fields the optional fields of a row that it reads.
    """

    ops: ClassVar[tuple[type[Op], ...]] = ()
    messages: ClassVar[tuple[type[Message], ...]] = ()
    row_fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def build(cls, surroundings: Surroundings) -> Self | None:
        """Makes the part of an engine. Returns None if its order does not ask for it."""
        raise NotImplementedError

    # --- in each step, in this order; perform also comes after the rows

    def perform(self, op: AnyOp, step: Step) -> None:
        """Performs an operation of the part's ops. Raises EngineError."""

    def dropped(self, sequence: int) -> None:
        """Frees the part's data about a sequence. The sequence may have begun again, but no step of
        its new beginning has run."""

    def prepare(self, step: Step) -> Sequence[mx.array]:
        """Prepares for the rows of a step. Returns arrays to evaluate before the rows run."""
        return ()

    def select(self, step: Step, rows: Sequence[int | None]) -> None:
        """Prepares for a forward pass. rows lists indices into step.rows, and None for a row that
        only pads the batch."""

    def after_rows(
        self,
        step: Step,
        passes: list[ForwardPass],
        hidden: list[mx.array | None],
    ) -> Sequence[mx.array]:
        """Takes the hidden states (B, L, D) of each forward pass of a last stage, not evaluated;
        None where the stage has none. Returns arrays to evaluate with the outputs of the step."""
        return ()

    def take_spans(self) -> Sequence[Span]:
        """Returns the part's own runs of models since the last call, as work. Only rank 0 is
        asked."""
        return ()

    def outputs(self, step: Step, result: Result) -> Sequence[AnyOutput]:
        """Returns what the part adds to the result of a step. Only rank 0 is asked."""
        return ()

    # --- the life of an engine

    def obey(self, message: Message) -> None:
        """Obeys a message of the part's messages, in the thread that talks to the parent."""

    def announce(self) -> None:
        """Sends the messages that rank 0 needs before this rank is ready."""

    def rejoin(self, order: Order) -> Sequence[mx.array]:
        """Begins again in another ring with the same layers, and keeps the sequences and adapters
        that the order names. Returns arrays to evaluate."""
        return ()

    def wait(self) -> None:
        """Waits for all work under way that would send a message."""

    def leftovers(self) -> Sequence[object]:
        """Ends the part, whose engine gets other layers. Returns data that the new engine's part
        can reuse, without anything that belongs to a layer."""
        return ()

    # --- reports

    def loaded(self) -> Sequence[AnySection]:
        """Returns the part's sections of the report about the loaded stage."""
        return ()

    def activity(self) -> Sequence[AnySection]:
        """Returns the part's sections of the regular report, four times a second. This is called in
        another thread, while steps run."""
        return ()

    def bytes_to_come(self) -> int:
        """Returns how many bytes to subtract from the free memory: those that the part will still
        take, minus those that it has taken already although rank 0 reserves them again."""
        return 0
