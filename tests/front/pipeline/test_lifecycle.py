"""The life cycle of the engines by simulation: faults of every kind at every moment."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from serve.core.errors import (
    ClusterError,
    DisagreementError,
    EngineError,
    ModelError,
    PlanError,
)
from serve.core.layouts import Link
from serve.core.messages import Fault, Report, RingLost, Status
from serve.core.types import StageState
from serve.front.pipeline import events
from serve.front.pipeline.recovery import Interruption
from serve.front.pipeline.states import State
from serve.parent.control import Joined
from serve.parent.own_engine import fault_of
from tests.front.pipeline.cluster_simulation import (
    FACTS,
    Asked,
    PlayedCluster,
    PlayedEngine,
    check_answer,
)
from tests.front.pipeline.simulation import check_examples

CHAOS_SECONDS = 40.0
HEALING_SECONDS = 600.0


def live(cluster: PlayedCluster, num_faults: int, num_requests: int, poison_share: float) -> None:
    """Plays faults and requests at random times, then lets everything come to rest."""
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    for _ in range(num_faults):
        cluster.after(cluster.chance.uniform(0, CHAOS_SECONDS), cluster.fault)
    for _ in range(num_requests):
        when = cluster.chance.uniform(0, CHAOS_SECONDS)
        cluster.after(when, lambda: cluster.ask_any(poison_share))
    cluster.run(CHAOS_SECONDS)


def check_random_life(
    seed: int, replan: bool, num_faults: int, poison_share: float
) -> PlayedCluster:
    cluster = PlayedCluster(seed, replan=replan, min_ranks=1 + seed % 3)
    live(cluster, num_faults, 12, poison_share)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet), cluster.logged[-5:]
    assert cluster.failure is None
    num_errors = cluster.check_answers()
    # A request is given up after four faults without a token, two of them while it ran alone. Kills
    # may hit one so often by chance.
    assert poison_share or num_faults >= 4 or not num_errors
    return cluster


lives = st.tuples(
    st.integers(0, 2**32),
    st.booleans(),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.0, 0.2]),
)


def seeds(num_quick: int, num: int) -> list[Any]:
    """The first ones are for the quick suite."""
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(num_quick, num)]
    return [*range(num_quick), *slow]


@pytest.mark.parametrize("num_examples", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_each_request_ends_once_after_random_faults(num_examples: int) -> None:
    def check(*life: Any) -> None:
        check_random_life(*life)

    check_examples(check, lives, num_examples)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10))
def test_each_request_ends_once_after_faults_in_ten_thousand_random_runs(part: int) -> None:
    """In parts, each of which visits every state of a cluster that goes on."""
    states: Counter[State] = Counter()
    for seed in range(1000 * part, 1000 * (part + 1)):
        poison_share = 0.2 if seed % 3 == 2 else 0.0
        states += check_random_life(seed, seed % 2 == 1, seed % 13, poison_share).states
    assert set(State) - states.keys() == {State.FAILED, State.CLOSED}


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_faults_caused_by_a_request_do_not_use_up_restarts(seed: int) -> None:
    """Twelve requests, each of which ends four lives, beside others; five restarts are allowed."""
    cluster = PlayedCluster(seed, max_restarts=5)
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    for number in range(12):
        poison = cluster.ask(10, 5, poison=True)
        others = [cluster.ask(20, 30) for _ in range(number % 3)]
        assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
        assert check_answer(poison)
        assert not any(check_answer(other) for other in others)
    assert cluster.failure is None
    assert cluster.lifecycle.life >= 3 * 12


@pytest.mark.parametrize("seed", range(20))
def test_the_cluster_ends_after_its_last_restart_if_no_request_causes_the_kills(seed: int) -> None:
    cluster = PlayedCluster(seed, max_restarts=seed % 4, restart_window=100_000.0)
    while not cluster.failure:
        assert cluster.run(60, lambda: cluster.lifecycle.is_working or bool(cluster.failure))
        cluster.ask(5, 5)
        assert cluster.run(60, lambda: cluster.is_quiet)
        cluster.kill(cluster.chance.randrange(3))
        cluster.run(1)
    assert cluster.lifecycle.life == seed % 4
    assert cluster.lifecycle.state is State.FAILED
    if seed % 4:
        assert "given up" in str(cluster.failure)


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_only_restarts_within_the_window_are_counted(seed: int) -> None:
    cluster = PlayedCluster(seed, max_restarts=2, restart_window=100.0)
    for _ in range(8):
        assert cluster.run(60, lambda: cluster.lifecycle.is_working)
        cluster.run(60)
        cluster.kill(cluster.chance.randrange(3))
        cluster.run(1)
    assert cluster.run(60, lambda: cluster.is_quiet)


@pytest.mark.parametrize("seconds", [15.0, 2.0])
def test_occasional_broken_links_do_not_use_up_restarts(seconds: float) -> None:
    """Every engine stays. A link that hardly works still ends the cluster."""
    cluster = PlayedCluster(2, max_restarts=2)
    for life in range(8):
        cluster.run(30, lambda: cluster.lifecycle.is_working or bool(cluster.failure))
        cluster.run(seconds)
        if engine := cluster.engine_of(0):
            cluster._break_ring(cluster.membership.ring)
            cluster.say_ring_lost(engine, life)
    cluster.run(30, lambda: cluster.lifecycle.is_working or bool(cluster.failure))
    assert cluster.num_reloaded == 0
    if seconds < 10:
        assert "given up" in str(cluster.failure)
        assert cluster.lifecycle.life == 2
    else:
        assert cluster.lifecycle.is_working
        assert cluster.lifecycle.life == 8


@pytest.mark.parametrize("state", [s for s in State if s not in (State.FAILED, State.CLOSED)])
@pytest.mark.parametrize("seed", range(6))
def test_a_server_that_closes_in_any_state_takes_no_further_action(state: State, seed: int) -> None:
    cluster = PlayedCluster(seed, replan=True, min_ranks=2 + seed % 2)
    for _ in range(200):
        cluster.after(cluster.chance.uniform(0, 200), cluster.fault)
    if not cluster.run(300, lambda: cluster.lifecycle.state is state):
        pytest.skip(f"this seed does not lead to {state}")
    assert cluster.lifecycle.on(events.Close(), cluster.now).actions == ()
    assert cluster.lifecycle.state is State.CLOSED
    assert cluster.lifecycle.deadline is None
    starting = Report(cluster.lifecycle.life, Status(StageState.STARTING))
    later: list[events.Event] = [events.Ticked(100.0), events.Heard(1, Joined(7, FACTS))]
    for event in (*later, events.Heard(0, starting)):
        assert cluster.lifecycle.on(event, cluster.now + 1000).actions == ()


@pytest.mark.parametrize("seed", range(20))
def test_a_server_that_drains_during_a_recovery_finishes_running_requests(seed: int) -> None:
    """Nothing new comes while it drains, and what runs is replayed."""
    cluster = PlayedCluster(seed)
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    for _ in range(8):
        cluster.ask_any()
    cluster.run(0.5)
    cluster.kill(seed % 3)
    assert cluster.run(60, lambda: cluster.lifecycle.state is State.RENEWING)
    cluster.kill(1)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert cluster.check_answers() == 0


def begun(seed: int = 3, **flags: Any) -> PlayedCluster:
    cluster = PlayedCluster(seed, **flags)
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    return cluster


def engines_of(
    cluster: PlayedCluster,
    ranks: Sequence[int] = range(3),
) -> list[PlayedEngine | None]:
    return [cluster.engine_of(rank) for rank in ranks]


def check_recovery(cluster: PlayedCluster, *asked: Asked) -> None:
    """Waits until everything is at rest, and checks that these answers are whole."""
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert not any(check_answer(each) for each in asked)


def test_a_fault_while_ranks_return_is_handled_once_they_have_returned() -> None:
    cluster = begun()
    cluster.lose(1)
    assert cluster.run(60, lambda: cluster.lifecycle.state is State.GATHERING)
    cluster.run(1)
    cluster.kill(2)
    assert cluster.run(100, lambda: cluster.lifecycle.state is not State.GATHERING)
    assert cluster.lifecycle.state is State.HANDLING_FAULT


def test_rank_0s_engine_is_replaced_if_it_ends_while_ranks_are_missing() -> None:
    cluster = begun(replan=True, min_ranks=3, join_timeout=2.0)
    cluster.lose(1)
    is_lacking = cluster.run(60, lambda: cluster.lifecycle.state is State.TOO_FEW_RANKS)
    assert is_lacking
    cluster.run(3)
    cluster.kill(0)
    assert cluster.run(10, lambda: cluster.lifecycle.life == 2)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)


def test_rank_0s_engine_is_replaced_if_it_hangs_while_it_plans_for_fewer_ranks() -> None:
    """It ended the cluster, with the model as the reason."""
    cluster = begun(replan=True, join_timeout=2.0)
    cluster.lose(1)
    assert cluster.run(60, lambda: cluster.lifecycle.state is State.REPLANNING)
    cluster.stop(0)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)


def test_ranks_without_room_for_the_model_wait_for_other_ranks() -> None:
    cluster = begun(replan=True, roomy_ranks=3, join_timeout=2.0)
    cluster.lose(1)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert any("waiting reason" in line for line in cluster.logged)


def test_a_rank_that_does_not_return_ends_the_cluster() -> None:
    cluster = begun(return_timeout=20.0)
    asked = cluster.ask(10, 500)
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=100.0)
    cluster.run(60)
    assert "Ranks [2] did not join within 20 s" in str(cluster.failure)
    assert check_answer(asked)


def test_a_rank_with_other_program_versions_ends_the_first_start() -> None:
    cluster = PlayedCluster(0)
    cluster.facts[2] = {"mlx": "2", "config.json": "x"}
    cluster.run(60)
    assert isinstance(cluster.failure, DisagreementError)
    assert cluster.failure.rows == {
        "mlx": {0: "1", 1: "1", 2: "2"},
        "config.json": {0: "-", 1: "-", 2: "x"},
    }


def test_a_returning_rank_with_other_program_versions_is_refused() -> None:
    cluster = begun(replan=True, join_timeout=2.0)
    cluster.facts[1] = {"mlx": "2"}
    cluster.lose(1)
    cluster.run(200)
    assert cluster.membership.ring == (0, 2)
    assert cluster.lifecycle.is_working
    assert 1 in cluster.membership.joined


@pytest.mark.parametrize("replan", [True, False])
def test_a_rank_that_is_lost_repeatedly_ends_the_cluster_unless_it_replans(replan: bool) -> None:
    """Rank 0 gave up after max_restarts, although the others could do without that rank."""
    cluster = begun(replan=replan, max_restarts=3)
    for _ in range(8):
        cluster.disconnect(1, "Rank 1 is gone.", back_seconds=1.0)
        cluster.run(30, lambda: cluster.lifecycle.is_working)
    if replan:
        assert cluster.failure is None
        assert cluster.lifecycle.life == 8
    else:
        assert "The engines were restarted 3 times" in str(cluster.failure)


def test_missing_ranks_are_named() -> None:
    cluster = PlayedCluster(0, join_timeout=5.0)
    cluster.absent.add(2)
    cluster.run(60)
    assert "Ranks [2] did not join within 5 s" in str(cluster.failure)
    assert "(--join-timeout)" in str(cluster.failure)


def test_a_launched_rank_has_more_time_to_start_than_to_return() -> None:
    """A busy machine ended the launch, when --join-timeout was short for the sake of --replan."""
    cluster = PlayedCluster(0, is_launched=True, join_timeout=5.0, load_timeout=20.0)
    cluster.absent.add(2)
    cluster.run(15)
    cluster.absent.clear()
    cluster.join(2)
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    assert cluster.lifecycle.life == 0


def test_a_launched_rank_that_never_joins_is_named() -> None:
    cluster = PlayedCluster(0, is_launched=True, join_timeout=5.0, load_timeout=20.0)
    cluster.absent.add(2)
    cluster.run(60)
    assert "Ranks [2] did not join within 20 s" in str(cluster.failure)
    assert "within 20 s" in str(cluster.failure)


def test_time_to_import_mlx_does_not_count_as_time_to_join_the_ring() -> None:
    """On a busy machine every engine was replaced before it had imported MLX."""
    cluster = PlayedCluster(0, join_timeout=5.0, load_timeout=20.0)
    cluster.import_seconds = {1: 15.0}
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    assert cluster.lifecycle.life == 0


def test_an_engine_that_never_reports_that_it_joins_is_named() -> None:
    cluster = PlayedCluster(0, join_timeout=5.0, load_timeout=20.0)
    cluster.import_seconds = {1: 1000.0}
    cluster.run(60, lambda: cluster.lifecycle.life > 0)
    line = next(line for line in cluster.logged if "event=recovering" in line)
    assert "Rank 1 on h did not join the ring: it made no progress for 20 s" in line


def test_a_fault_that_no_new_engine_can_repair_ends_the_cluster_at_once() -> None:
    cluster = begun()
    asked = cluster.ask(10, 500)
    error = ModelError("Rank 1 cannot.", code="missing_tensor")
    cluster.say(1, cluster.lifecycle.life, fault_of(error))
    cluster.run(5)
    assert isinstance(cluster.failure, ModelError)
    assert (str(cluster.failure), cluster.failure.code) == (str(error), error.code)
    assert cluster.lifecycle.life == 0
    assert check_answer(asked)


def test_the_most_informative_reason_is_reported() -> None:
    """That a neighbour is gone is known first and says least."""
    cluster = begun()
    life = cluster.lifecycle.life
    cluster.say(1, life, Fault(ClusterError.exit_code, "Rank 2 is gone."))
    cluster.say(2, life, Fault(EngineError.exit_code, "The engine ran out of memory."))
    cluster.say(0, life, Fault(EngineError.exit_code, "Rank 2 sends nothing."))
    assert cluster.run(60, lambda: cluster.is_quiet)
    line = next(line for line in cluster.logged if "event=recovering" in line)
    assert "ran out of memory" in line


def test_a_better_reason_is_not_awaited_once_all_engines_have_lost_their_ring() -> None:
    cluster = begun()
    cluster.ask(10, 200)
    cluster.run(1)
    life = cluster.lifecycle.life
    for rank in (2, 0, 1):
        assert cluster.lifecycle.life == life
        cluster.say(rank, life, RingLost("A link broke."))
    assert cluster.lifecycle.state is State.HANDLING_FAULT
    cluster.on(events.Interrupted(life, Interruption(0)))
    assert cluster.lifecycle.life == life + 1
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_cluster_without_restarts_waits_for_the_last_word_of_each_engine(has_ended: bool) -> None:
    """On a busy host, the end of an engine may be known long after its neighbours lost the ring."""
    cluster = begun(max_restarts=0)
    life = cluster.lifecycle.life
    for rank in (1, 2):
        cluster.say(rank, life, RingLost("A link broke."))
    cluster.run(3)
    assert not cluster.failure
    if has_ended:
        cluster.say(0, life, Fault(EngineError.exit_code, "The engine ran out of memory."))
    cluster.run(3)
    assert isinstance(cluster.failure, EngineError if has_ended else ClusterError)


@pytest.mark.parametrize("seed", range(10))
def test_engines_and_sequences_are_kept_if_only_a_link_is_lost(seed: int) -> None:
    """Also when ranks disagree about how far the sequences are."""
    cluster = PlayedCluster(seed)
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    asked = [cluster.ask(10, 200) for _ in range(4)]
    cluster.run(1 + seed / 10)
    engines = engines_of(cluster)
    num_computed = sum(cluster.requests.scheduler.sequence(n).num_computed for n in range(4))
    cluster.reset_link(seed % 3)
    stayed = [engine for engine in engines if engine and not engine.is_stuck]
    assert cluster.run(60, lambda: cluster.lifecycle.life == 1 and cluster.lifecycle.is_working)
    assert all(cluster.engine_of(engine.rank) is engine for engine in stayed)
    assert cluster.num_stays == len(stayed) > 0
    is_whole = len(stayed) == 3
    if not is_whole:
        assert cluster.num_kept_sequences == 0
    elif cluster.can_rewind:
        assert cluster.num_kept_sequences == 4 * 3
        held = engines[0] and engines[0].model.num_held
        assert (held or 0) >= num_computed - 2 * 4, "more is computed again than was lost"
    check_recovery(cluster, *asked)


@pytest.mark.parametrize("seed", range(12))
def test_sequences_are_computed_again_if_an_engine_does_not_hold_what_it_reported(
    seed: int,
) -> None:
    """An engine that does not hold what it has reported refuses its order."""
    cluster = begun(seed)
    asked = [cluster.ask(10, 200) for _ in range(4)]
    cluster.run(1)
    for rank in range(3):
        if engine := cluster.engine_of(rank):
            engine.is_confused = True
    cluster.reset_link(seed % 3)
    check_recovery(cluster, *asked)


@pytest.mark.parametrize("rank", range(3))
def test_only_the_engine_that_ended_is_replaced(rank: int) -> None:
    cluster = begun()
    asked = [cluster.ask(10, 50) for _ in range(4)]
    cluster.run(1)
    engines = engines_of(cluster)
    cluster.kill(rank)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    stayed = [cluster.engine_of(each) is engines[each] for each in range(3)]
    assert stayed == [each != rank for each in range(3)]
    shown = [stage.has_stayed for stage in cluster.membership.stages]
    assert shown == stayed
    assert not any(check_answer(each) for each in asked)


def test_all_engines_are_replaced_after_a_fault_during_a_recovery() -> None:
    cluster = begun()
    cluster.kill(1)
    assert cluster.run(60, lambda: cluster.lifecycle.state is State.JOINING)
    assert cluster.num_stays == 2
    cluster.kill(2)
    assert cluster.run(60, lambda: cluster.lifecycle.life == 2 and cluster.lifecycle.is_working)
    assert cluster.num_stays == 2


@pytest.mark.parametrize("rank", range(3))
def test_only_the_engine_that_hangs_is_replaced_after_a_stall(rank: int) -> None:
    cluster = begun()
    asked = cluster.ask(10, 500)
    engines = engines_of(cluster)
    cluster.run(1)
    cluster.stop(rank)
    assert cluster.run(60, lambda: cluster.lifecycle.life == 1 and cluster.lifecycle.is_working)
    stayed = [cluster.engine_of(each) is engines[each] for each in range(3)]
    assert stayed == [each != rank for each in range(3)]
    check_recovery(cluster, asked)


def test_all_engines_are_replaced_after_a_stall_that_no_engine_has_caused() -> None:
    """A message was lost, and every engine waits for the next step."""
    cluster = begun()
    asked = cluster.ask(10, 500)
    cluster.run(1)
    cluster._break_ring(cluster.membership.ring)
    assert cluster.run(60, lambda: cluster.lifecycle.life == 1 and cluster.lifecycle.is_working)
    assert cluster.num_stays == 0
    check_recovery(cluster, asked)


@pytest.mark.parametrize("seed", range(10))
def test_engines_and_sequences_are_kept_if_parents_lose_their_connection(
    seed: int,
) -> None:
    """The ring and this connection share a cable."""
    cluster = begun(seed)
    asked = [cluster.ask(10, 200) for _ in range(4)]
    cluster.run(1 + seed / 10)
    engines = engines_of(cluster)
    for rank in (1, 2)[: 1 + seed % 2]:
        cluster.cut(rank)
    assert cluster.run(60, lambda: cluster.lifecycle.life == 1 and cluster.lifecycle.is_working)
    assert engines_of(cluster) == engines
    assert cluster.num_stays == 3
    if cluster.can_rewind:
        assert cluster.num_kept_sequences == 4 * 3
    check_recovery(cluster, *asked)


@pytest.mark.parametrize("state", [State.RENEWING, State.GATHERING, State.STARTING])
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_lost_before_engines_get_orders_is_awaited(
    seed: int,
    state: State,
) -> None:
    """All engines were replaced then. Two connections over one cable do not break at once."""
    cluster = begun(2 * seed)
    asked = [cluster.ask(10, 200) for _ in range(4)]
    cluster.run(1)
    engines = engines_of(cluster)
    if state is State.GATHERING:
        cluster.cut(2)
    else:
        cluster.renew_seconds = 4.0
        cluster._break_ring(cluster.membership.ring)
        cluster.say_ring_lost(engines[0] or cluster.parents[1].engine, 0)
    assert cluster.run(60, lambda: cluster.lifecycle.state is state)
    cluster.cut(1)
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    assert cluster.lifecycle.life == 1
    assert engines_of(cluster) == engines
    assert cluster.num_kept_sequences == 4 * 3
    check_recovery(cluster, *asked)


def test_layers_are_planned_again_if_a_rank_is_lost_while_a_plan_is_made() -> None:
    """It is awaited as any other. Nobody waits for its engine, and no engine is replaced."""
    cluster = begun(4, replan=True, join_timeout=2.0)
    asked = cluster.ask(10, 500)
    cluster.run(1)
    engine = cluster.engine_of(0)
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=100.0)
    assert cluster.run(30, lambda: cluster.lifecycle.state is State.REPLANNING)
    cluster.disconnect(1, "Rank 1 is gone.", back_seconds=100.0)
    assert cluster.run(10, lambda: cluster.membership.ring == (0,))
    assert cluster.run(30, lambda: cluster.lifecycle.is_working)
    assert cluster.lifecycle.life == 1
    assert cluster.engine_of(0) is engine
    check_recovery(cluster, asked)


def test_the_engine_of_a_disconnected_rank_is_kept_with_the_flag_replan() -> None:
    """It moves layers back to it, and reads only those that it lacks."""
    cluster = begun(4, replan=True, join_timeout=2.0)
    asked = cluster.ask(10, 2000)
    cluster.run(1)
    engines = engines_of(cluster)
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=20.0, will_return=True)
    assert cluster.run(30, lambda: cluster.membership.ring == (0, 1))
    assert cluster.run(HEALING_SECONDS, lambda: cluster.membership.ring == (0, 1, 2))
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert engines_of(cluster) == engines
    assert cluster.lifecycle.life == 2
    assert not check_answer(asked)


def test_a_long_prompt_is_not_blamed_for_links_that_break() -> None:
    """It gets no token for longer than it takes the link to break four times."""
    cluster = begun(2)
    asked = cluster.ask(1000, 5)
    for life in range(6):
        cluster.run(0.5)
        cluster._break_ring(cluster.membership.ring)
        engine = cluster.engine_of(0)
        assert engine
        cluster.say_ring_lost(engine, life)
        assert cluster.run(60, lambda: not cluster.lifecycle.is_working)
        assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    assert cluster.lifecycle.life == 6
    check_recovery(cluster, asked)


def test_a_kept_sequence_is_not_blamed_for_a_fault_before_its_next_step() -> None:
    """No step of it has run since the first fault, so it need not run alone."""
    cluster = PlayedCluster(2)
    assert cluster.run(60, lambda: cluster.lifecycle.is_working)
    asked = [cluster.ask(10, 50) for _ in range(3)]
    cluster.run(1)
    cluster.reset_link(0)
    assert cluster.run(60, lambda: cluster.lifecycle.state is State.JOINING)
    assert all(cluster.requests.scheduler.sequence(n).is_held for n in range(3))
    cluster.kill(1)
    assert cluster.run(60, lambda: cluster.lifecycle.life == 2 and cluster.lifecycle.is_working)
    assert cluster.requests._fault_blame.alone is None
    check_recovery(cluster, *asked)


def test_kept_sequences_run_before_those_that_are_computed_again() -> None:
    """Kept sequences occupy memory that an earlier one in the queue would wait for endlessly."""
    cluster = begun()
    for _ in range(2):
        cluster.ask(60, 30)
    requests = cluster.requests
    requests.interrupt()
    requests.scheduler.settle(3, max_held_tokens=100)
    assert requests.keep([{1: 59}] * 3) == {1: 59}
    step = requests.scheduler.schedule()
    assert step is not None
    assert step.rows[0].sequence == 1


def test_all_engines_are_replaced_if_a_new_engine_has_read_other_model_files() -> None:
    """One half of a model would be the old one."""
    cluster = begun()
    asked = cluster.ask(10, 50)
    cluster.run(1)
    engines = engines_of(cluster)
    cluster.files = "2"
    cluster.kill(1)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert not any(cluster.engine_of(each) is engines[each] for each in range(3))
    assert any("files on rank 1 have changed" in line for line in cluster.logged)
    assert not check_answer(asked)


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_engines_are_kept_with_the_flag_replan_when_layers_change_owner(seed: int) -> None:
    """They keep layers, and no sequence goes on with keys and values of other layers."""
    cluster = begun(seed, replan=True, join_timeout=2.0)
    asked = [cluster.ask(10, 2000) for _ in range(3)]
    cluster.run(1)
    engines = engines_of(cluster, (0, 1))
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=20.0)
    assert cluster.run(30, lambda: cluster.membership.ring == (0, 1))
    assert cluster.run(30, lambda: cluster.lifecycle.is_working)
    assert engines_of(cluster, (0, 1)) == engines
    assert cluster.num_reloaded == 2
    assert cluster.run(HEALING_SECONDS, lambda: cluster.membership.ring == (0, 1, 2))
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert engines_of(cluster, (0, 1)) == engines
    assert cluster.num_reloaded == 4
    assert cluster.num_kept_sequences == 0
    assert cluster.lifecycle.life == 2
    assert not any(check_answer(each) for each in asked)


def test_sequences_are_not_kept_if_an_engine_leaves_the_ring_after_planning() -> None:
    """Its report belongs to its old layers."""
    cluster = begun(2, replan=True, join_timeout=2.0)
    assert cluster.can_rewind
    asked = cluster.ask(10, 500)
    cluster.run(1)
    cluster.renew_seconds = 4.0
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=60.0)
    assert cluster.run(30, lambda: cluster.membership.ring == (0, 1))
    assert not cluster.membership.ranks[1].has_stayed
    assert cluster.run(30, lambda: cluster.lifecycle.is_working)
    assert cluster.membership.ranks[1].has_stayed
    assert (cluster.num_reloaded, cluster.num_kept_sequences) == (2, 0)
    check_recovery(cluster, asked)


def test_rank_0s_engine_is_kept_while_the_model_does_not_fit_the_remaining_ranks() -> None:
    """Its plan is refused, and it waits with its layers until the lost rank is back."""
    cluster = begun(replan=True, min_ranks=3, join_timeout=2.0)
    asked = cluster.ask(10, 50)
    cluster.run(1)
    engines = engines_of(cluster, (0, 1))
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=20.0)
    assert cluster.run(30, lambda: cluster.lifecycle.state is State.TOO_FEW_RANKS)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert engines_of(cluster, (0, 1)) == engines
    assert cluster.num_reloaded == 0
    assert cluster.lifecycle.life == 1
    assert not check_answer(asked)


def test_layers_are_planned_again_if_a_rank_returned_while_a_plan_was_refused() -> None:
    """It waited until the end of return_timeout for a rank that was there."""
    cluster = begun(replan=True, min_ranks=3, join_timeout=2.0)
    asked = cluster.ask(10, 50)
    cluster.run(1)
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=1000.0)
    assert cluster.run(30, lambda: cluster.lifecycle.state is State.REPLANNING)
    cluster.join(2)
    assert cluster.lifecycle.state is State.REPLANNING
    assert cluster.run(30, lambda: cluster.is_quiet)
    assert not check_answer(asked)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("state", [State.STARTING, State.JOINING, State.LOADING, State.PREPARING])
def test_all_engines_are_replaced_after_a_fault_while_layers_change_owner(
    state: State, rank: int
) -> None:
    cluster = begun(5, replan=True, join_timeout=2.0)
    asked = cluster.ask(10, 500)
    cluster.run(1)
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=30.0)
    assert cluster.run(30, lambda: cluster.membership.ring == (0, 1))
    cluster.run(30, lambda: cluster.lifecycle.state is state)
    cluster.kill(rank)
    check_recovery(cluster, asked)


def test_all_engines_are_replaced_if_model_files_changed_before_a_replan() -> None:
    cluster = begun(replan=True, join_timeout=2.0)
    asked = cluster.ask(10, 500)
    cluster.run(1)
    cluster.files = "2"
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=30.0)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    files = {engine.files for rank in range(3) if (engine := cluster.engine_of(rank))}
    assert files == {"2"}
    assert not check_answer(asked)


@pytest.mark.parametrize("seed", range(10))
def test_a_fault_reported_before_layers_change_owner_is_still_handled(seed: int) -> None:
    """The new life for other layers made it forget the fault."""
    cluster = begun(seed, replan=True, join_timeout=2.0)
    cluster.kill(1)
    assert cluster.run(30, lambda: cluster.lifecycle.state is State.RENEWING)
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=60.0)
    assert cluster.run(30, lambda: cluster.lifecycle.state is State.GATHERING)
    assert cluster.membership.ranks[0].has_stayed
    assert cluster.run(1, lambda: (new := cluster.engine_of(1)) is not None and new.runs)
    cluster.kill(1)
    assert cluster.run(30, lambda: cluster.lifecycle.state is not State.GATHERING)
    # Nothing is waited for if the reason is known already.
    assert cluster.lifecycle.state in (State.HANDLING_FAULT, State.RENEWING)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)


def test_no_rank_counts_as_silent_after_rank_0_itself_was_suspended() -> None:
    """Rank 0's parent itself: what came meanwhile is read first."""
    cluster = begun()
    lifecycle = cluster.lifecycle
    assert lifecycle.deadline is not None
    assert not lifecycle.on(events.Ticked(0.0), lifecycle.deadline + 100).actions
    assert lifecycle.is_working
    assert lifecycle.on(events.Ticked(0.0), lifecycle.deadline).actions
    assert lifecycle.state is State.HANDLING_FAULT


