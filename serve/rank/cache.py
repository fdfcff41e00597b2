"""Keeps the key-value caches of a stage's sequences, and arranges them for each step.

Rank 0 decides. This module does what a step says. A row that its group no longer lists is kept
until a later step asks for it.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    can_trim_prompt_cache,
    trim_prompt_cache,
)

from serve.core.errors import EngineError
from serve.core.types import NO_CHECKPOINT, Step, Write
from serve.rank import checkpoints, placement
from serve.rank.checkpoints import Checkpoint
from serve.rank.placement import Batch, Joining, Layout, Rules
from serve.rank.prefixes import contents
from serve.rank.prefixes.contents import FileContent
from serve.rank.slots import SlotBatch

_PLAIN_CACHES = (KVCache, QuantizedKVCache)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step that run in one forward. rows has indices into step.rows, and None for a row
    that only pads the batch."""

    rows: tuple[int | None, ...]
    caches: list[Any]

    def tokens(self, step: Step) -> mx.array:
        """Returns the tokens (B, L) of these rows. New rows are padded on the left, others on the
        right."""
        tokens_fed = step.tokens_fed
        own = [() if n is None else tokens_fed[n] for n in self.rows]
        length = max(map(len, own))
        are_new = self._are_new(step)
        padded = []
        for tokens in own:
            num_missing = length - len(tokens)
            if are_new or not tokens:
                padded.append((0,) * num_missing + tokens)
            else:
                # With a token of its own, a row's padding overflows only where the row does.
                padded.append(tokens + tokens[:1] * num_missing)
        return mx.array(padded)

    def outputs_of_rows(self, step: Step, output: mx.array) -> dict[int, mx.array]:
        """Divides an output (B, L, ...) among the rows of the step, by their indices: each gets
        (num_tokens, ...), without padding."""
        are_new = self._are_new(step)
        outputs = {}
        for i, n in enumerate(self.rows):
            if n is None:
                continue
            num_tokens = step.rows[n].num_tokens
            outputs[n] = output[i, -num_tokens:] if are_new else output[i, :num_tokens]
        return outputs

    def _are_new(self, step: Step) -> bool:
        """Whether the rows begin with this step, which they do together or not at all."""
        return all(step.rows[n].position == 0 for n in self.rows if n is not None)

    def own_rows(self, output: mx.array) -> mx.array:
        """Returns the rows of an output (B, ...) that belong to rows of the step."""
        own = [i for i, n in enumerate(self.rows) if n is not None]
        if len(own) == len(self.rows):
            return output
        return output[mx.array(own)]


