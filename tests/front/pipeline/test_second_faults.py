"""A second fault at every tick of a recovery: each kind after each, by simulation."""

from collections import Counter
from collections.abc import Callable

import pytest

from serve.front.pipeline.states import State
from tests.front.pipeline.cluster_simulation import PlayedCluster, check_answer

HEALING_SECONDS = 600.0
MAX_TICKS = 400
Fault = Callable[[PlayedCluster, int], None]


def lose(cluster: PlayedCluster, rank: int) -> None:
    """For longer than --join-timeout, so that with --replan the others take over its layers."""
    cluster.disconnect(rank, f"Rank {rank} is gone.", back_seconds=8.0)


FAULTS: dict[str, Fault] = {
    "link": PlayedCluster.reset_link,
    "wrong report": PlayedCluster.confuse,
    "engine": PlayedCluster.kill,
    "rank": lose,
    "connection": PlayedCluster.cut,
    "parent": PlayedCluster.stop_parent,
    "hang": PlayedCluster.stop,
}


def is_whole_again(cluster: PlayedCluster) -> bool:
    lifecycle = cluster.lifecycle
    return lifecycle.life > 0 and lifecycle.is_working and lifecycle.membership.ring == (0, 1, 2)


def recovering(seed: int, first: str, replan: bool, num_events: int) -> PlayedCluster:
    """A cluster of three ranks, this many events after a first fault, or when it is whole again.
    Its requests run for longer than the recovery takes."""
    cluster = PlayedCluster(seed, replan=replan, join_timeout=2.0)
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    for length in (5, 10, 20):
        cluster.ask(length, 200)
    cluster.run(1)
    FAULTS[first](cluster, 1)
    end = cluster.num_events + num_events
    cluster.run(60, lambda: cluster.num_events >= end or is_whole_again(cluster))
    return cluster


def situation(cluster: PlayedCluster) -> object:
    """The states of the life cycle, of the ranks and of their engines."""
    lifecycle = cluster.lifecycle
    engines = [cluster.engine_of(rank) for rank in range(3)]
    states = [(engine.state, engine.order, engine.runs) for engine in engines if engine]
    ranks = [(stage.state, stage.has_stayed) for stage in lifecycle.membership.ranks]
    return lifecycle.state, lifecycle.life, lifecycle.membership.ring, ranks, states


def check_healing(cluster: PlayedCluster) -> None:
    """Checks that all ranks work again, and that requests get each of their tokens once."""
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet), cluster.logged[-5:]
    assert cluster.failure is None
    assert not any(check_answer(asked) for asked in cluster.asked)


def check_second_faults(
    seed: int,
    first: str,
    second: str,
    replan: bool,
    stride: int = 1,
) -> Counter[State]:
    """Repeats a recovery, and has the second fault some events later each time, if these events
    have changed anything. Returns the states in which it has come."""
    states: Counter[State] = Counter()
    earlier: object = None
    num_events = 0
    while not is_whole_again(cluster := recovering(seed, first, replan, num_events)):
        if earlier != (earlier := situation(cluster)):
            states[cluster.lifecycle.state] += 1
            FAULTS[second](cluster, (seed + num_events) % 3)
            check_healing(cluster)
        num_events += stride
        assert num_events < MAX_TICKS
    return states


@pytest.mark.slow
@pytest.mark.parametrize("second", FAULTS)
@pytest.mark.parametrize("first", FAULTS)
def test_a_second_fault_at_any_tick_of_a_recovery_is_recovered_from(
    first: str, second: str
) -> None:
    """Without --replan, and with it; then layers change owner when a rank is lost and when it is
    back. Each request gets its whole answer, each token once."""
    for seed, replan in enumerate((False, True)):
        states = check_second_faults(seed, first, second, replan)
        assert states[State.HANDLING_FAULT]
        assert states[State.RENEWING]
        assert states[State.JOINING] or states[State.LOADING]


def test_a_second_fault_while_layers_change_owner_is_recovered_from() -> None:
    states = check_second_faults(0, "rank", "engine", replan=True, stride=5)
    redistributing = {State.REPLANNING, State.STARTING, State.JOINING, State.LOADING}
    assert redistributing & states.keys()
