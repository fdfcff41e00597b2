"""Which rows share a batch, as plain data: batches of a model without layers hold no array."""

import copy

import pytest

from serve.core.errors import EngineError
from serve.core.types import Row, Step, Take
from serve.rank.cache import MergedBatch
from serve.rank.placement import (
    Begin,
    Copy,
    Drop,
    ForgetGroups,
    Join,
    Keep,
    Layout,
    Lift,
    Move,
    Own,
    Park,
    Rules,
    Run,
    divide_new,
    moves,
)

BATCHES = Rules(can_batch=True, in_slots=False)
SLOTS = Rules(can_batch=True, in_slots=True)
ALONE = Rules(can_batch=False, in_slots=False)


def step(*rows: tuple[int, int, int], **fields: tuple[object, ...]) -> Step:
    """A step of group 0. A row is a sequence, its position and a number of tokens."""
    tokens = (1,) * sum(num_tokens for _, _, num_tokens in rows)
    return Step(7, 0, tuple(Row(*row) for row in rows), tokens, sample=False, **fields)  # type: ignore[arg-type]


def layout(*batches: dict[int, int]) -> Layout:
    """Batches of sequences, each with its number of tokens. The first batch is group 0's."""
    made = Layout(keys_of_group={0: [0]}, next_key=len(batches))
    for key, lengths in enumerate(batches):
        batch = MergedBatch()
        batch.add([(sequence, [], length) for sequence, length in lengths.items()])
        made.batches[key] = batch
        made.positions |= lengths
        made.key_of |= dict.fromkeys(lengths, key)
    return made


def moved(step: Step, layout: Layout, rules: Rules = BATCHES) -> list[Move]:
    """The moves of a step, none of which makes room for another; they change nothing."""
    before = copy.deepcopy(layout.key_of), copy.deepcopy(layout.keys_of_group)
    found = list(moves(step, layout, rules))
    assert (layout.key_of, layout.keys_of_group) == before
    return found


def test_divide_new_puts_rows_together_only_where_the_caches_allow_it() -> None:
    equal, ragged = step((1, 0, 2), (2, 0, 2)), step((1, 0, 2), (2, 0, 3))
    assert divide_new(equal, [], SLOTS) == []
    for rules, whole in ((SLOTS, ragged), (SLOTS, equal), (BATCHES, equal)):
        assert divide_new(whole, [0, 1], rules) == [[0, 1]]
    for rules, whole in ((BATCHES, ragged), (ALONE, equal)):
        assert divide_new(whole, [0, 1], rules) == [[0], [1]]


def test_moves_begin_new_rows_under_a_new_key() -> None:
    found = moves(step((1, 0, 2), (2, 0, 2)), layout({9: 5}), BATCHES)
    assert next(found) == Begin(1, {1: 2, 2: 2})
    assert next(found) == Own(0, [1])


def test_moves_keep_rows_of_the_last_step_where_they_are() -> None:
    found = moved(step((1, 3, 1), (2, 3, 1)), layout({1: 3, 2: 3}))
    assert found == [Keep(0, [1, 2]), Own(0, [0]), Run(0, [0, 1])]


def test_moves_park_a_row_that_is_not_fed() -> None:
    found = moved(step((2, 3, 1)), layout({1: 3, 2: 3}))
    assert found == [Keep(0, [2]), Own(0, [0]), Park(1), Run(0, [0])]


def test_moves_let_a_row_join_its_group() -> None:
    found = moves(step((1, 3, 1), (2, 3, 1)), layout({1: 3}, {2: 3}), BATCHES)
    assert [next(found) for _ in range(4)] == [Keep(0, [1]), Lift(2), Join(2, 0), Own(0, [0])]


def test_moves_run_each_row_alone_where_rows_cannot_share_a_batch() -> None:
    found = moved(step((1, 3, 1), (2, 3, 1)), layout({1: 3}, {2: 3}), ALONE)
    assert found == [Run(0, [0]), Run(1, [1])]


def test_moves_copy_and_drop_first() -> None:
    whole = step(take=(Take(4, 1, 2),), drop=(1,))
    assert moved(whole, layout({1: 3})) == [Copy(4, 1, 2), Drop(1)]


def test_moves_forget_groups_when_there_are_many() -> None:
    many = Layout(keys_of_group={group: [] for group in range(257)})
    found = moves(step((1, 0, 1)), many, BATCHES)
    assert next(found) == Begin(0, {1: 1})
    assert next(found) == ForgetGroups()


@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        (step((1, 2, 1)), "this stage holds 3 tokens of it"),
        (step((1, 3, 1), (2, 3, 2)), "different lengths"),
        (step(take=(Take(4, 1, 9),)), "takes 9 tokens of sequence 1"),
    ],
)
def test_moves_refuse_a_step_that_does_not_fit(whole: Step, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        moved(whole, layout({1: 3, 2: 3}))
