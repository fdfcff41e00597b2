"""The measurement of a link: what counts as the link's time, and what does not."""

import pytest

from serve.parent.pings import link_speed

MIB = 1 << 20


def test_speed_of_a_link_excludes_the_time_that_both_ends_spend_in_python() -> None:
    """With 0.2 ms of Python in each round trip, two shards on Thunderbolt looked too slow."""
    speed = link_speed(small=[5e-4, 3e-4], large=[9e-4, 8e-4], own=[2e-4, 4e-4])
    assert speed.round_trip_seconds == pytest.approx(1e-4)
    assert speed.bytes_per_second == pytest.approx(MIB / 5e-4)


def test_speed_of_a_link_is_positive_and_finite() -> None:
    """Ranks on one host may answer as fast as a process answers itself."""
    speed = link_speed(small=[2e-4], large=[1e-4], own=[3e-4])
    assert 0 < speed.round_trip_seconds < 1e-5
    assert 0 < speed.bytes_per_second < 1e13
