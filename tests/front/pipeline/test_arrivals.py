"""How long prompts wait for each other, with simulated times."""

import pytest

from tests.front.pipeline import arrivals


def test_prompts_of_agents_wait_less_than_in_the_order_of_arrival() -> None:
    _, p95_before, _, speed_before, _, p95, _, speed = arrivals.compare(
        2, lambda: arrivals.agents(4, seed=1, num_requests=25)
    )
    assert p95 <= p95_before / 3
    assert speed >= 0.99 * speed_before


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_short_prompts_delay_a_long_prompt_by_about_its_time_alone(num_stages: int) -> None:
    clients = arrivals.stream(0.8, num_requests=80)
    longest = arrivals.simulate(num_stages, clients).columns[2]
    # Its work, as much for others, and the steps in which these decode.
    assert 1.9 < longest < 2.6


@pytest.mark.parametrize(("num_stages", "long_slowdown"), [(1, 1.2), (2, 1.2), (4, 1.25)])
def test_a_short_prompt_after_a_long_prompt_takes_little_longer_than_alone(
    num_stages: int, long_slowdown: float
) -> None:
    clients = arrivals.each_alone([(1.0, 3000), (1.5, 400)])
    figures = arrivals.simulate(num_stages, clients)
    assert figures.slowdowns[1] < 2.5
    assert figures.slowdowns[0] < long_slowdown
