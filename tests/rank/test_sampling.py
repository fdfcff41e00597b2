"""Draws against the slow, obvious way in numpy; keys by seed and position."""

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from serve.core.types import Sampling
from serve.rank.sampling import sample

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -8.0]


def draws(sampling: Sampling, count: int = 4000) -> Counter[int]:
    """How often each token comes, over many positions."""
    rows = mx.array([LOGITS] * count)
    return Counter(sample(rows, [sampling] * count, range(count)).tolist())


def nucleus(temperature: float, top_p: float) -> np.ndarray:
    """The distribution by definition: the smallest set of tokens with mass top_p."""
    scores = np.array(LOGITS) / temperature
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    kept, mass = np.zeros_like(probabilities), 0.0
    for token in np.argsort(-probabilities):
        if mass >= top_p:
            break
        kept[token] = probabilities[token]
        mass += probabilities[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1, 1), (0.5, 1), (2, 0.9), (1, 0.6), (1, 0.01)]
)
def test_tokens_come_as_often_as_they_should(temperature: float, top_p: float) -> None:
    count = 4000
    found = draws(Sampling(temperature, top_p, seed=3), count)
    for token, probability in enumerate(nucleus(temperature, top_p)):
        spread = 5 * math.sqrt(probability * (1 - probability) / count)
        assert abs(found[token] / count - probability) <= spread, token


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-38, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert draws(Sampling(temperature, seed=1), 20) == {0: 20}
    assert draws(Sampling(temperature, 0.5, seed=1), 20) == {0: 20}


def test_rows_have_their_own_sampling() -> None:
    rows = mx.array([LOGITS, LOGITS[::-1], LOGITS])
    samplings = [Sampling(0), Sampling(0), Sampling(1, 0.001, 5)]
    assert sample(rows, samplings, [1, 2, 3]).tolist() == [0, 5, 0]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    flat = mx.zeros((3, 1000))
    once = sample(flat, [Sampling(1, 1, seed) for seed in (7, 8, 7)], [4, 4, 4]).tolist()
    assert once[0] == once[2] != once[1]
    alone = sample(flat[:1], [Sampling(1, 1, 7)], [4]).tolist()
    assert alone == once[:1]
    assert sample(flat[:1], [Sampling(1, 1, 7)], [5]).tolist() != alone
    far = sample(flat, [Sampling(1, 1, s) for s in (-(2**63), 2**63 - 1, 0)], [4, 4, 4]).tolist()
    assert len(set(far)) == 3


def test_each_top_p_is_not_compiled_anew() -> None:
    """mx.compile takes seconds for a number that it has not seen; an array is one of many.
    Two hundred compilations would run into the test's time-out."""
    rows = mx.array([LOGITS] * 200)
    samplings = [Sampling(1, 0.5 + n / 1000, n) for n in range(200)]
    assert len(sample(rows, samplings, range(200)).tolist()) == 200