class GroupCaches:
    """The caches of all sequences of a stage. It performs the moves of `rank.placement`.

    make_cache returns the plain caches of one new row. can_batch says whether several rows can
    share a batch; otherwise each row runs in a part of its own. numbers has the numbers of these
    caches in files of the prefix cache, which are those of the whole model.
    """

    def __init__(
        self,
        make_cache: Callable[[], list[Any]],
        can_batch: bool = True,
        numbers: contents.Numbers | None = None,
    ) -> None:
        self._make_cache = make_cache
        caches = make_cache()
        self._numbers = range(len(caches)) if numbers is None else numbers
        is_plain = all(type(cache) in _PLAIN_CACHES for cache in caches)
        self._can_cut = all(checkpoints.can_cut(cache) for cache in caches)
        self._rules = Rules(can_batch, in_slots=can_batch and is_plain)
        self._checkpoints: dict[int, Checkpoint] = {}
        self._layout = Layout()
        self._lifted: list[Any] = []
        self._moved: set[int] = set()  # keys of batches whose rows were copied

    def apply(self, step: Step) -> list[Part]:
        """Arranges the caches as a step says, and returns the parts in which its rows run. Raises
        EngineError if the step does not fit what this stage holds."""
        parts = []
        for move in placement.moves(step, self._layout, self._rules):
            if isinstance(move, placement.Run):
                parts.append(self._arranged(step, move))
            else:
                self._perform(move)
        for checkpoint in step.forget:
            self._checkpoints.pop(checkpoint, None)
        self._layout.note_fed(step)
        return parts

    @property
    def reuse(self) -> str:
        """Whether a sequence can begin as "any" part of another one, or only where there are
        "checkpoints", and as all of it."""
        return "any" if self._can_cut else "checkpoints"

    @property
    def can_rewind(self) -> bool:
        """Whether every row can forget its last tokens, wherever it is."""
        return self._can_cut and (self._rules.in_slots or not self._rules.can_batch)

    def save(self, step: Step) -> list[mx.array]:
        """Makes the checkpoints of a step whose rows have run. Returns their arrays, which have to
        be evaluated. Raises EngineError if a sequence is not held here."""
        saved: list[mx.array] = []
        for save in step.save:
            sequence = save.sequence
            if sequence not in self._layout.key_of:
                raise EngineError(f"Step {step.number} saves sequence {sequence}, not held here.")
            states = self._layout.batch_of(sequence).states(sequence)
            num_tokens = self._layout.positions[sequence]
            arrays = checkpoints.arrays(states)
            num_bytes = sum(array.nbytes for array in arrays)
            self._checkpoints[save.checkpoint] = Checkpoint(num_tokens, states, num_bytes)
            saved += arrays
        return saved

    def begin(self, sequence: int, caches: list[Any], num_tokens: int) -> None:
        """Begins a sequence with plain caches that hold its first num_tokens tokens."""
        self._place(sequence, caches, num_tokens)
        self._layout.positions[sequence] = num_tokens

    @property
    def positions(self) -> dict[int, int]:
        """The number of tokens that are held of each sequence."""
        return dict(self._layout.positions)

    def keep_only(self, positions: Mapping[int, int]) -> None:
        """Keeps the first tokens of these sequences, as many as positions says, and nothing else.
        Raises EngineError if fewer are held, or if a sequence cannot go back that far.

        Each sequence gets a batch of its own. When a ring is lost, some ranks have run steps that
        others have not, so their batches may differ. But in later steps each part needs the same
        rows in the same order on all ranks.
        """
        layout = self._layout
        for sequence in layout.positions.keys() - positions.keys():
            self._perform(placement.Drop(sequence))
        for sequence, num_tokens in sorted(positions.items()):
            held = layout.positions.get(sequence, 0)
            if held < num_tokens:
                raise EngineError(
                    f"Sequence {sequence} is to go on at {num_tokens} tokens, and {held} are held."
                )
            self._set_apart(sequence, sequence, num_tokens)
            layout.positions[sequence] = num_tokens
        layout.floors.clear()
        layout.keys_of_group.clear()
        self._checkpoints.clear()

    def rewind(self, sequence: int, num_tokens: int) -> None:
        """Makes a sequence forget all but its first num_tokens tokens. Steps do this through their
        positions; a draft model, which nothing has to keep in step, calls it."""
        self._perform(placement.Rewind(sequence, num_tokens))

    def content(self, write: Write) -> FileContent:
        """Returns the content of a file of the prefix cache. Its arrays have to be evaluated.
        Raises EngineError if its tokens or its checkpoint are not held here."""
        sequence = write.sequence
        has_checkpoint = write.checkpoint != NO_CHECKPOINT
        num_held = self._layout.positions.get(sequence, 0)
        # The state of a sequence itself is that behind all its tokens.
        is_behind = write.is_state and not has_checkpoint and num_held > write.end
        if num_held < write.end or is_behind:
            raise EngineError(
                f"{write.end} tokens of sequence {sequence} are to be written, and {num_held} are "
                "held here."
            )
        if write.is_state and has_checkpoint:
            states = self._states(write.checkpoint, write.end, 0)
            return contents.state(states, self._numbers, write.end)
        batch = self._layout.batch_of(sequence)
        if write.is_state:
            return contents.state(batch.states(sequence), self._numbers, write.end)
        # A row that runs stays in its batch: to take it out and back in would copy all rows.
        caches = batch.extract(sequence, write.end)
        return contents.segment(caches, self._numbers, write.start, write.end)

    def moved(self) -> list[list[mx.array]]:
        """Returns the arrays of each layer's caches whose rows were copied. They have to be
        evaluated before the forward: while a copy is lazy, MLX cannot write to the buffers in
        place. If one layer is evaluated after the other, only one of them has its old and its new
        arrays at a time."""
        keys = sorted(self._moved & self._layout.batches.keys())
        self._moved.clear()
        batches = [self._layout.batches[key].caches for key in keys]
        return [_arrays([list(layer)]) for layer in zip(*batches, strict=True)]

    def states(self, step: Step) -> list[mx.array]:
        """Returns the arrays that have to be evaluated after a step. Offsets are among them: the
        graph of an offset that is never evaluated would grow with each token."""
        keys = {self._layout.key_of[row.sequence] for row in step.rows}
        caches = [self._layout.batches[key].caches for key in sorted(keys)]
        return _arrays(caches)

    @property
    def num_bytes(self) -> int:
        """The bytes of all keys, values and checkpoints. It is safe to read from any thread."""
        num_bytes = sum(checkpoint.num_bytes for checkpoint in list(self._checkpoints.values()))
        for batch in list(self._layout.batches.values()):
            for cache in list(batch.caches):
                if not cache.empty():
                    num_bytes += cache.nbytes
        return num_bytes

    # --- moves

    def _perform(self, move: placement.CacheMove) -> None:
        layout = self._layout
        match move:
            case placement.Copy(sequence, source, num_tokens, checkpoint):
                self._set_apart(sequence, source, num_tokens, checkpoint)
                layout.positions[sequence] = num_tokens
            case placement.Drop(sequence):
                self._leave(sequence)
                layout.positions.pop(sequence, None)
                layout.floors.pop(sequence, None)
            case placement.Rewind(sequence, num_tokens):
                surplus = layout.positions[sequence] - num_tokens
                layout.batch_of(sequence).rewind(sequence, surplus)
                layout.positions[sequence] = num_tokens
            case placement.Begin(key, lengths):
                self._begin(key, lengths)
            case placement.Keep(key, sequences):
                layout.batches[key].keep(sequences)
            case placement.Park(sequence):
                self._set_apart(sequence, sequence, layout.positions[sequence])
            case placement.Lift(sequence):
                length = layout.positions[sequence]
                self._lifted = layout.batch_of(sequence).extract(sequence, length)
                self._leave(sequence)
            case placement.Join(sequence, key):
                if key not in layout.batches:
                    self._add_batch(key, self._new_batch())
                row = sequence, self._lifted, layout.positions[sequence]
                layout.batches[key].add([row])
                layout.key_of[sequence] = key
                self._lifted = []
                self._moved.add(key)
            case placement.Own(group, keys):
                layout.keys_of_group[group] = keys
            case placement.ForgetGroups():
                layout.forget_groups()

    def _arranged(self, step: Step, run: placement.Run) -> Part:
        """Arranges a batch for its rows of a step."""
        batch = self._layout.batches[run.key]
        index_of = {step.rows[n].sequence: n for n in run.rows}
        feeds = {step.rows[n].sequence: step.rows[n].num_tokens for n in run.rows}
        order = batch.arrange(feeds)
        if batch.has_grown:
            self._moved.add(run.key)
        indices = [None if sequence is None else index_of[sequence] for sequence in order]
        return Part(tuple(indices), batch.caches)

    def _begin(self, key: int, lengths: Mapping[int, int]) -> None:
        """Makes a batch of new rows. lengths has the number of tokens that each is about to be
        fed."""
        if self._rules.in_slots and len(lengths) > 1:
            batch: Batch = SlotBatch.of_new(dict(lengths), self._make_cache())
        else:
            batch = self._new_batch()
            batch.add([(sequence, self._make_cache(), 0) for sequence in lengths])
        self._add_batch(key, batch)
        for sequence in lengths:
            self._layout.key_of[sequence] = key

    def _set_apart(
        self, sequence: int, source: int, length: int, checkpoint: int = NO_CHECKPOINT
    ) -> None:
        """Gives a sequence a batch of its own, with a copy of the first tokens of source."""
        layout = self._layout
        caches = layout.batch_of(source).extract(source, length)
        num_surplus = layout.positions[source] - length
        if self._rules.in_slots:
            for cache in caches:
                cache.keys = tree_map(mx.contiguous, cache.keys)
                cache.values = tree_map(mx.contiguous, cache.values)
        elif num_surplus or checkpoint != NO_CHECKPOINT:
            states = self._states(checkpoint, length, len(caches))
            pairs = zip(caches, states, strict=True)
            caches = [checkpoints.restored(cache, state, num_surplus) for cache, state in pairs]
        self._leave(sequence)
        self._place(sequence, caches, length)
        self._moved.add(layout.key_of[sequence])

    def _place(self, sequence: int, caches: list[Any], length: int) -> None:
        """Puts a sequence with plain caches into a new batch."""
        layout = self._layout
        batch = self._new_batch()
        batch.add([(sequence, caches, length)])
        layout.key_of[sequence] = layout.next_key
        self._add_batch(layout.next_key, batch)

    def _states(self, checkpoint: int, length: int, num_caches: int) -> list[Any]:
        """Returns the states of a checkpoint. Without a checkpoint, all caches have to be ones that
        can be cut."""
        if checkpoint == NO_CHECKPOINT and self._can_cut:
            return [None] * num_caches
        found = self._checkpoints.get(checkpoint)
        if found is None or found.num_tokens != length:
            raise EngineError(
                f"No checkpoint {checkpoint} of {length} tokens is held: the ranks are out of step."
            )
        return found.states

    def _leave(self, sequence: int) -> None:
        """Removes a sequence from its batch, and the batch if it is then empty."""
        key = self._layout.key_of.pop(sequence, None)
        if key is None:
            return
        batch = self._layout.batches[key]
        batch.remove(sequence)
        if not batch.sequences:
            del self._layout.batches[key]

    def _add_batch(self, key: int, batch: Batch) -> None:
        self._layout.batches[key] = batch
        self._layout.next_key = max(self._layout.next_key, key + 1)

    def _new_batch(self) -> Batch:
        if self._rules.in_slots:
            return SlotBatch()
        return MergedBatch()


