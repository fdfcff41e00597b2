"""Rows join, leave, park and move between groups, and keep their results."""

import copy
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from serve.core.errors import EngineError
from serve.core.ops import NO_CHECKPOINT, Copy, Drop
from serve.core.types import Row, Step
from serve.model.caches import quantized
from serve.model.stage import Stage
from serve.rank.cache import ForwardPass, GroupCaches
from tests.errors import fails
from tests.models import build

OVERFLOWS = 95  # a token of the vocabulary that no test feeds by chance


class Rig:
    """One stage that is the whole model, and beside it each sequence alone. overflows is a
    token whose hidden state is not a number."""

    def __init__(
        self, can_batch: bool, kv_bits: int | None = None, overflows: int | None = None
    ) -> None:
        config = {"head_dim": 32} if kv_bits else {}
        self.stage = Stage(_model(config, overflows), 0, 4)
        self.kv_bits = kv_bits
        self.caches = GroupCaches(
            lambda: quantized(self.stage.make_cache(), self.kv_bits), can_batch
        )
        self.whole = _model(config, overflows)
        self.alone: dict[int, list] = {}
        self.length: dict[int, int] = {}
        self.number = 0

    def step(
        self,
        group: int,
        feeds: dict[int, list[int]],
        drop: tuple[int, ...] = (),
        copies: tuple[Copy, ...] = (),
    ) -> None:
        """Runs a step and compares each row's logits with the sequence alone."""
        for each in copies:
            self.length[each.sequence] = each.num_tokens
            self.alone[each.sequence] = copy.deepcopy(self.alone[each.source])
            trim_prompt_cache(self.alone[each.sequence], self.length[each.source] - each.num_tokens)
        self.number += 1
        rows = tuple(Row(s, self.length.get(s, 0), len(t)) for s, t in feeds.items())
        tokens = tuple(t for fed in feeds.values() for t in fed)
        step = Step(self.number, group, rows, tokens, True)
        logits: dict[int, mx.array] = {}
        for each in copies:
            self.caches.copy(each)
        for sequence in drop:
            self.caches.drop(sequence)
        passes = self.caches.arrange(step)
        mx.eval(self.caches.moved())
        for each in passes:
            (output,) = self.stage(each.tokens(step), each.caches, [])
            logits |= each.outputs_of_rows(step, output)
        mx.eval(logits, self.caches.states(step))
        for n, (sequence, fed) in enumerate(feeds.items()):
            new = quantized(make_prompt_cache(self.whole), self.kv_bits)
            cache = self.alone.setdefault(sequence, new)
            expected = self.whole(mx.array([fed]), cache=cache)
            assert mx.allclose(logits[n], expected[0], rtol=1e-4, atol=1e-4, equal_nan=True), (
                sequence
            )
            self.length[sequence] = self.length.get(sequence, 0) + len(fed)

    def reject(self, sequence: int, num_drafts: int) -> None:
        """The last tokens that a row was fed were drafts, and were wrong."""
        self.length[sequence] -= num_drafts
        trim_prompt_cache(self.alone[sequence], num_drafts)

    def lose_ring(self, numbers: dict[int, int]) -> None:
        """Keeps only these sequences. numbers says how many of its last tokens each one loses."""
        positions = {sequence: self.length[sequence] - n for sequence, n in numbers.items()}
        self.caches.keep_only(positions)
        assert self.caches.positions == positions
        self.alone = {sequence: self.alone[sequence] for sequence in numbers}
        for sequence, num_tokens in numbers.items():
            trim_prompt_cache(self.alone[sequence], num_tokens)
        self.length = positions


def _model(config: dict[str, int], overflows: int | None) -> nn.Module:
    model = build("llama", **config)
    if overflows is not None:
        model.model.embed_tokens.weight[overflows] = mx.nan
    return model


@pytest.fixture(
    params=[(True, None), (False, None), (True, 8), (False, 8)],
    ids=["together", "one by one", "8 bits together", "8 bits one by one"],
)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(*request.param)


