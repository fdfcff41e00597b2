"""Keys and values of several rows, stored in slots of one buffer for each layer.

mlx-lm's batch cache copies the whole batch when a row joins or leaves. Here a row is written into a
slot of its own, and a row that leaves stays where it is until its slot is needed. Rows end in the
same column; the columns before a row's start are padding.

    slot 0   . . . a a a a a |          end = 8, starts: a 3, c 0
    slot 1   - - - - - - - - |          free: fed with a token that is not used
    slot 2   c c c c c c c c |

After a step that fed drafts, rows may end in different columns, because each keeps as many drafts
as were right. Such rows are written and masked by their own ends, which costs a little more. Wrong
drafts leave columns after a row's end, and its next tokens overwrite or clear them. When no drafts
have come for some steps, rows are moved to end in one column again.

The columns before and after a row are always finite numbers. Attention gives them the weight 0, but
0 times a value that is not finite is not 0: nothing that overflowed may be left there.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from serve.rank.speeds import on_gpu

_ROUND_TOKENS = 256
_GROWTH = 1.25
_SMALL_TOKENS = 512
_MAX_WASTE = 1.5
_STEPS_UNTIL_ALIGNED = 8
_CLASSES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_ALL = slice(None)

Joining = tuple[int, list[Any], int]
"""A row that joins a batch: its sequence, its plain caches, and how many tokens these hold."""

# Keys, or values: (B, heads, columns, D), or three such arrays if quantised.
Buffer = Any


def _cut(held: Buffer, rows: slice, columns: slice) -> Buffer:
    # tree_map would be too slow: this runs several times in each layer of each step.
    if isinstance(held, tuple):
        return tuple(array[rows, :, columns] for array in held)
    return held[rows, :, columns]


def _put(held: Buffer, rows: slice, columns: slice, new: Buffer) -> None:
    if isinstance(held, tuple):
        for array, values in zip(held, new, strict=True):
            array[rows, :, columns] = values
    else:
        held[rows, :, columns] = new


def _put_at(held: Buffer, columns: mx.array, new: Buffer) -> None:
    """Writes new (B, heads, L, D) to the first B rows of a buffer, at columns (B, L)."""
    num_rows = columns.shape[0]
    rows = mx.arange(num_rows)[:, None]
    buffers = held if isinstance(held, tuple) else (held,)
    arrays = new if isinstance(new, tuple) else (new,)
    for buffer, array in zip(buffers, arrays, strict=True):
        by_column = array.transpose(0, 2, 1, 3)
        buffer[rows, :, columns] = by_column


def _with_zeros(array: mx.array, num_columns: int) -> mx.array:
    if not num_columns:
        return array
    return mx.pad(array, [(0, 0), (0, 0), (0, num_columns), (0, 0)])


def _clear(held: Buffer, rows: slice, columns: slice) -> None:
    for array in held if isinstance(held, tuple) else (held,):
        array[rows, :, columns] = 0


def _size(held: Buffer) -> tuple[int, int]:
    """Returns the numbers of rows and columns, which are 0 before the first write."""
    if held is None:
        return 0, 0
    array = held[0] if isinstance(held, tuple) else held
    rows, _, columns, _ = array.shape
    return rows, columns


def num_slots(num_rows: int) -> int:
    """Returns the slots for this many rows, in steps, so that few joins need larger buffers."""
    for size in _CLASSES:
        if size >= num_rows:
            return size
    return -(-num_rows // 64) * 64


def _num_rows(sequences: list[int], num_tokens: int) -> int:
    """Returns the number of rows to feed: on a CPU a multiple of four where that costs less."""
    num_rows = len(sequences)
    if num_rows <= 2 or num_tokens > 1 or on_gpu():
        return num_rows
    return -(-num_rows // 4) * 4


class SlotCache(BatchKVCache):
    """One layer's buffers, (slots, heads, columns, D). The batch is their first rows. SlotBatch
    keeps the places of the rows, and sets offset and left_padding, each (B,), before each pass."""

    keys: Buffer  # None until keys are written
    values: Buffer

    def __init__(self, rows: int) -> None:
        super().__init__([0] * rows)
        self.feeds_padding = False  # whether the next pass feeds some rows padding
        self.ends: mx.array | None = None  # the rows' ends (B,), if these differ
        self.num_cleared = 0  # the columns to clear after those that the next pass writes
        self.clears_behind = False  # whether rows may be read further than they are written

    @staticmethod
    def like(plain: Any, rows: int) -> "SlotCache":
        """Makes empty caches with this many rows, of the same kind as a plain cache."""
        if isinstance(plain, QuantizedKVCache):
            return QuantizedSlotCache(rows, plain.group_size, plain.bits)
        return SlotCache(rows)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Buffer, Buffer]:
        num_rows, _, length, _ = keys.shape
        end = self._idx + length
        if self.ends is not None:
            return self._update_at_ends(self.ends, keys, values)
        fed = slice(self._idx, end)
        if self.feeds_padding:
            starts = self.left_padding[:, None]
            own = mx.arange(self._idx, end) >= starts
            own = own[:, None, :, None]
            keys = mx.where(own, keys, 0)
            values = mx.where(own, values, 0)
        kept_keys = self._kept(keys)
        kept_values = self._kept(values)
        self._write(slice(num_rows), fed, kept_keys, kept_values)
        return self._advanced(num_rows, length)

    def _advanced(self, num_rows: int, length: int) -> tuple[Buffer, Buffer]:
        """Counts length more columns for the first rows, and returns all of these rows' columns."""
        self.offset = self.offset + length
        self._idx += length
        rows = slice(num_rows)
        columns = slice(self._idx)
        return _cut(self.keys, rows, columns), _cut(self.values, rows, columns)

    def _update_at_ends(
        self, ends: mx.array, keys: mx.array, values: mx.array
    ) -> tuple[Buffer, Buffer]:
        """Writes each row after its own end, and clears the columns after that."""
        num_rows, _, length, _ = keys.shape
        num_written = length + self.num_cleared
        kept_keys = self._kept(_with_zeros(keys, self.num_cleared))
        kept_values = self._kept(_with_zeros(values, self.num_cleared))
        self.reserve(num_rows, self._idx + num_written, kept_keys, kept_values)
        columns = ends[:, None] + mx.arange(num_written)
        _put_at(self.keys, columns, kept_keys)
        _put_at(self.values, columns, kept_values)
        return self._advanced(num_rows, length)

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Any:  # noqa: N803
        """Returns the mask (B, 1, N, columns) of the next N tokens."""
        if self.ends is None:
            return super().make_mask(N, return_array, **kwargs)
        own = self.ends[:, None] + mx.arange(N)
        own = own[:, None, :, None]
        starts = self.left_padding[:, None, None, None]
        columns = mx.arange(self._idx + N)
        mask = (columns <= own) & (starts <= columns)
        window_size = kwargs.get("window_size")
        if window_size is not None:
            mask = mask & (own < columns + window_size)
        return mask

    def lone(self) -> Any:
        return KVCache()

    def _kept(self, new: mx.array) -> Buffer:
        return new

    def _write(self, rows: slice, columns: slice, keys: Buffer, values: Buffer) -> None:
        self.reserve(rows.stop, columns.stop, keys, values)
        _put(self.keys, rows, columns, keys)
        _put(self.values, rows, columns, values)

    @property  # type: ignore[misc]
    def state(self) -> Any:
        """The arrays to evaluate after a forward pass, without offsets, which are set before each
        pass."""
        return self.keys, self.values

    def reserve(self, rows: int, columns: int, keys: Buffer, values: Buffer) -> None:
        """Makes room for these rows and columns, and for more: growing copies everything."""
        held_rows, held = _size(self.keys)
        if rows <= held_rows and columns <= held:
            return
        rows = max(num_slots(rows), held_rows)
        if columns > held:
            spare = max(int(held * (_GROWTH - 1)), 1)
            wanted = columns + spare
            num_blocks = -(-wanted // _ROUND_TOKENS)
            columns = num_blocks * _ROUND_TOKENS
        self._move_to(rows, max(columns, held), 0, keys, values)

    def grow(self, rows: int, columns: int) -> bool:
        """Makes room for this number of rows and columns, if there are any keys yet. Returns
        whether it has copied the rows for that."""
        held = self.keys
        if held is not None:
            self.reserve(rows, columns, self.keys, self.values)
        return self.keys is not held

    @property
    def num_columns(self) -> int:
        return _size(self.keys)[1]

    def shrink(self, rows: int) -> None:
        """Frees slots when most of them are unused."""
        num_held, _ = _size(self.keys)
        num_kept = num_slots(rows)
        if num_held > 2 * num_kept:
            kept = slice(num_kept)
            self.keys = _cut(self.keys, kept, _ALL)
            self.values = _cut(self.values, kept, _ALL)

    def shift(self, by: int) -> None:
        """Moves all columns to the right, or to the left if `by` is negative."""
        if self.keys is not None:
            rows, columns = _size(self.keys)
            columns = max(self._idx + by, columns)
            self._move_to(rows, columns, by, self.keys, self.values)
        self._idx += by

    def write(self, slot: int, start: int, keys: Buffer, values: Buffer) -> None:
        """Writes a row (1, heads, length, D) to a slot, and clears the columns before it."""
        _, length = _size(keys)
        rows = slice(slot, slot + 1)
        columns = slice(start, start + length)
        self._write(rows, columns, keys, values)
        if start:
            _clear(self.keys, rows, slice(start))
            _clear(self.values, rows, slice(start))
        if self.clears_behind:
            self.clear_behind(slot, columns.stop)

    def clear_behind(self, slot: int, end: int) -> None:
        if end < self.num_columns:
            rows = slice(slot, slot + 1)
            _clear(self.keys, rows, slice(end, None))
            _clear(self.values, rows, slice(end, None))

    def read(self, slot: int, start: int, end: int) -> tuple[Buffer, Buffer]:
        rows = slice(slot, slot + 1)
        columns = slice(start, end)
        return _cut(self.keys, rows, columns), _cut(self.values, rows, columns)

    def _move_to(self, rows: int, columns: int, by: int, keys: Buffer, values: Buffer) -> None:
        held = (self.keys, self.values)
        end = self._idx

        def empty(like: mx.array) -> mx.array:
            _, num_heads, _, size = like.shape
            return mx.zeros((rows, num_heads, columns, size), like.dtype)

        self.keys = tree_map(empty, keys)
        self.values = tree_map(empty, values)
        if held[0] is not None:
            source = slice(max(0, -by), end)
            target = slice(max(0, by), end + by)
            moved = (self.keys, self.values)
            for new, old in zip(moved, held, strict=True):
                held_rows, _ = _size(old)
                kept = _cut(old, _ALL, source)
                _put(new, slice(held_rows), target, kept)


class QuantizedSlotCache(SlotCache):
    """A SlotCache of quantised values, which mlx-lm recognises by `group_size` and `bits`."""

    def __init__(self, rows: int, group_size: int, bits: int) -> None:
        super().__init__(rows)
        self.group_size = group_size
        self.bits = bits

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def lone(self) -> Any:
        return QuantizedKVCache(self.group_size, self.bits)

    def _kept(self, new: mx.array) -> Buffer:
        return tuple(mx.quantize(new, group_size=self.group_size, bits=self.bits))


def _first(plain: Any, length: int) -> tuple[Buffer, Buffer]:
    columns = slice(length)
    return _cut(plain.keys, _ALL, columns), _cut(plain.values, _ALL, columns)


class SlotBatch:
    """Rows that share a forward pass. A row that was always alone has mlx-lm's plain caches."""

    def __init__(self) -> None:
        self.caches: list[Any] = []
        self._slots: list[int | None] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._end = 0  # the largest end of a row
        # By row, the columns after its end that may hold numbers from wrong drafts or padding.
        self._num_stale: dict[int, int] = {}
        self._clears_behind = False
        self._num_steps_without_drafts = 0
        self._fed: list[int] = []
        self.has_grown = False

    @classmethod
    def of_new(cls, lengths: dict[int, int], plain: list[Any]) -> "SlotBatch":
        """Makes a batch of new rows. lengths lists the number of tokens that each of them is about
        to be fed; shorter ones are padded on the left. `plain` are new caches of one row."""
        batch = cls()
        batch._slots = list(lengths)
        longest = max(lengths.values())
        batch._starts = {sequence: longest - length for sequence, length in lengths.items()}
        batch._ends = dict.fromkeys(lengths, 0)
        batch._fed = list(lengths)
        batch.caches = [SlotCache.like(cache, len(lengths)) for cache in plain]
        return batch

    @property
    def sequences(self) -> list[int]:
        return list(self._starts)

    def staying(self, sequences: Collection[int]) -> list[int]:
        """Returns those of these sequences that were in the last forward pass."""
        return [sequence for sequence in self._fed if sequence in sequences]

    def keep(self, sequences: list[int]) -> None:
        """Makes all other rows idle: they keep their slots, but are not fed."""
        self._fed = list(sequences)

    def in_the_way(self) -> list[int]:
        """Returns idle rows to move before another joins: if no slot is free, or most are idle."""
        idle = [s for s in self._starts if s not in self._fed]
        count = len(self._slots)
        is_full = None not in self._slots and count == num_slots(count)
        num_too_many = len(idle) - len(self._fed)
        return idle[: max(int(is_full), num_too_many)]

    def has_room(self, length: int) -> bool:
        """Whether a row of this length may join without wasting much on padding."""
        lengths = [self._ends[s] - self._starts[s] for s in self._fed]
        end = max([length, *lengths])
        needed = sum(lengths) + length
        held = end * (len(lengths) + 1)
        return end <= _SMALL_TOKENS or held <= _MAX_WASTE * needed

    def add(self, rows: list[Joining]) -> None:
        for sequence, caches, length in rows:
            self._add(sequence, caches, length)

    def _add(self, sequence: int, caches: list[Any], length: int) -> None:
        self._fed.append(sequence)
        if not self._slots:
            self.caches = caches
            self._slots = [sequence]
            self._starts = {sequence: 0}
            self._ends = {sequence: length}
            self._end = length
            return
        if not isinstance(self.caches[0], SlotCache):
            self._make_slots()
        others = self._fed[:-1]
        lengths = [self._ends[fed] - self._starts[fed] for fed in others]
        longest = max([length, *lengths])
        self._justify(longest)
        if None in self._slots:
            slot = self._slots.index(None)
        else:
            slot = len(self._slots)
        self._slots[slot : slot + 1] = [sequence]
        start = self._end - length
        self._starts[sequence] = start
        self._ends[sequence] = self._end
        for cache, joining in zip(self.caches, caches, strict=True):
            keys, values = _first(joining, length)
            cache.write(slot, start, keys, values)

    def remove(self, sequence: int) -> None:
        slot = self._slots.index(sequence)
        self._slots[slot] = None
        del self._starts[sequence]
        del self._ends[sequence]
        self._num_stale.pop(sequence, None)
        if sequence in self._fed:
            self._fed.remove(sequence)

    def rewind(self, sequence: int, num_tokens: int) -> None:
        self._ends[sequence] -= num_tokens
        self._end = max(self._ends.values())
        if isinstance(self.caches[0], SlotCache):
            num_stale = self._num_stale.get(sequence, 0)
            self._num_stale[sequence] = num_stale + num_tokens
            return
        for cache in self.caches:
            cache.trim(num_tokens)

    def extract(self, sequence: int, length: int) -> list[Any]:
        """Returns plain caches with the first tokens of a row, not evaluated."""
        slot = self._slots.index(sequence)
        start = self._starts[sequence]
        plain = []
        for cache in self.caches:
            if isinstance(cache, SlotCache):
                row = cache.lone()
                end = start + length
                row.keys, row.values = cache.read(slot, start, end)
            else:
                row = copy.copy(cache)
                row.keys, row.values = _first(cache, length)
            row.offset = length
            plain.append(row)
        return plain

    def states(self, _: int) -> list[Any]:
        """Returns no states: keys and values in slots can be cut."""
        return [None] * len(self.caches)

    def to_park(self, sequences: list[int], num_tokens: int) -> list[int]:
        """Returns the idle rows in the way of a forward pass that feeds these sequences."""
        if not isinstance(self.caches[0], SlotCache):
            return []
        if self._end + num_tokens > self.caches[0].num_columns:
            return [s for s in self._starts if s not in sequences]  # Idle rows need not grow.
        num_rows = _num_rows(sequences, num_tokens)
        first = self._slots[:num_rows]
        num_behind = sum(s not in first for s in sequences)
        num_free = first.count(None)
        idle = [s for s in first if s is not None and s not in sequences]
        num_parked = max(0, num_behind - num_free)
        return idle[:num_parked]

    def arrange(self, feeds: Mapping[int, int]) -> list[int | None]:
        """Makes these the rows of the next pass. Returns them in order; None is padding."""
        sequences = self._fed = list(feeds)
        num_tokens = max(feeds.values())
        self.has_grown = False
        if not isinstance(self.caches[0], SlotCache):
            self._note_fed(feeds)
            return list(sequences)
        num_rows = _num_rows(sequences, num_tokens)
        self._pack(num_rows)
        num_missing = num_rows - len(self._slots)
        self._slots += [None] * num_missing
        self._align_if_no_drafts_come(num_tokens)
        first = self._slots[:num_rows]
        order = [s if s in sequences else None for s in first]
        # A free slot needs one column to attend to: a softmax over no column is not a number.
        unused = max(0, self._end - 1)
        starts = [unused if s is None else self._starts[s] for s in order]
        ends = [self._end if s is None else self._ends[s] for s in order]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        offset = mx.array(lengths)
        padding = mx.array(starts)
        own_ends = None
        num_stale = max(self._num_stale.get(sequence, 0) for sequence in sequences)
        num_cleared = max(0, num_stale - num_tokens)
        if min(ends) < self._end or num_cleared:
            self._clear_behind()
            own_ends = mx.array(ends)
        feeds_padding = any(start > self._end for start in starts)
        for cache in self.caches:
            cache.offset = offset
            cache.left_padding = padding
            cache.feeds_padding = feeds_padding
            cache.ends = own_ends
            cache.num_cleared = num_cleared
            cache._idx = self._end
            self.has_grown |= cache.grow(num_rows, self._end + num_tokens + num_cleared)
        self._note_fed(feeds)
        return order

    def _note_fed(self, feeds: Mapping[int, int]) -> None:
        """Moves the ends of rows. New rows are padded on the left, so they end together."""
        longest = max(feeds.values())
        if self._end == 0:
            feeds = dict.fromkeys(feeds, longest)
        for sequence, num_tokens in feeds.items():
            self._ends[sequence] += num_tokens
            self._num_stale[sequence] = longest - num_tokens
        self._end = max(self._ends.values())

    def _align_if_no_drafts_come(self, num_tokens: int) -> None:
        """Moves rows to end in one column. Moving copies, so it waits for steps without drafts."""
        if num_tokens > 1 or not self._clears_behind:
            self._num_steps_without_drafts = 0
            return
        self._num_steps_without_drafts += 1
        if self._num_steps_without_drafts % _STEPS_UNTIL_ALIGNED:
            return
        for slot, sequence in enumerate(self._slots):
            if sequence is None or sequence not in self._fed:
                continue
            start = self._starts[sequence]
            end = self._ends[sequence]
            by = self._end - end
            if not by:
                continue
            for cache in self.caches:
                keys, values = cache.read(slot, start, end)
                cache.write(slot, start + by, keys, values)
            self._starts[sequence] = start + by
            self._ends[sequence] = self._end

    def _clear_behind(self) -> None:
        """Clears the columns after the rows' ends, once. From then on, rows may have different
        ends, and every row is read up to the largest one."""
        if self._clears_behind:
            return
        self._clears_behind = True
        for cache in self.caches:
            cache.clears_behind = True
            for slot, sequence in enumerate(self._slots):
                if sequence is not None:
                    cache.clear_behind(slot, self._ends[sequence])

    def _pack(self, num_rows: int) -> None:
        """Moves fed rows from slots after the batch into free slots inside it."""
        for source in range(num_rows, len(self._slots)):
            sequence = self._slots[source]
            if sequence is None or sequence not in self._fed:
                continue
            slot = self._slots.index(None)
            start = self._starts[sequence]
            end = self._ends[sequence]
            for cache in self.caches:
                keys, values = cache.read(source, start, end)
                cache.write(slot, start, keys, values)
            self._slots[slot], self._slots[source] = sequence, None
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
        for cache in self.caches:
            cache.shrink(max(num_rows, len(self._slots)))

    def _make_slots(self) -> None:
        plain = self.caches
        self.caches = [SlotCache.like(cache, 1) for cache in self.caches]
        for cache, lone in zip(self.caches, plain, strict=True):
            keys, values = _first(lone, self._end)
            cache.write(0, 0, keys, values)
            cache._idx = self._end

    def _justify(self, longest: int) -> None:
        """Moves the rows so that the longest one fits, and little room is wasted."""
        by = longest - self._end
        if by <= 0 and self._end <= max(_SMALL_TOKENS, _GROWTH * longest):
            return
        by = max(by, -min(self._starts.values()))
        if by:
            for cache in self.caches:
                cache.shift(by)
            self._starts = {s: start + by for s, start in self._starts.items()}
            self._ends = {s: end + by for s, end in self._ends.items()}
            self._end += by