def test_only_parents_that_hang_are_reported_to_the_launcher() -> None:
    cluster = begun()
    cluster.ask(10, 5000)
    cluster.stop_parent(1)
    cluster.stop(1)
    cluster.stop(2)
    forgotten = cluster.forgotten
    assert cluster.run(60, lambda: cluster.lifecycle.life == 1)
    assert forgotten == [(1, True)]


def layout_reasons(cluster: PlayedCluster) -> list[str]:
    start = "event=layout reason="
    lines = [line for line in cluster.logged if line.startswith(start)]
    return [json.loads(line.removeprefix(start)) for line in lines]


@pytest.mark.parametrize("is_killed", [False, True])
def test_auto_layout_is_planned_only_once_when_all_ranks_have_joined(is_killed: bool) -> None:
    """The links cannot be measured before that, and the layout stays after a fault."""
    cluster = begun(tensor_parallel_size="auto")
    if is_killed:
        cluster.kill(1)
        assert cluster.run(60, lambda: not cluster.lifecycle.is_working)
        assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert [link is not None for link in cluster.links] == [True]
    assert sum("event=layout" in line for line in cluster.logged) == 1


@pytest.mark.parametrize("seed", range(4))
def test_auto_layout_is_planned_by_a_new_engine_if_the_first_engine_ends_before_ranks_join(
    seed: int,
) -> None:
    """The dead engine was asked for the plan, and the cluster failed after load_timeout."""
    cluster = PlayedCluster(seed, tensor_parallel_size="auto")
    cluster.absent.add(1)
    lifecycle = cluster.lifecycle
    assert cluster.run(60, lambda: lifecycle.state is State.GATHERING)
    cluster.kill(0)
    cluster.run(2)
    assert lifecycle.state is State.GATHERING
    cluster.absent.clear()
    cluster.join(1)
    assert cluster.run(15, lambda: cluster.is_quiet), cluster.failure
    assert lifecycle.life == 1
    assert [link is not None for link in cluster.links] == [True]
    assert any("signal 9" in line for line in cluster.logged)