def test_rows_of_different_lengths_can_join_one_after_another_and_leave(rig: Rig) -> None:
    rig.step(10, {0: [1, 2, 3]})
    rig.step(0, {0: [4]})
    rig.step(11, {1: [5, 6, 7, 8, 9, 10, 11]})
    rig.step(11, {1: [12, 13]})
    rig.step(0, {0: [14], 1: [15]})
    rig.step(12, {2: [16]})
    rig.step(0, {0: [17], 1: [18], 2: [19], 3: [20]})
    rig.step(0, {0: [21], 2: [22], 3: [23]}, drop=(1,))
    rig.step(0, {3: [24]}, drop=(0, 2))
    rig.step(0, {3: [25], 4: [26]})
    rig.step(0, {}, drop=(3, 4))
    assert not rig.caches._batches
    assert not rig.caches._positions


def test_a_row_that_pauses_can_move_to_another_group(rig: Rig) -> None:
    rig.step(0, {0: [1], 1: [2], 2: [3]})
    rig.step(0, {0: [4], 1: [5], 2: [6]})
    rig.step(0, {0: [7], 1: [8]})
    rig.step(1, {2: [9]})
    rig.step(1, {2: [10], 1: [11]})
    rig.step(0, {0: [12]})
    rig.step(0, {0: [13], 2: [14]})


def test_a_row_can_return_at_another_place_in_a_step(rig: Rig) -> None:
    rig.step(0, {0: [1], 1: [2], 2: [3]})
    rig.step(0, {1: [4], 2: [5]})
    rig.step(0, {2: [6], 0: [7], 1: [8]})


def test_a_row_that_pauses_can_be_dropped(rig: Rig) -> None:
    rig.step(0, {0: [1], 1: [2]})
    rig.step(0, {0: [3]})
    rig.step(0, {0: [4]}, drop=(1,))
    rig.step(0, {}, drop=(0,))
    assert not rig.caches._batches


def test_a_sequence_can_begin_again_after_it_was_dropped(rig: Rig) -> None:
    rig.step(0, {0: [1, 2]})
    rig.length.clear()
    rig.alone.clear()
    rig.step(0, {0: [3]}, drop=(0,))


def test_a_step_at_another_position_than_the_cache_is_refused(rig: Rig) -> None:
    rig.step(0, {0: [1, 2]})
    rig.length[0] = 5
    with fails(EngineError, "out_of_step", match="position 5.* 2 tokens"):
        rig.step(0, {0: [3]})


def test_rows_of_a_step_must_have_equal_lengths_unless_all_are_new(rig: Rig) -> None:
    rig.step(0, {0: [3], 1: [4, 5], 2: [6, 7, 8, 9]})
    rig.step(1, {2: [1], 0: [2]})
    rows = (Row(0, 2, 1), Row(2, 5, 2))
    with fails(EngineError, "engine", match=r"\[1, 2\]"):
        rig.caches.arrange(Step(99, 1, rows, (3, 4, 5), sample=False))


def test_rejected_drafts_are_removed_from_their_rows(rig: Rig) -> None:
    rig.step(0, {0: [1, 2, 3]})
    rig.step(0, {0: [4, 5, 6, 7]})
    rig.reject(0, 2)
    rig.step(0, {0: [8, 9]})
    rig.reject(0, 1)
    rig.step(9, {1: [10, 11, 12, 13, 14]})
    rig.step(0, {0: [15, 16, 17], 1: [18]})
    rig.reject(0, 2)
    rig.step(0, {0: [19], 1: [20, 21, 22, 23]})
    rig.reject(1, 1)
    rig.step(0, {0: [24], 1: [25]})
    rig.step(8, {2: [26]})
    rig.step(0, {0: [27, 28], 2: [29, 30, 31], 1: [32]})
    rig.reject(0, 1)
    rig.step(0, {0: [33], 1: [34]}, drop=(2,))
    rig.step(0, {1: [35]}, copies=(Copy(3, 1, 4),))
    rig.step(0, {0: [36], 1: [37], 3: [38, 39]})


