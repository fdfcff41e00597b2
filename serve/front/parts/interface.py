"""The interface of the scheduler's parts. A part is one feature of the engine: it has a folder here
and, if the stages take part in it, a folder of the same name in serve.rank.parts."""

from collections.abc import Mapping
from collections.abc import Sequence as ReadableList
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from serve.core.config import ServeConfig
from serve.core.messages import Result, ToEngine, ToPrefixCache
from serve.core.ops import AnyOp
from serve.core.types import Group, Sequence
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.status import StageStatus
from serve.front.prefixes.index import Admission, Reuse
from serve.front.prefixes.kv_budget import KvBudget

# How many tokens each sequence of a warm-up samples in steps without the shapes of any part.
# Further steps would have the second step's shapes.
NUM_PLAIN_STEPS = 2


class Fed(NamedTuple):
    """The rows of a step: the tokens of sequences[i] end with drafts[i]. drafts is empty if no row
    has any. group is one of groups, or None in a prefill step. is_prefilling says whether prompts
    wait to be prefilled."""

    sequences: ReadableList[Sequence]
    group: Group | None
    drafts: ReadableList[ReadableList[int]]
    groups: ReadableList[Group]
    is_prefilling: bool


@dataclass(frozen=True, slots=True)
class PartReady:
    """The work that a part asks for, beyond the rows of steps: operations of a step without rows,
    messages to the engines of all ranks, and sequences that need not wait for the part any
    longer."""

    before: tuple[AnyOp, ...] = ()
    after: tuple[AnyOp, ...] = ()
    messages: tuple[ToPrefixCache, ...] = ()
    unblocked: tuple[Sequence, ...] = ()


NOTHING = PartReady()


class SchedulerPart:
    """A feature that the scheduler consults. It is pure: no clock, socket or array. A part keeps
    its facts about a sequence by the sequence's id, from `added` to `ended`, and counts those for
    the client in `Sequence.usage`.

    A part overrides the methods that it needs: the others do nothing. `hears` lists the types of
    engine messages that it takes.
    """

    # How many tokens the sequences of a warm-up sample in addition, for this part.
    num_warm_up_steps: ClassVar[int] = 0
    # How many tokens a warm-up's last row samples, after its plain steps, in steps that are timed.
    num_timed_steps: ClassVar[int] = 0
    hears: ClassVar[tuple[type, ...]] = ()
    budget: KvBudget  # the scheduler's budget, set after __init__

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.is_on = True  # whether steps call the methods in `Hooks`; read once

    @property
    def reads_tokens(self) -> bool:
        """Whether rank 0's engine needs the tokens of all sequences for this part."""
        return False

    # --- the engines

    def start(self, ranks: ReadableList[int], reuse: Reuse) -> PartReady:
        """Begins with the engines of these ranks, which hold no tokens of new sequences."""
        return NOTHING

    def stop(self) -> None:
        """Forgets the engines, which have ended. `reset` is called next, for each sequence."""

    def on_message(self, rank: int, message: Any) -> PartReady:
        """Takes a message from a rank's engine. Its type is in `hears`."""
        return NOTHING

    # --- the stages

    def settle(self, stages: ReadableList[StageStatus]) -> None:
        """Adapts to new stages, given as all their shards, before any step runs on them. Raises
        PlanError if they cannot do what the flags demand."""

    def measured(self, stages: ReadableList[StageStatus]) -> None:
        """Takes the latest measured speed of the stages, given as the first shard of each."""

    def for_warm_up(self) -> "SchedulerPart | None":
        """Returns a part that gives a warm-up's steps the shapes that this part gives to requests'
        steps, or None if it changes no shapes."""
        return None

    def timed(self, seconds: Mapping[int, float]) -> None:
        """Takes the times of a warm-up's steps with one row, by their number of tokens."""

    # --- a sequence

    def takes(self, prompt: Prompt) -> bool:
        """Whether the part handles a prompt that asks for no answer. Raises RequestError if the
        model or the stages cannot make the output that it asks for."""
        return False

    def added(self, sequence: Sequence, prompt: Prompt) -> None:
        """Takes a new sequence of a prompt. It is not called for the sequences of a warm-up, which
        have no prompt."""

    def begun(self, sequence: Sequence) -> ReadableList[ToEngine]:
        """Returns the messages for rank 0's engine that belong to the start of a sequence on the
        stages, also when the sequence starts again."""
        return ()

    def took(self, sequence: Sequence, tokens: ReadableList[int]) -> None:
        """Takes tokens that became part of an answer: the last ones of `sequence.output`, or none
        after a failure. `ended` comes after the last tokens."""

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int | None) -> None:
        """Takes the number of a row's drafts that the stages have verified, and the number that
        became part of the answer. num_accepted is None if the row got no token, because its drafts
        may have spoilt its numbers."""

    def reset(self, sequence: Sequence) -> None:
        """Called when the stages have dropped a sequence. The stages will compute it again."""

    def ended(self, sequence: Sequence) -> None:
        """Frees the part's state of a sequence, which has ended."""

    def retired(self, adapter_version: int) -> None:
        """Called when no new sequence will use this version of an adapter."""

    # --- prefixes and room

    @property
    def num_tokens(self) -> int:
        """The tokens whose keys and values the stages are about to hold for the part."""
        return 0

    def blocks(self, admission: Admission, num_free: int | None) -> PartReady | None:
        """Makes a sequence that could begin wait for the part, and returns the work that it waits
        for. Returns None if the sequence need not wait. num_free is the number of tokens that fit
        beside it (None: no limit)."""
        return None

    def kept(self, sequence: Sequence) -> None:
        """Called when the stages keep a sequence for later prompts, before `ended`."""

    def clear(self) -> PartReady:
        """Drops all that is kept for later prompts."""
        return NOTHING

    def ready(self) -> PartReady:
        """Returns further work, if there is any. This is called after each step."""
        return NOTHING

    # --- a step

    def must_wait(self, group: Group, is_prefilling: bool) -> bool:
        """Whether the next step of a group has to wait for the results under way."""
        return False

    def drafts(
        self,
        sequences: ReadableList[Sequence],
        is_prefilling: bool,
    ) -> ReadableList[ReadableList[int]] | None:
        """Returns the drafts that each row of a step should feed after its newest token, or None.
        Drafts are left out if there is no room for them."""
        return None

    def after(self, fed: Fed) -> ReadableList[AnyOp]:
        """Returns operations that the stages perform after these rows. The counts of the sequences
        include the step."""
        return ()

    def on_result(self, sequences: ReadableList[Sequence], result: Result) -> None:
        """Takes the result of a step that fed these sequences, after `took`."""

    # --- what others see

    def to_json(self) -> Mapping[str, Any]:
        """Returns the fields that the part adds to /admin/pipeline."""
        return {}
