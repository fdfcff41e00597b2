"""Keeps the key-value caches of a stage's sequences, and arranges them for each step.

Rank 0 decides. This module follows its steps. A row that its group does not list any more is kept
until a later step asks for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from serve.core.errors import EngineError
from serve.core.ops import NO_CHECKPOINT, Copy, Save
from serve.core.types import LAST_TOKEN, Step
from serve.rank import checkpoints
from serve.rank.checkpoints import SavedState
from serve.rank.drawing import Drawing
from serve.rank.merged import MergedBatch
from serve.rank.slots import SlotBatch

Batch = MergedBatch | SlotBatch

_PLAIN_CACHES = (KVCache, QuantizedKVCache)
_MANY_GROUPS = 256


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Rows of a step that share a forward pass. rows lists indices into step.rows, and None for a
    row that only pads the batch."""

    rows: tuple[int | None, ...]
    caches: list[Any]

    def tokens(self, step: Step, before: Drawing | None = None) -> mx.array:
        """Returns the tokens (B, L). New rows are padded on the left, others on the right. `before`
        draws the tokens for which the step has LAST_TOKEN."""
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
                # With the row's own first token, padding overflows only if the row does.
                padded.append(tokens + tokens[:1] * num_missing)
        known = mx.array(padded)
        if before is None:
            return known
        drawn = before.of([None if n is None else step.rows[n].sequence for n in self.rows])
        return mx.where(known == LAST_TOKEN, drawn[:, None], known)

    def outputs_of_rows(self, step: Step, output: mx.array) -> dict[int, mx.array]:
        """Divides an output (B, L, ...) among the step's rows: (num_tokens, ...) by index."""
        are_new = self._are_new(step)
        outputs = {}
        for i, n in enumerate(self.rows):
            if n is None:
                continue
            num_tokens = step.rows[n].num_tokens
            outputs[n] = output[i, -num_tokens:] if are_new else output[i, :num_tokens]
        return outputs

    def _are_new(self, step: Step) -> bool:
        """Whether the rows begin with this step. Either all rows do, or none."""
        return all(step.rows[n].position == 0 for n in self.rows if n is not None)

    def own_rows(self, output: mx.array) -> mx.array:
        """Returns the rows of an output (B, ...) that belong to rows of the step."""
        own = [i for i, n in enumerate(self.rows) if n is not None]
        if len(own) == len(self.rows):
            return output
        return output[mx.array(own)]