def test_rows_end_in_the_same_column_again_when_no_more_drafts_come() -> None:
    rig = Rig(can_batch=True)
    rig.step(8, {0: [1, 2, 3], 1: [4, 5, 6, 7]})
    rig.step(0, {0: [8], 1: [9]})
    rig.step(0, {0: [10, 11, 12, 13], 1: [14]})
    rig.reject(0, 2)
    own_ends = []
    for n in range(12):
        rig.step(0, {0: [15 + n], 1: [16 + n]})
        (batch,) = rig.caches._batches.values()
        own_ends.append(batch.caches[0].ends is not None)
    assert own_ends == [True] * 8 + [False] * 4


def test_only_drafts_can_be_removed_from_a_row(rig: Rig) -> None:
    rig.step(0, {0: [1, 2, 3]})
    rig.step(0, {0: [4]})
    rig.length[0] = 3
    with fails(EngineError, "out_of_step", match="position 3.* 4 tokens"):
        rig.step(0, {0: [5]})
    rig.length[0] = 4
    rig.step(0, {0: [5, 6, 7]})
    rig.length[0] = 3
    with fails(EngineError, "out_of_step", match="position 3.* 7 tokens"):
        rig.step(0, {0: [5]})
    rig.length[0] = 4  # A row whose drafts overflow is computed again from here.
    trim_prompt_cache(rig.alone[0], 3)
    rig.step(0, {0: [5]})


def test_keeping_only_some_sequences_shortens_them_and_drops_all_other_sequences(rig: Rig) -> None:
    rig.step(0, {0: [1, 2, 3], 1: [4, 5], 2: [6]})
    rig.step(0, {0: [7], 1: [8], 2: [9]})
    rig.step(1, {3: [10, 11, 12, 13]})
    rig.lose_ring({0: 1, 1: 0, 3: 2})
    rig.step(0, {0: [20]})
    rig.step(1, {1: [21], 3: [22]})
    rig.step(0, {0: [23], 1: [24], 3: [25]})
    rig.step(2, {2: [26, 27]})
    with fails(EngineError, "out_of_step", match="5 tokens.* 2 "):
        rig.caches.keep_only({2: 5})


@pytest.mark.parametrize("seed", range(6))
def test_caches_of_two_stages_hold_the_same_rows_after_the_ring_is_lost(seed: int) -> None:
    """The second stage lags behind the first, so it lacks some steps when the ring is lost. Hidden
    states travel by the order of rows: another order would mix up two sequences."""
    chance = random.Random(seed)
    first, second = (GroupCaches(lambda: [KVCache()]) for _ in range(2))
    groups: list[list[int]] = [[], []]
    under_way: list[tuple[Step, list[ForwardPass]]] = []
    for number in range(80):
        if chance.random() < 0.1:
            kept = first.positions.keys() & second.positions.keys() & {*groups[0], *groups[1]}
            positions = {s: min(first.positions[s], second.positions[s]) for s in kept}
            first.keep_only(positions)
            second.keep_only(positions)
            under_way.clear()
            groups = [[s for s in group if s in kept] for group in groups]
            groups.sort(key=len)
            groups[0] += [groups[1].pop() for _ in groups[1][::3]]
        step = _random_step(chance, number, groups, first)
        under_way.append((step, feed_ones(first, step)))
        while len(under_way) > chance.randint(0, 3):
            step, passes = under_way.pop(0)
            rows = [each.rows for each in feed_ones(second, step)]
            assert rows == [each.rows for each in passes]


