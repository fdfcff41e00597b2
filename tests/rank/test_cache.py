"""Rows join, leave, park and move between groups, and keep their results."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from serve.core.errors import EngineError
from serve.core.types import Row, Step
from serve.rank.cache import GroupCaches
from serve.rank.stage import Stage
from tests.models import build


class Rig:
    """One stage that is the whole model, and beside it each sequence alone."""

    def __init__(self, can_batch: bool) -> None:
        self.stage = Stage(build("llama"), 0, 4)
        self.caches = GroupCaches(self.stage.make_cache, can_batch)
        self.whole = build("llama")
        self.alone: dict[int, list] = {}
        self.length: dict[int, int] = {}
        self.number = 0

    def step(self, group: int, feeds: dict[int, list[int]], drop: tuple[int, ...] = ()) -> None:
        """Runs a step and compares each row's logits with the sequence alone."""
        self.number += 1
        rows = tuple(Row(s, self.length.get(s, 0), len(t)) for s, t in feeds.items())
        tokens = tuple(t for fed in feeds.values() for t in fed)
        step = Step(self.number, group, rows, tokens, True, drop)
        logits: dict[int, mx.array] = {}
        for part in self.caches.apply(step):
            (output,) = self.stage(part.tokens(step), part.caches, [])
            logits |= dict(zip(part.rows, output, strict=True))
        mx.eval(logits, self.caches.states(step))
        for n, (sequence, fed) in enumerate(feeds.items()):
            cache = self.alone.setdefault(sequence, make_prompt_cache(self.whole))
            expected = self.whole(mx.array([fed]), cache=cache)
            assert mx.allclose(logits[n], expected[0], rtol=1e-4, atol=1e-4), sequence
            self.length[sequence] = self.length.get(sequence, 0) + len(fed)


@pytest.fixture(params=[True, False], ids=["together", "one by one"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def test_ragged_rows_join_one_after_another_and_leave(rig: Rig) -> None:
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


def test_a_parked_row_moves_to_another_group(rig: Rig) -> None:
    rig.step(0, {0: [1], 1: [2], 2: [3]})
    rig.step(0, {0: [4], 1: [5], 2: [6]})
    rig.step(0, {0: [7], 1: [8]})
    rig.step(1, {2: [9]})
    rig.step(1, {2: [10], 1: [11]})
    rig.step(0, {0: [12]})
    rig.step(0, {0: [13], 2: [14]})


def test_a_row_that_comes_back_may_stand_elsewhere(rig: Rig) -> None:
    rig.step(0, {0: [1], 1: [2], 2: [3]})
    rig.step(0, {1: [4], 2: [5]})
    rig.step(0, {2: [6], 0: [7], 1: [8]})


def test_a_parked_row_can_be_dropped(rig: Rig) -> None:
    rig.step(0, {0: [1], 1: [2]})
    rig.step(0, {0: [3]})
    rig.step(0, {0: [4]}, drop=(1,))
    rig.step(0, {}, drop=(0,))
    assert not rig.caches._batches


def test_a_sequence_may_begin_anew_after_it_was_dropped(rig: Rig) -> None:
    rig.step(0, {0: [1, 2]})
    rig.length.clear()
    rig.alone.clear()
    rig.step(0, {0: [3]}, drop=(0,))


def test_a_step_that_does_not_fit_is_refused(rig: Rig) -> None:
    rig.step(0, {0: [1, 2]})
    rig.length[0] = 5
    with pytest.raises(EngineError, match="position 5, this stage holds 2"):
        rig.step(0, {0: [3]})


def test_rows_of_different_lengths_are_refused(rig: Rig) -> None:
    with pytest.raises(EngineError, match="different lengths"):
        rig.step(0, {0: [3], 1: [4, 5]})


@pytest.mark.parametrize("can_batch", [True, False])
def test_new_rows_beside_old_ones_are_a_part_of_their_own(can_batch: bool) -> None:
    rig = Rig(can_batch)
    rig.step(0, {0: [1], 1: [2]})
    rows = (Row(2, 0, 1), Row(0, 1, 1), Row(3, 0, 1), Row(1, 1, 1))
    parts = rig.caches.apply(Step(2, 0, rows, (5, 6, 7, 8), True))
    expected = [(0, 2), (1, 3)] if can_batch else [(0,), (1,), (2,), (3,)]
    assert [part.rows for part in parts] == expected