class GroupCaches:
    """The caches of all sequences of a stage. It decides which rows of a step share a batch (none,
    unless can_batch), and which rows move to do so. make_caches returns the caches of a new row."""

    def __init__(
        self,
        make_caches: Callable[[], list[Any]],
        can_batch: bool = True,
    ) -> None:
        self.make_caches = make_caches
        caches = make_caches()
        is_plain = all(type(cache) in _PLAIN_CACHES for cache in caches)
        self._can_cut = all(checkpoints.can_cut(cache) for cache in caches)
        self._can_batch = can_batch
        self._in_slots = can_batch and is_plain
        self._batches: dict[int, Batch] = {}  # the batches by key
        self._next_key = 0
        self._key_of: dict[int, int] = {}  # the key of each sequence's batch
        self._keys_of_group: dict[int, list[int]] = {}
        self._positions: dict[int, int] = {}  # the number of held tokens by sequence
        # The position of each sequence before the last step with drafts, to which it can be cut.
        self._floors: dict[int, int] = {}
        self._checkpoints: dict[int, SavedState] = {}
        self._moved: set[int] = set()  # keys of batches whose rows were copied

    def arrange(self, step: Step) -> list[ForwardPass]:
        """Arranges the rows of a step, and returns the passes in which they run. Raises EngineError
        if the step does not fit this stage's caches."""
        self._check(step)
        for row in step.rows:
            if self._positions.get(row.sequence, 0) > row.position:
                self.rewind(row.sequence, row.position)
        passes = [self._arranged(step, *assigned) for assigned in self._assigned(step).items()]
        self._note_fed(step)
        return passes

    def copy(self, copy: Copy) -> None:
        """Begins a sequence as a copy. Raises EngineError if this stage holds too few tokens."""
        num_held = self._positions.get(copy.source, 0)
        if num_held < copy.num_tokens:
            raise EngineError(
                f"{copy.num_tokens} tokens of sequence {copy.source} are to be copied, and "
                f"{num_held} are held here: the ranks are out of step.",
                code="out_of_step",
            )
        self._set_apart(copy.sequence, copy.source, copy.num_tokens, copy.checkpoint)

    @property
    def reuse(self) -> str:
        """Which prefixes of a sequence can be copied: "any", or up to "checkpoints" or its end."""
        return "any" if self._can_cut else "checkpoints"

    @property
    def can_rewind(self) -> bool:
        """Whether every row can forget its last tokens, wherever it is."""
        return self._can_cut and (self._in_slots or not self._can_batch)

    def save(self, save: Save) -> list[mx.array]:
        """Makes a checkpoint of a sequence whose rows have run. Returns its arrays, which have to
        be evaluated. Raises EngineError if the sequence is not held here."""
        sequence = save.sequence
        if sequence not in self._key_of:
            raise EngineError(
                f"A checkpoint of sequence {sequence} is to be made, which is not held here: the "
                "ranks are out of step.",
                code="out_of_step",
            )
        states = self._batch_of(sequence).states(sequence)
        arrays = checkpoints.arrays(states)
        num_bytes = sum(array.nbytes for array in arrays)
        checkpoint = SavedState(self._positions[sequence], states, num_bytes)
        self._checkpoints[save.checkpoint] = checkpoint
        return arrays

    def drop(self, sequence: int) -> None:
        """Frees the caches of a sequence, if there are any."""
        self._leave(sequence)
        self._positions.pop(sequence, None)
        self._floors.pop(sequence, None)

    def forget(self, checkpoint: int) -> None:
        """Frees a checkpoint, if it is held."""
        self._checkpoints.pop(checkpoint, None)

    def begin(self, sequence: int, caches: list[Any], num_tokens: int) -> None:
        """Begins a sequence with plain caches that hold its first num_tokens tokens."""
        batch = self._new_batch()
        batch.add([(sequence, caches, num_tokens)])
        self._key_of[sequence] = self._add_batch(batch)
        self._positions[sequence] = num_tokens

    @property
    def positions(self) -> dict[int, int]:
        """The number of tokens in the caches of each sequence."""
        return dict(self._positions)

    def keep_only(self, positions: Mapping[int, int]) -> None:
        """Keeps the first tokens of these sequences, as many as positions says, and nothing else.
        Raises EngineError if fewer are held, or if a sequence cannot be cut that far. Each sequence
        gets its own batch: when a ring is lost, ranks may have run different steps, and later steps
        need the same rows in the same order on all ranks."""
        for sequence in self._positions.keys() - positions.keys():
            self.drop(sequence)
        for sequence, num_tokens in sorted(positions.items()):
            held = self._positions.get(sequence, 0)
            if held < num_tokens:
                raise EngineError(
                    f"Sequence {sequence} is to go on at {num_tokens} tokens, and {held} are held.",
                    code="out_of_step",
                )
            self._set_apart(sequence, sequence, num_tokens)
        self._floors.clear()
        self._keys_of_group.clear()
        self._checkpoints.clear()

    def rewind(self, sequence: int, num_tokens: int) -> None:
        """Cuts a sequence to num_tokens, for a draft model; steps do this by their positions."""
        surplus = self._positions[sequence] - num_tokens
        self._batch_of(sequence).rewind(sequence, surplus)
        self._positions[sequence] = num_tokens

    def extracted(self, sequence: int, num_tokens: int) -> list[Any]:
        """Returns plain caches with the first num_tokens tokens of a sequence, lazily. The caches
        may contain later tokens, too. Raises EngineError if fewer are held."""
        self._check_held(sequence, num_tokens)
        # A row that runs stays in its batch: removing and adding it would copy all rows.
        return self._batch_of(sequence).extract(sequence, num_tokens)

    def states_at(self, sequence: int, num_tokens: int, checkpoint: int) -> list[Any]:
        """Returns the states (`rank.checkpoints`) of a sequence after its first num_tokens tokens,
        lazily: a checkpoint's states, or the current states if the sequence has no more tokens.
        Raises EngineError if they are not held."""
        self._check_held(sequence, num_tokens)
        if checkpoint != NO_CHECKPOINT:
            return self._states(checkpoint, num_tokens, 0)
        if self._positions[sequence] > num_tokens:
            raise self._not_held(sequence, num_tokens)
        return self._batch_of(sequence).states(sequence)

    def moved(self) -> list[list[mx.array]]:
        """Returns each layer's arrays whose rows were copied. Evaluate the arrays before the
        forward pass: a lazy copy keeps MLX from writing in place. Evaluate one layer after the
        other, so that only one holds old and new arrays at a time."""
        keys = sorted(self._moved & self._batches.keys())
        self._moved.clear()
        batches = [self._batches[key].caches for key in keys]
        return [_arrays([list(layer)]) for layer in zip(*batches, strict=True)]

    def states(self, step: Step) -> list[mx.array]:
        """Returns the arrays that have to be evaluated after a step. Offsets are among them: the
        graph of an offset that is never evaluated would grow with each token."""
        keys = {self._key_of[row.sequence] for row in step.rows}
        caches = [self._batches[key].caches for key in sorted(keys)]
        return _arrays(caches)

    @property
    def num_bytes(self) -> int:
        """The bytes of all keys, values and checkpoints. This is safe to read from any thread."""
        num_bytes = sum(checkpoint.num_bytes for checkpoint in list(self._checkpoints.values()))
        for batch in list(self._batches.values()):
            for cache in list(batch.caches):
                if not cache.empty():
                    num_bytes += cache.nbytes
        return num_bytes

    def _check_held(self, sequence: int, num_tokens: int) -> None:
        if self._positions.get(sequence, 0) < num_tokens:
            raise self._not_held(sequence, num_tokens)

    def _not_held(self, sequence: int, num_tokens: int) -> EngineError:
        return EngineError(
            f"{num_tokens} tokens of sequence {sequence} are to be written, and "
            f"{self._positions.get(sequence, 0)} are held here.",
            code="out_of_step",
        )

    # --- decisions

    def _check(self, step: Step) -> None:
        """Raises EngineError if the rows of a step do not fit this stage's caches."""
        lengths = {row.num_tokens for row in step.rows}
        continues_any = any(row.position for row in step.rows)
        # Rows with different numbers of drafts have to be in slots, or run one by one.
        can_differ = step.sample and (self._in_slots or not self._can_batch)
        if len(lengths) > 1 and continues_any and not can_differ:
            raise EngineError(
                f"Step {step.number} has rows of different lengths {sorted(lengths)}."
            )
        for row in step.rows:
            held = self._positions.get(row.sequence, 0)
            floor = self._floors.get(row.sequence, held)
            if not floor <= row.position <= held:
                raise EngineError(
                    f"Step {step.number} feeds sequence {row.sequence} at position {row.position}, "
                    f"this stage holds {held} tokens of it: the ranks are out of step.",
                    code="out_of_step",
                )

    def _assigned(self, step: Step) -> dict[int, list[int]]:
        """Divides the rows of a step among batches. Returns their indices by the batch's key. New
        rows do not join old ones: for some models, an empty state differs from zeros."""
        if not step.rows:
            return {}
        new: list[int] = []
        old: list[int] = []
        for n, row in enumerate(step.rows):
            if row.sequence in self._key_of:
                old.append(n)
            else:
                new.append(n)
        rows_of: dict[int, list[int]] = {}
        for rows in self._divided(step, new):
            begun = [step.rows[n] for n in rows]
            lengths = {row.sequence: row.num_tokens for row in begun}
            rows_of[self._begun(lengths)] = rows
        if not old:
            self._forget_groups()
            self._keys_of_group[step.group] = list(rows_of)[:1]
        elif self._can_batch:
            self._gather(step, old, rows_of)
        else:
            for n in old:
                key = self._key_of[step.rows[n].sequence]
                rows_of[key] = [n]
        return rows_of

    def _divided(self, step: Step, new: list[int]) -> list[list[int]]:
        lengths = {step.rows[n].num_tokens for n in new}
        can_begin_together = self._in_slots or (self._can_batch and len(lengths) == 1)
        if new and can_begin_together:
            return [new]
        return [[n] for n in new]

    def _forget_groups(self) -> None:
        """Forgets groups without a batch when there are many: each prompt begins in a new group."""
        if len(self._keys_of_group) <= _MANY_GROUPS:
            return
        for group, keys in list(self._keys_of_group.items()):
            live = [key for key in keys if key in self._batches]
            if live:
                self._keys_of_group[group] = live
            else:
                del self._keys_of_group[group]

    def _gather(self, step: Step, rows: list[int], rows_of: dict[int, list[int]]) -> None:
        """Gathers a group's rows: rows of its last step stay, others join where there is room."""
        known_keys = self._keys_of_group.get(step.group, [])
        keys = [key for key in known_keys if key in self._batches]
        index_of = {step.rows[n].sequence: n for n in rows}
        for key in list(keys):
            batch = self._batches[key]
            staying = batch.staying(index_of)
            batch.keep(staying)
            if key != keys[0]:
                # A row that was too long to share the first batch may fit into it by now.
                first = self._batches[keys[0]]
                staying = [s for s in staying if not first.has_room(self._positions[s])]
            if staying:
                rows_of[key] = [index_of.pop(sequence) for sequence in staying]
                continue
            for sequence in list(batch.sequences):
                self._park(sequence)
            keys.remove(key)
        for sequence, n in index_of.items():
            key = self._join(sequence, keys)
            rows_of.setdefault(key, []).append(n)
        self._keys_of_group[step.group] = keys

    def _join(self, sequence: int, keys: list[int]) -> int:
        """Moves a sequence to the first batch with room, or to a new one. Returns its key."""
        length = self._positions[sequence]
        caches = self._batch_of(sequence).extract(sequence, length)
        self._leave(sequence)
        with_room = [key for key in keys if self._batches[key].has_room(length)]
        if with_room:
            key = with_room[0]
            for idle in self._batches[key].in_the_way():
                self._park(idle)
        else:
            key = self._add_batch(self._new_batch())
            keys.append(key)
        self._batches[key].add([(sequence, caches, length)])
        self._key_of[sequence] = key
        self._moved.add(key)
        return key

    def _arranged(self, step: Step, key: int, rows: list[int]) -> ForwardPass:
        batch = self._batches[key]
        index_of = {step.rows[n].sequence: n for n in rows}
        feeds = {step.rows[n].sequence: step.rows[n].num_tokens for n in rows}
        for idle in batch.to_park(list(feeds), max(feeds.values())):
            self._park(idle)
        order = batch.arrange(feeds)
        if batch.has_grown:
            self._moved.add(key)
        indices = [None if sequence is None else index_of[sequence] for sequence in order]
        return ForwardPass(tuple(indices), batch.caches)

    def _note_fed(self, step: Step) -> None:
        for row in step.rows:
            self._positions[row.sequence] = row.position + row.num_tokens
            if step.sample and row.num_tokens > 1:
                self._floors[row.sequence] = row.position
            else:
                self._floors.pop(row.sequence, None)

    # --- moves

    def _begun(self, lengths: dict[int, int]) -> int:
        """Makes a batch of new rows, and returns its key. lengths lists the number of tokens that
        each row is about to be fed."""
        if self._in_slots and len(lengths) > 1:
            batch: Batch = SlotBatch.of_new(lengths, self.make_caches())
        else:
            batch = self._new_batch()
            batch.add([(sequence, self.make_caches(), 0) for sequence in lengths])
        key = self._add_batch(batch)
        for sequence in lengths:
            self._key_of[sequence] = key
        return key

    def _park(self, sequence: int) -> None:
        """Moves a sequence to a batch of its own."""
        self._set_apart(sequence, sequence, self._positions[sequence])

    def _set_apart(
        self, sequence: int, source: int, length: int, checkpoint: int = NO_CHECKPOINT
    ) -> None:
        """Gives a sequence its own batch, with a copy of source's first tokens, and with a
        checkpoint's state, if there is one."""
        caches = self._batch_of(source).extract(source, length)
        num_surplus = self._positions[source] - length
        if self._in_slots:
            for cache in caches:
                cache.keys = tree_map(mx.contiguous, cache.keys)
                cache.values = tree_map(mx.contiguous, cache.values)
        elif num_surplus or checkpoint != NO_CHECKPOINT:
            states = self._states(checkpoint, length, len(caches))
            pairs = zip(caches, states, strict=True)
            caches = [checkpoints.restored(cache, state, num_surplus) for cache, state in pairs]
        self._leave(sequence)
        self.begin(sequence, caches, length)
        self._moved.add(self._key_of[sequence])

    def _states(self, checkpoint: int, length: int, num_caches: int) -> list[Any]:
        """Returns a checkpoint's states. If there is none, all caches must allow cuts."""
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
        key = self._key_of.pop(sequence, None)
        if key is None:
            return
        batch = self._batches[key]
        batch.remove(sequence)
        if not batch.sequences:
            del self._batches[key]

    def _batch_of(self, sequence: int) -> Batch:
        return self._batches[self._key_of[sequence]]

    def _add_batch(self, batch: Batch) -> int:
        key = self._next_key
        self._batches[key] = batch
        self._next_key += 1
        return key

    def _new_batch(self) -> Batch:
        return SlotBatch() if self._in_slots else MergedBatch()


def _arrays(caches_of_batches: list[list[Any]]) -> list[mx.array]:
    """Returns the arrays in the states of several batches' caches."""
    states = [[cache.state for cache in caches] for caches in caches_of_batches]
    entries = tree_flatten(states)
    return [entry[1] for entry in entries if isinstance(entry[1], mx.array)]