def _random_step(
    chance: random.Random,
    number: int,
    groups: list[list[int]],
    caches: GroupCaches,
) -> Step:
    """A sequence begins or ends, or a group decodes. Changes the groups as the step does."""
    group = chance.choice((0, 1))
    kind = chance.random()
    if kind < 0.3 or not groups[group]:
        num_tokens = chance.randint(1, 40)
        groups[group].append(number)
        row = Row(number, 0, num_tokens)
        return Step(number, 2 + number, (row,), (1,) * num_tokens, False)
    if kind < 0.5:
        gone = groups[group].pop(chance.randrange(len(groups[group])))
        return Step(number, -1, (), (), False, before=(Drop(gone),))
    positions = caches.positions
    rows = tuple(Row(s, positions[s], 1) for s in groups[group])
    return Step(number, group, rows, (1,) * len(rows), True)


def feed_ones(caches: GroupCaches, step: Step) -> list[ForwardPass]:
    """Runs a step of which all keys and values are ones."""
    for op in step.ops(Drop):
        caches.drop(op.sequence)
    passes = caches.arrange(step)
    for arrays in caches.moved():
        mx.eval(arrays)
    for each in passes:
        num_rows, num_tokens = each.tokens(step).shape
        for cache in each.caches:
            new = mx.ones((num_rows, 2, num_tokens, 16))
            cache.update_and_fetch(new, new)
    mx.eval(caches.states(step))
    return passes


def test_only_tokens_that_are_held_can_be_copied(rig: Rig) -> None:
    rig.step(0, {0: [1, 2, 3], 1: [4, 5, 6, 7, 8]})
    caches = rig.caches
    assert caches.extracted(0, 2)[0].offset >= 2
    for sequence, num_tokens in ((0, 4), (2, 1)):  # The other row has as many.
        with fails(EngineError, "out_of_step"):
            caches.extracted(sequence, num_tokens)
    for num_tokens in (4, 2):  # too many, and not its last ones
        with fails(EngineError, "out_of_step"):
            caches.states_at(0, num_tokens, NO_CHECKPOINT)


def test_a_cache_that_cannot_rewind_raises_an_error() -> None:
    caches = GroupCaches(lambda: [RotatingKVCache(4)])
    caches.arrange(Step(1, 0, (Row(0, 0, 1),), (1,), True))
    caches._batches[0].caches[0].update_and_fetch(*[mx.zeros((1, 1, 8, 4))] * 2)
    caches._positions[0], caches._floors[0] = 8, 4
    with fails(EngineError, "cannot_rewind"):
        caches.arrange(Step(2, 0, (Row(0, 6, 1),), (1,), True))


def test_a_sequence_can_begin_as_a_copy_of_another_sequence(rig: Rig) -> None:
    rig.step(0, {0: [1, 2, 3, 4, 5]})
    rig.step(0, {0: [6], 1: [7]})
    rig.step(0, {}, copies=(Copy(2, 0, 4),))
    rig.step(0, {0: [8], 1: [9], 2: [9]})
    rig.step(0, {1: [1]})
    rig.step(0, {}, copies=(Copy(3, 0, 7),), drop=(0,))
    rig.step(1, {3: [5, 6]})
    rig.step(0, {1: [1], 2: [2]})
    rig.step(0, {1: [3], 2: [4], 3: [5]})
    with fails(EngineError, "out_of_step", match="99 tokens of sequence 3"):
        rig.caches.copy(Copy(4, 3, 99))


def test_a_row_that_joins_sees_nothing_of_the_previous_row_in_its_slot(rig: Rig) -> None:
    """Not even NaN: a masked NaN times zero is still NaN."""
    rig = Rig(rig.caches._can_batch, rig.kv_bits, OVERFLOWS)
    rig.step(0, {0: [1, 2, 3, 4, 5, 6]})
    rig.step(0, {0: [7], 1: [OVERFLOWS]})
    rig.step(0, {0: [8], 1: [9]})
    rig.step(0, {0: [10]}, drop=(1,))
    rig.step(9, {2: [11, 12]})
    rig.step(0, {0: [13], 2: [14]})
    rig.step(0, {0: [15], 2: [16]})


