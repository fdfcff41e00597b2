"""What the scheduler asks its parts. A part is one feature of the engine: it has a folder here and,
if the stages take part in it, a folder of the same name in serve.rank.parts."""

from collections.abc import Mapping
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass
from typing import Any

from serve.core.config import ServeConfig
from serve.core.messages import Result, ToEngine
from serve.core.ops import AnyOp
from serve.core.types import Group, Sequence
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.status import StageStatus


@dataclass(frozen=True, slots=True)
class Fed:
    """The rows of a step: num_tokens[i] tokens of sequences[i]. group is None in a prefill step."""

    sequences: ReadableList[Sequence]
    num_tokens: ReadableList[int]
    group: Group | None


class SchedulerPart:
    """A feature that the scheduler consults. It is pure: no clock, socket or array. What it knows
    about a sequence is kept by the sequence's id, from `added` to `ended`, and what a client may
    see of it is counted in `Sequence.usage`.

    A part overrides the methods that it needs: the others do nothing.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config

    # --- the stages

    def settle(self, stages: ReadableList[StageStatus]) -> None:
        """Adapts to other stages, of which these are the first shards, before any step runs on
        them. Raises PlanError if they cannot do what the flags demand."""

    def measured(self, stages: ReadableList[StageStatus]) -> None:
        """Takes the latest measured speed of the stages."""

    # --- a sequence

    def takes(self, prompt: Prompt) -> bool:
        """Whether the part makes something of a prompt that has no answer. Raises RequestError if
        the model or the stages cannot."""
        return False

    def added(self, sequence: Sequence, prompt: Prompt) -> None:
        """Takes a new sequence, which belongs to prompt."""

    def begun(self, sequence: Sequence) -> ReadableList[ToEngine]:
        """Returns what rank 0's engine has to know when the stages begin a sequence, also when they
        begin it again."""
        return ()

    def took(self, sequence: Sequence, tokens: ReadableList[int]) -> None:
        """Takes tokens that became part of an answer. `ended` comes after the last of them."""

    def reset(self, sequence: Sequence) -> None:
        """Takes note that the stages have dropped a sequence, which they will compute again."""

    def ended(self, sequence: Sequence) -> None:
        """Forgets a sequence."""

    # --- a step

    def before(self, fed: Fed) -> ReadableList[AnyOp]:
        """Returns operations that the stages perform before these rows. The counts of the sequences
        do not include the step yet."""
        return ()

    def after(self, fed: Fed) -> ReadableList[AnyOp]:
        """Returns operations that the stages perform after these rows. The counts of the sequences
        include the step."""
        return ()

    def on_result(self, sequences: ReadableList[Sequence], result: Result) -> None:
        """Takes the result of a step that fed these sequences, after `took`."""

    # --- what others see

    def to_json(self) -> Mapping[str, Any]:
        """Returns the part's fields of /admin/pipeline."""
        return {}