class MergedBatch:
    """A Batch that works with all of mlx-lm's caches. A lone row has plain caches, several rows
    have batch caches. When a row joins or leaves, the whole batch is copied, so a row always has
    room, and never waits in the batch.
    """

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.caches: list[Any] = []
        self.has_grown = False  # Buffers grow when rows join, not for a forward.
        self._batched = False

    def staying(self, sequences: Collection[int]) -> list[int]:
        return [sequence for sequence in self.sequences if sequence in sequences]

    def keep(self, sequences: list[int]) -> None:
        """Does nothing: rows that are not fed leave, as `to_park` says."""

    def has_room(self, _: int) -> bool:
        return True

    def in_the_way(self) -> list[int]:
        return []

    def to_park(self, sequences: list[int], _: int) -> list[int]:
        return [sequence for sequence in self.sequences if sequence not in sequences]

    def add(self, rows: list[Joining]) -> None:
        joining = [caches for _, caches, _ in rows]
        if not self.sequences and len(joining) == 1:
            self.caches = joining[0]
        elif self._batched:
            for cache, added in zip(self.caches, _merge(joining), strict=True):
                cache.extend(added)
        else:
            parts = joining
            if self.sequences:
                parts = [self.caches, *joining]
            self.caches = _merge(parts)
            self._batched = True
        added_sequences = [sequence for sequence, _, _ in rows]
        self.sequences = self.sequences + added_sequences

    def remove(self, sequence: int) -> None:
        self._select([other for other in self.sequences if other != sequence])

    def rewind(self, sequence: int, num_tokens: int) -> None:
        if self._batched:
            raise EngineError(f"Sequence {sequence} cannot go back in a batch with such caches.")
        _trim(self.caches, num_tokens)

    def extract(self, sequence: int, _: int) -> list[Any]:
        """Returns plain caches with all tokens of a row: not every cache can be cut shorter."""
        if not self._batched:
            return [copy.deepcopy(cache) for cache in self.caches]
        index = self.sequences.index(sequence)
        return [cache.extract(index) for cache in self.caches]

    def states(self, sequence: int) -> list[Any]:
        row = self.sequences.index(sequence) if self._batched else None
        return [checkpoints.state_of(cache, row) for cache in self.caches]

    def arrange(self, feeds: Mapping[int, int]) -> list[int | None]:
        sequences = list(feeds)
        self._select(sequences)
        return list(sequences)

    def _select(self, sequences: list[int]) -> None:
        """Keeps only the rows of these sequences, in this order."""
        if sequences != self.sequences:
            if self._batched and sequences:
                keep = mx.array([self.sequences.index(sequence) for sequence in sequences])
                for cache in self.caches:
                    cache.filter(keep)
            self.sequences = sequences


def _trim(caches: list[Any], num_tokens: int) -> None:
    if not can_trim_prompt_cache(caches):
        raise EngineError("A sequence with such caches cannot go back.")
    trim_prompt_cache(caches, num_tokens)


def _merge(parts: list[list[Any]]) -> list[Any]:
    """Merges the plain caches of several rows, layer by layer."""
    merged: list[Any] = []
    for caches in zip(*parts, strict=True):
        cache_class = type(caches[0])
        merged.append(cache_class.merge(caches))
    return merged


def _arrays(caches_of_batches: list[list[Any]]) -> list[mx.array]:
    """Returns the arrays in the states of several batches' caches."""
    states = [[cache.state for cache in caches] for caches in caches_of_batches]
    entries = tree_flatten(states)
    return [entry[1] for entry in entries if isinstance(entry[1], mx.array)]