def test_a_row_that_moves_to_another_slot_sees_nothing_of_the_previous_row(rig: Rig) -> None:
    rig = Rig(rig.caches._can_batch, rig.kv_bits, OVERFLOWS)
    rig.step(0, {0: [1, 2, 3, 4, 5, 6]})
    for sequence in range(1, 5):
        rig.step(sequence, {sequence: [OVERFLOWS, 7, 8] if sequence < 4 else [9]})
    rig.step(0, {sequence: [7] for sequence in range(5)})
    rig.step(0, {0: [8], 4: [8]}, drop=(1, 2, 3))
    rig.step(0, {0: [9], 4: [9]})


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_padding_whose_numbers_overflow_changes_no_row(kv_bits: int | None) -> None:
    """Short rows are padded with token 0 if a longer one is prefilled in the same step."""
    rig = Rig(can_batch=True, kv_bits=kv_bits, overflows=0)
    rig.step(0, {0: [1, 2, 3, 4, 5, 6], 1: [7, 8, 9, 10], 2: [11, 12, 13, 14, 15]})
    rig.step(1, {0: [1], 1: [2], 2: [3]})
    rig.step(1, {0: [4], 1: [5]})
    rig.step(1, {0: [4], 1: [5], 2: [3]})


LIVES = [
    (0, None, None),
    (3, 8, None),
    (21, None, OVERFLOWS),
    (26, None, OVERFLOWS),
    (8, 8, 0),
    pytest.param(1, None, None, marks=pytest.mark.slow),
    pytest.param(2, None, None, marks=pytest.mark.slow),
    pytest.param(24, 8, OVERFLOWS, marks=pytest.mark.slow),
    pytest.param(7, None, 0, marks=pytest.mark.slow),
]


class RandomLife:
    """Rows of two groups that join, leave for a while, return, are copied and dropped. Tokens
    overflow with the given probability."""

    def __init__(
        self,
        seed: int,
        kv_bits: int | None,
        overflows: int | None,
        overflow_share: float,
    ) -> None:
        self.chance = random.Random(seed)
        self.rig = Rig(True, kv_bits, overflows)
        self.groups: dict[int, list[int]] = {0: [], 1: []}
        self.away: list[int] = []
        self._ids = iter(range(1000))
        self._overflows = overflows
        self._overflow_share = overflow_share

    def tokens(self, num: int) -> list[int]:
        tokens = [self.chance.randrange(1, 90) for _ in range(num)]
        if self._overflows is not None and self.chance.random() < self._overflow_share:
            tokens[self.chance.randrange(num)] = self._overflows
        return tokens

    def join(self, group: int, long_share: float = 0.0) -> None:
        new = [next(self._ids) for _ in range(self.chance.randint(1, 3))]
        longest = 700 if self.chance.random() < long_share else 20
        feeds = {id: self.tokens(self.chance.randint(1, longest)) for id in new}
        self.rig.step(100 + new[0], feeds)
        self.groups[group] += new

    def leave(self, group: int) -> None:
        ids = self.groups[group]
        if ids:
            self.away.append(ids.pop(self.chance.randrange(len(ids))))

    def come_back(self, group: int) -> None:
        if self.away:
            self.groups[group].append(self.away.pop())

    def drop(self) -> None:
        if self.away:
            self.rig.step(-1, {}, drop=(self.away.pop(),))

    def copy(self, group: int) -> None:
        sources = self.groups[0] + self.groups[1] + self.away
        if sources:
            source = self.chance.choice(sources)
            new_id = next(self._ids)
            num_tokens = self.chance.randint(1, self.rig.length[source])
            self.rig.step(-1, {}, copies=(Copy(new_id, source, num_tokens),))
            self.groups[group].append(new_id)

    def lose_ring(self) -> None:
        """All are taken out of their groups, and some of them are kept in part."""
        held = [*self.groups[0], *self.groups[1], *self.away]
        kept = [id for id in held if self.chance.random() < 0.8]
        numbers = {id: self.chance.randint(0, min(3, self.rig.length[id] - 1)) for id in kept}
        self.rig.lose_ring(numbers)
        for ids in (self.away, *self.groups.values()):
            ids.clear()
        for id in kept:
            self.groups[self.chance.choice((0, 1))].append(id)