def test_the_cluster_ends_if_rank_0s_engine_ends_while_links_are_measured() -> None:
    """As when it ends while it plans."""
    cluster = PlayedCluster(1, tensor_parallel_size="auto")
    cluster.measure_seconds = 5.0
    assert cluster.run(60, lambda: cluster.num_measured == 1)
    cluster.kill(0)
    cluster.run(60)
    assert isinstance(cluster.failure, EngineError)
    assert "signal 9" in str(cluster.failure)
    assert not cluster.links


@pytest.mark.parametrize("back_seconds", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("seed", range(4))
def test_links_are_measured_again_if_a_rank_was_lost_during_the_measurement(
    seed: int,
    back_seconds: float,
) -> None:
    """The server had stages without shards for its whole life, and did not say why."""
    cluster = PlayedCluster(seed, tensor_parallel_size="auto", join_timeout=20.0)
    cluster.measure_seconds = 5.0
    assert cluster.run(60, lambda: cluster.num_measured == 1)
    cluster.disconnect(1, "Rank 1 is gone.", back_seconds)
    assert cluster.run(60, lambda: cluster.is_quiet), cluster.failure
    assert cluster.num_measured == 2
    assert [link is not None for link in cluster.links] == [True]
    assert layout_reasons(cluster) == ["Chosen."]


def test_a_link_that_cannot_be_measured_is_logged_once() -> None:
    cluster = PlayedCluster(1, tensor_parallel_size="auto")
    cluster.silent = 2
    assert cluster.run(60, lambda: cluster.is_quiet)
    assert cluster.links == [None]
    (reason,) = layout_reasons(cluster)
    assert "rank 2" in reason


def test_fewer_shards_are_planned_while_a_rank_is_lost() -> None:
    """Three ranks have no stages of two shards; two ranks have one. Stages and shards are those of
    the ring, in which some ranks of the launch are missing."""
    cluster = begun(tensor_parallel_size="2", num_ranks=4, replan=True, join_timeout=2.0)
    asked = cluster.ask(10, 50)
    cluster.run(1)
    cluster.disconnect(1, "Rank 1 is gone.", back_seconds=60.0)
    assert cluster.run(30, lambda: cluster.membership.ring == (0, 2, 3))
    assert layout(cluster) == {0: (0, 0), 2: (1, 0), 3: (2, 0)}
    assert cluster.run(30, lambda: cluster.lifecycle.is_working)
    assert cluster.membership.num_shards == 1
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=60.0)
    assert cluster.run(30, lambda: cluster.membership.ring == (0, 3))
    assert layout(cluster) == {0: (0, 0), 3: (0, 1)}
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert layout(cluster) == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    assert not check_answer(asked)


