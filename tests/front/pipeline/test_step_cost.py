"""What one more token in a step costs, from the times of past steps."""

import random

import pytest

from serve.front.pipeline.step_cost import StepCost


def test_the_cost_of_one_more_token_is_found_from_past_steps() -> None:
    cost, chance = StepCost(), random.Random(0)
    assert not cost.is_known
    for _ in range(200):
        num_tokens = chance.choice([1, 1, 4, 9])
        cost.add_step(num_tokens, 0.05 + 0.004 * num_tokens + chance.uniform(-0.002, 0.002))
    assert cost.seconds_per_token == pytest.approx(0.004, rel=0.2)
    assert cost.seconds(1) == pytest.approx(0.054, rel=0.1)
    for _ in range(200):
        cost.add_step(chance.choice([1, 3]), 0.2)
    assert cost.seconds(1) == pytest.approx(0.2, rel=0.1)


def test_the_cost_of_one_more_token_is_guessed_if_all_steps_had_one_size() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.add_step(1, 0.1)
    assert 0 < cost.seconds_per_token < 0.02
