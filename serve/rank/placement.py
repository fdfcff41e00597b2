"""Decides which rows of a step share a batch, and which rows have to move for that.

Decisions are moves: plain data, which `rank.cache` performs on the arrays. Nothing here changes
anything, and nothing here knows MLX.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve.core.errors import EngineError
from serve.core.types import NO_CHECKPOINT, Row, Step

_MANY_GROUPS = 256


Joining = tuple[int, list[Any], int]
"""A row that joins a batch: its sequence, its plain caches, and how many tokens these hold."""


class Batch(Protocol):
    """Rows of several sequences that run in one forward. Lengths are numbers of tokens.

    The first six only answer questions; the other methods change the batch.
    """

    @property
    def sequences(self) -> list[int]: ...

    @property
    def caches(self) -> list[Any]:
        """One cache for each layer."""

    @property
    def has_grown(self) -> bool:
        """Whether the last `arrange` has copied the rows into larger buffers."""

    def staying(self, sequences: Collection[int]) -> list[int]:
        """Returns the rows of the last forward whose sequences are among these."""

    def has_room(self, length: int) -> bool:
        """Whether a row of this length may join without wasting much on padding."""

    def in_the_way(self) -> list[int]:
        """Rows that should leave before another one joins."""

    def to_park(self, sequences: list[int], num_tokens: int) -> list[int]:
        """Rows that should leave before a forward that feeds these sequences up to num_tokens
        tokens each."""

    def keep(self, sequences: list[int]) -> None:
        """Marks the rows that the next forward feeds as well."""

    def add(self, rows: list[Joining]) -> None:
        """Adds rows behind those that are there."""

    def remove(self, sequence: int) -> None: ...

    def extract(self, sequence: int, length: int) -> list[Any]:
        """Returns plain caches with the first tokens of a row, or all where caches cannot be
        cut."""

    def states(self, sequence: int) -> list[Any]:
        """Returns the states of a row's caches that cannot be cut, as a Checkpoint of
        `rank.checkpoints` has them."""

    def rewind(self, sequence: int, num_tokens: int) -> None:
        """Forgets the last tokens of a row. Raises EngineError if its caches cannot."""

    def arrange(self, feeds: Mapping[int, int]) -> list[int | None]:
        """Makes these sequences the rows of the next forward. feeds has the number of tokens that
        it feeds to each. Returns them in the order of the batch, with None for a row that is only
        padding."""


# --- moves


@dataclass(frozen=True, slots=True)
class Copy:
    """A sequence begins in a batch of its own, with the first tokens of another sequence and the
    state of a checkpoint, if there is one."""

    sequence: int
    source: int
    num_tokens: int
    checkpoint: int = NO_CHECKPOINT


@dataclass(frozen=True, slots=True)
class Drop:
    """A sequence has ended, and its rows are removed."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """A sequence keeps only its first num_tokens tokens."""

    sequence: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Begin:
    """New sequences begin together in a new batch. lengths are what each is about to be fed."""

    key: int
    lengths: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Keep:
    """Only these sequences of a batch are fed next."""

    key: int
    sequences: list[int]


@dataclass(frozen=True, slots=True)
class Park:
    """A sequence moves to a batch of its own."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Lift:
    """A sequence leaves its batch, to join another one next."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Join:
    """The lifted sequence joins a batch, which is made if there is none with this key."""

    sequence: int
    key: int


@dataclass(frozen=True, slots=True)
class Own:
    """The batches with these keys belong to a group from here on."""

    group: int
    keys: list[int]


@dataclass(frozen=True, slots=True)
class ForgetGroups:
    """Groups without a batch are forgotten."""


@dataclass(frozen=True, slots=True)
class Run:
    """These rows of the step, by their indices, run in one forward of a batch."""

    key: int
    rows: list[int]


CacheMove = Copy | Drop | Rewind | Begin | Keep | Park | Lift | Join | Own | ForgetGroups
Move = CacheMove | Run


# --- decisions


@dataclass(frozen=True, slots=True)
class Rules:
    """The layouts that the model's caches allow: rows in one batch, and rows in slots of one
    buffer."""

    can_batch: bool
    in_slots: bool


@dataclass(slots=True)
class Layout:
    """The place of each sequence. Batches have keys; next_key is the first unused one.

    positions has the number of tokens that are held of each sequence. floors has the number before
    the last step, for sequences that it fed drafts: they can go back as far as that.
    """

    batches: dict[int, Batch] = field(default_factory=dict)
    keys_of_group: dict[int, list[int]] = field(default_factory=dict)
    key_of: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)
    next_key: int = 0

    def batch_of(self, sequence: int) -> Batch:
        return self.batches[self.key_of[sequence]]

    def note_fed(self, step: Step) -> None:
        """Updates the positions after a step."""
        for row in step.rows:
            self.positions[row.sequence] = row.position + row.num_tokens
            if step.sample and row.num_tokens > 1:
                self.floors[row.sequence] = row.position
            else:
                self.floors.pop(row.sequence, None)

    def forget_groups(self) -> None:
        """Forgets groups without a batch. Each prompt has a group of its own until its rows join
        another group, so their number would grow without a limit."""
        for group, keys in list(self.keys_of_group.items()):
            live = [key for key in keys if key in self.batches]
            if live:
                self.keys_of_group[group] = live
            else:
                del self.keys_of_group[group]


def moves(step: Step, layout: Layout, rules: Rules) -> Iterator[Move]:
    """Yields the moves that a step needs. Each one has to be performed, and the layout changed
    by it, before the next one is taken: a row that moves takes room, or leaves some.

    Raises EngineError if the step does not fit what this stage holds.
    """
    for take in step.take:
        held = layout.positions.get(take.source, 0)
        if held < take.num_tokens:
            raise EngineError(
                f"Step {step.number} takes {take.num_tokens} tokens of sequence {take.source}, "
                f"this stage holds {held} tokens of it: the ranks are out of step."
            )
        yield Copy(take.sequence, take.source, take.num_tokens, take.checkpoint)
    for sequence in step.drop:
        yield Drop(sequence)
    if step.rows:
        _check(step, layout, rules)
        for row in step.rows:
            if layout.positions.get(row.sequence, 0) > row.position:
                yield Rewind(row.sequence, row.position)
        rows_of: dict[int, list[int]] = {}
        yield from _assign(step, layout, rules, rows_of)
        for key, rows in rows_of.items():
            yield from _run(step, layout, key, rows)


def _assign(
    step: Step,
    layout: Layout,
    rules: Rules,
    rows_of: dict[int, list[int]],
) -> Iterator[Move]:
    """Divides the rows of a step among batches, and notes their indices by the batch's key.

    New rows do not share a batch with old ones: to some models an empty state is not the same as
    the zeros that it would become in a batch.
    """
    new: list[int] = []
    old: list[int] = []
    for n, row in enumerate(step.rows):
        if row.sequence in layout.key_of:
            old.append(n)
        else:
            new.append(n)
    for rows in divide_new(step, new, rules):
        key = layout.next_key
        rows_of[key] = rows
        begun = [step.rows[n] for n in rows]
        lengths = {row.sequence: row.num_tokens for row in begun}
        yield Begin(key, lengths)
    if not old:
        if len(layout.keys_of_group) > _MANY_GROUPS:
            yield ForgetGroups()
        yield Own(step.group, list(rows_of)[:1])
    elif rules.can_batch:
        yield from _gather(step, layout, old, rows_of)
    else:
        for n in old:
            key = layout.key_of[step.rows[n].sequence]
            rows_of[key] = [n]


def divide_new(step: Step, new: list[int], rules: Rules) -> list[list[int]]:
    """Divides new rows, given by their indices, into those that begin together."""
    if not new:
        return []
    lengths = {step.rows[n].num_tokens for n in new}
    can_begin_together = rules.in_slots or (rules.can_batch and len(lengths) == 1)
    if can_begin_together:
        return [new]
    return [[n] for n in new]


def _gather(
    step: Step,
    layout: Layout,
    rows: list[int],
    rows_of: dict[int, list[int]],
) -> Iterator[Move]:
    """Gathers the rows of a group. Rows of the group's last step stay in their batches, others
    join them where there is room."""
    known_keys = layout.keys_of_group.get(step.group, [])
    keys = [key for key in known_keys if key in layout.batches]
    index_of = {step.rows[n].sequence: n for n in rows}
    for key in list(keys):
        batch = layout.batches[key]
        staying = batch.staying(index_of)
        yield Keep(key, staying)
        if key != keys[0]:
            # A row that was too long to share the first batch may fit into it by now.
            first = layout.batches[keys[0]]
            lengths = {s: layout.positions[s] for s in staying}
            staying = [s for s in staying if not first.has_room(lengths[s])]
        if staying:
            rows_of[key] = [index_of.pop(sequence) for sequence in staying]
            continue
        for sequence in list(batch.sequences):
            yield Park(sequence)
        keys.remove(key)
    for sequence, n in index_of.items():
        yield Lift(sequence)
        length = layout.positions[sequence]
        with_room = [key for key in keys if layout.batches[key].has_room(length)]
        if with_room:
            key = with_room[0]
            for idle in layout.batches[key].in_the_way():
                yield Park(idle)
        else:
            key = layout.next_key
            keys.append(key)
        yield Join(sequence, key)
        rows_of.setdefault(key, []).append(n)
    yield Own(step.group, keys)


def _run(step: Step, layout: Layout, key: int, rows: list[int]) -> Iterator[Move]:
    """Clears a batch of the rows that are in the way of a forward, and runs it."""
    sequences = [step.rows[n].sequence for n in rows]
    num_tokens = max(step.rows[n].num_tokens for n in rows)
    for idle in layout.batches[key].to_park(sequences, num_tokens):
        yield Park(idle)
    yield Run(key, rows)


def _check(step: Step, layout: Layout, rules: Rules) -> None:
    """Raises EngineError if a step does not fit what this stage holds."""
    lengths = {row.num_tokens for row in step.rows}
    continues_any = any(row.position for row in step.rows)
    # Drafts differ in number. Rows in slots can, and so can rows that run one by one.
    can_differ = step.sample and (rules.in_slots or not rules.can_batch)
    if len(lengths) != 1 and continues_any and not can_differ:
        raise EngineError(f"Step {step.number} has rows of different lengths {sorted(lengths)}.")
    for row in step.rows:
        held = layout.positions.get(row.sequence, 0)
        floor = layout.floors.get(row.sequence, held)
        if not floor <= row.position <= held:
            raise EngineError(_out_of_step(step, row, held))


def _out_of_step(step: Step, row: Row, held: int) -> str:
    return (
        f"Step {step.number} feeds sequence {row.sequence} at position {row.position}, "
        f"this stage holds {held} tokens of it: the ranks are out of step."
    )