def layout(cluster: PlayedCluster) -> dict[int, tuple[int, int]]:
    """The stage and the shard of each rank that takes part."""
    plans = [stage.plan for stage in cluster.membership.stages if stage.plan]
    return {plan.rank: (plan.stage, plan.shard) for plan in plans}


@pytest.mark.parametrize("seed", range(4))
def test_engines_with_whole_layers_are_replaced_if_shards_are_planned(seed: int) -> None:
    """The lost rank is awaited only once for that."""
    cluster = begun(seed, tensor_parallel_size="2", num_ranks=4, replan=True, join_timeout=20.0)
    cluster.disconnect(1, "Rank 1 is gone.", back_seconds=500.0)
    assert cluster.run(60, lambda: cluster.membership.ring == (0, 2, 3))
    assert cluster.run(30, lambda: cluster.lifecycle.is_working)
    asked = cluster.ask(10, 2000)
    cluster.run(1)
    engines = engines_of(cluster, (0, 3))
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=500.0)
    assert cluster.run(23, lambda: cluster.membership.ring == (0, 3))
    assert cluster.run(10, lambda: cluster.lifecycle.is_working)
    assert cluster.membership.num_shards == 2
    for old, new in zip(engines, engines_of(cluster, (0, 3)), strict=True):
        assert new is not old
    check_recovery(cluster, asked)


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_that_reports_late_that_it_stayed_gets_no_shard(
    seed: int,
) -> None:
    """The plan is known already, and rank 0 has a new engine, so nothing else is waited for."""
    cluster = begun(seed, tensor_parallel_size="2", num_ranks=4, replan=True, join_timeout=2.0)
    cluster.disconnect(1, "Rank 1 is gone.", back_seconds=10.0)
    assert cluster.run(9, lambda: cluster.membership.ring == (0, 2, 3))
    assert cluster.run(30, lambda: cluster.lifecycle.is_working)
    assert cluster.run(30, lambda: 1 in cluster.membership.joined)
    cluster.kill(0)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert cluster.membership.num_shards == 2


