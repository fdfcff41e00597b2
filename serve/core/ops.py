"""The operations that stages perform before and after the rows of a step, in the order in which the
step lists them.

A feature of the engine that needs more than rows adds an operation here. A part of the scheduler
makes it, and a part of each rank performs it.
"""

from typing import ClassVar, TypeAlias

import msgspec

NO_CHECKPOINT = -1


class Op(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all operations. A step with an operation that must_come_last overtakes no other
    step. An operation that is_answered comes after the rows: only rank 0 performs it, before the
    step's result leaves, and adds an output to the result."""

    must_come_last: ClassVar[bool] = False
    is_answered: ClassVar[bool] = False

    @property
    def touched(self) -> tuple[int, ...]:
        """The ids of the sequences and checkpoints that the operation reads or changes."""
        return ()


class Load(Op, frozen=True):
    """A sequence begins with num_tokens tokens that the stages have read from their disks."""

    sequence: int
    num_tokens: int

    @property
    def touched(self) -> tuple[int, ...]:
        return (self.sequence,)


class Copy(Op, frozen=True):
    """A new sequence begins as a copy of the first num_tokens of another one. Caches that cannot be
    cut are copied from a checkpoint at that position, which is not needed if the other sequence
    ends there."""

    sequence: int
    source: int
    num_tokens: int
    checkpoint: int = NO_CHECKPOINT

    @property
    def touched(self) -> tuple[int, ...]:
        return (self.sequence, self.source, *_if_given(self.checkpoint))


class Drop(Op, frozen=True):
    """The stages free the caches of a sequence."""

    sequence: int

    @property
    def touched(self) -> tuple[int, ...]:
        return (self.sequence,)


class Forget(Op, frozen=True):
    """The stages free a checkpoint."""

    checkpoint: int

    @property
    def touched(self) -> tuple[int, ...]:
        return (self.checkpoint,)


class Unload(Op, frozen=True):
    """The stages free a version of an adapter. This operation must come last, because a step that
    waits may drop the last sequence that uses the version."""

    must_come_last: ClassVar[bool] = True

    adapter_version: int


class Save(Op, frozen=True):
    """The stages keep a checkpoint of a sequence: a copy of the caches that cannot be cut, such as
    windows and recurrent states."""

    checkpoint: int
    sequence: int

    @property
    def touched(self) -> tuple[int, ...]:
        return (self.checkpoint, self.sequence)


class Write(Op, frozen=True):
    """The stages write a file of the prefix cache: keys and values of a sequence, from token
    `start` up to but not including `end`. If both are equal, the file contains the caches that
    cannot be cut at that position, from a checkpoint if the sequence has more tokens. `name`
    identifies the sequence's tokens before `end`, and `parent` those before `start`."""

    sequence: int
    name: str
    parent: str
    start: int
    end: int
    checkpoint: int = NO_CHECKPOINT

    @property
    def is_state(self) -> bool:
        """Whether it contains the caches that cannot be cut."""
        return self.start == self.end

    @property
    def touched(self) -> tuple[int, ...]:
        return (self.sequence, *_if_given(self.checkpoint))


class Guess(Op, frozen=True):
    """Rank 0's draft model guesses the tokens after each row: num_tokens[i] tokens after row i."""

    is_answered: ClassVar[bool] = True

    num_tokens: tuple[int, ...]


class ShareHead(Op, frozen=True):
    """Each of the last stage's shards computes the logits for its part of the vocabulary. Rank 0's
    engine adds this operation where it saves time."""


AnyOp: TypeAlias = Load | Copy | Drop | Forget | Unload | Save | Write | Guess | ShareHead


def _if_given(checkpoint: int) -> tuple[int, ...]:
    return () if checkpoint == NO_CHECKPOINT else (checkpoint,)