@pytest.mark.parametrize(("seed", "kv_bits", "overflows"), LIVES)
def test_rows_keep_their_results_after_random_joins_and_moves_and_drops(
    seed: int, kv_bits: int | None, overflows: int | None
) -> None:
    """Rows of very different lengths share batches. Some overflow, and so does the padding of a
    batch if that is token 0."""
    life = RandomLife(seed, kv_bits, overflows, 0.1)
    for _ in range(60):
        kind = life.chance.random()
        group = life.chance.choice((0, 1))
        if kind < 0.2:
            life.join(group, long_share=0.1)
        elif kind < 0.3:
            life.leave(group)
        elif kind < 0.4:
            life.come_back(group)
        elif kind < 0.45:
            life.drop()
        elif kind < 0.55:
            life.copy(group)
        elif life.groups[group]:
            life.rig.step(group, {id: life.tokens(1) for id in life.groups[group]})


@pytest.mark.parametrize(("seed", "kv_bits", "overflows"), LIVES)
def test_rows_keep_their_results_after_random_joins_and_moves_and_drafts(
    seed: int, kv_bits: int | None, overflows: int | None
) -> None:
    """Rows feed drafts of different numbers, of which some are wrong, while others join, leave for
    a while, move, are copied and dropped."""
    life = RandomLife(seed, kv_bits, overflows, 0.03)
    for _ in range(60):
        kind = life.chance.random()
        group = life.chance.choice((0, 1))
        if kind < 0.15:
            life.join(group)
        elif kind < 0.2:
            life.leave(group)
        elif kind < 0.25:
            life.come_back(group)
        elif kind < 0.3:
            life.drop()
        elif kind < 0.4:
            life.copy(group)
        elif kind < 0.45:
            life.lose_ring()
        else:
            feed_drafts(life, group)


def feed_drafts(life: RandomLife, group: int) -> None:
    feeds = {}
    for id in life.groups[group]:
        lengths = (1, 1, life.chance.randint(1, 9))
        feeds[id] = life.tokens(life.chance.choice(lengths))
    if not feeds:
        return
    life.rig.step(group, feeds)
    for id, fed in feeds.items():
        if len(fed) > 1:
            life.rig.reject(id, life.chance.randrange(len(fed)))


@pytest.mark.slow
def test_keys_and_values_use_little_more_memory_than_needed() -> None:
    """One row of 8,192 tokens among seven of 64."""
    config = {"num_hidden_layers": 1, "max_position_embeddings": 16384}
    stage = Stage(build("llama", **config), 0, 1)
    caches = GroupCaches(stage.make_cache)
    lengths = {0: 8192} | dict.fromkeys(range(1, 8), 64)
    for number, (id, length) in enumerate(lengths.items()):
        step = Step(number, 100 + id, (Row(id, 0, length),), (1,) * length, False)
        run(stage, caches, step)
    rows = tuple(Row(id, length, 1) for id, length in lengths.items())
    run(stage, caches, Step(99, 0, rows, (1,) * 8, False))
    needed = sum(length + 1 for length in lengths.values()) * 2 * 2 * 8 * 4
    assert caches.num_bytes <= 1.5 * needed