@pytest.mark.parametrize("tensor_parallel_size", ["2", "auto"])
@pytest.mark.parametrize("seed", range(10))
def test_planning_shards_again_comes_to_an_end_after_random_faults(
    seed: int, tensor_parallel_size: str
) -> None:
    cluster = PlayedCluster(
        seed,
        num_ranks=4,
        replan=True,
        min_ranks=1 + seed % 4,
        tensor_parallel_size=tensor_parallel_size,
    )
    live(cluster, num_faults=seed, num_requests=12, poison_share=0.0)
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet), cluster.logged[-5:]
    assert cluster.failure is None
    assert seed >= 4 or not cluster.check_answers()


def test_auto_layout_for_fewer_ranks_uses_the_earlier_measurement_of_the_link() -> None:
    cluster = begun(tensor_parallel_size="auto", replan=True, join_timeout=2.0)
    cluster.disconnect(2, "Rank 2 is gone.", back_seconds=20.0)
    assert cluster.run(30, lambda: cluster.membership.ring == (0, 1))
    assert cluster.run(HEALING_SECONDS, lambda: cluster.is_quiet)
    assert cluster.num_measured == 1
    assert cluster.links == [Link(0.0002, 1e9)] * 2
    assert len(cluster.shown) == 3
    assert layout_reasons(cluster) == ["Chosen."] * 3


def test_layers_that_shards_cannot_divide_are_logged_in_one_line() -> None:
    cluster = PlayedCluster(1, num_ranks=2, tensor_parallel_size="2")
    cluster.warning = "Nothing is divided."
    assert cluster.run(60, lambda: cluster.is_quiet)
    lines = [line for line in cluster.logged if "Nothing is divided." in line]
    assert lines == ['event=not_divided reason="Nothing is divided."']


def test_shards_of_a_stage_that_divide_layers_differently_end_the_cluster() -> None:
    """Their sums match only by their order, so the answers would be wrong."""
    cluster = PlayedCluster(1, num_ranks=4, tensor_parallel_size="2")
    cluster.shardings = {3: "2"}
    cluster.run(60)
    assert isinstance(cluster.failure, PlanError)
    assert "Rank 2" in str(cluster.failure)
    assert "rank 3" in str(cluster.failure)
    assert cluster.lifecycle.life == 0


def test_different_stages_may_divide_their_layers_differently() -> None:
    cluster = PlayedCluster(1, num_ranks=4, tensor_parallel_size="2")
    cluster.shardings = {2: "2", 3: "2"}
    assert cluster.run(60, lambda: cluster.is_quiet)