def test_growing_buffers_are_copied_layer_by_layer() -> None:
    """Together, the old and the new buffers of all layers would take twice the memory."""
    caches = GroupCaches(lambda: [KVCache() for _ in range(8)])

    for id in range(13):
        feed_ones(caches, Step(id, 100 + id, (Row(id, 0, 500),), (1,) * 500, False))
    feed_ones(caches, Step(20, 0, tuple(Row(id, 500, 1) for id in range(12)), (1,) * 12, True))
    rows = tuple(Row(id, 501 - (id == 12), 1) for id in range(13))
    num_before = mx.get_active_memory() - caches.num_bytes
    mx.reset_peak_memory()
    feed_ones(caches, Step(21, 0, rows, (1,) * 13, True))
    assert mx.get_peak_memory() - num_before <= 1.3 * caches.num_bytes
    mx.reset_peak_memory()
    for n in range(300):  # until there is no column left
        rows = tuple(Row(id, 502 - (id == 12) + n, 1) for id in range(13))
        feed_ones(caches, Step(22 + n, 0, rows, (1,) * 13, True))
    assert mx.get_peak_memory() - num_before <= 1.3 * caches.num_bytes


def run(stage: Stage, caches: GroupCaches, step: Step) -> None:
    passes = caches.arrange(step)
    mx.eval(caches.moved())
    outputs = [stage(each.tokens(step), each.caches, []) for each in passes]
    mx.eval(outputs, caches.states(step))


@pytest.mark.parametrize("can_batch", [True, False])
def test_new_and_old_rows_are_computed_in_separate_forward_passes(can_batch: bool) -> None:
    rig = Rig(can_batch)
    rig.step(0, {0: [1], 1: [2]})
    rows = (Row(2, 0, 1), Row(0, 1, 1), Row(3, 0, 1), Row(1, 1, 1))
    passes = rig.caches.arrange(Step(2, 0, rows, (5, 6, 7, 8), True))
    expected = [(0, 2), (1, 3)] if can_batch else [(0,), (1,), (2,), (3,)]
    assert sorted(each.rows for each in passes) == sorted(expected)


@pytest.mark.parametrize(
    ("cache", "can_batch", "lengths", "expected"),
    [
        (KVCache, True, (2, 3), [(0, 1)]),
        (lambda: RotatingKVCache(8), True, (2, 2), [(0, 1)]),
        (lambda: RotatingKVCache(8), True, (2, 3), [(0,), (1,)]),
        (KVCache, False, (2, 2), [(0,), (1,)]),
    ],
)
def test_new_rows_are_computed_together_only_if_their_caches_allow_it(
    cache: Callable[[], Any], can_batch: bool, lengths: tuple[int, int], expected: list[Any]
) -> None:
    rows = tuple(Row(n, 0, length) for n, length in enumerate(lengths))
    step = Step(1, 0, rows, (1,) * sum(lengths), sample=False)
    passes = GroupCaches(lambda: [cache()], can_batch).arrange(step)
    assert [each.rows for each in passes] == expected


def test_groups_without_rows_are_deleted() -> None:
    caches = GroupCaches(lambda: [KVCache()])
    for number in range(600):
        caches.arrange(Step(number, number, (Row(number, 0, 1),), (1,), sample=False))
        caches.drop(number)
    assert len(caches._keys_of_group) < 300


@pytest.mark.parametrize(("device", "num_rows"), [(mx.cpu, 8), (mx.gpu, 5)])
def test_only_a_cpu_pads_rows_to_multiples_of_four(
    monkeypatch: pytest.MonkeyPatch, device: mx.DeviceType, num_rows: int
) -> None:
    """No kernel of a GPU prefers them, and each row more costs time there."""
    monkeypatch.setattr(mx, "default_device", lambda: device)
    rig = Rig(can_batch=True)
    feeds = {sequence: [sequence, 2] for sequence in range(5)}
    rig.step(0, feeds)
    rig.step(0, {sequence: [7] for sequence in feeds})
    step = Step(9, 0, tuple(Row(s, 3, 1) for s in feeds), (8,) * 5, True)
    (own,) = rig.caches.arrange(step)
    assert len(own.rows) == num_rows
