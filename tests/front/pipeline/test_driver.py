"""Lives of engines that end at any moment: real processes and parents, without MLX."""

import asyncio
import os
import random
import signal
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve.core.config import Address, Cluster
from serve.core.errors import (
    BrigadeError,
    ClusterError,
    EngineError,
    ModelError,
    PlanError,
    UnavailableError,
)
from serve.core.plan import KvRoom
from serve.core.types import Event, Sampling
from serve.front.pipeline import watch as watch_module
from serve.front.pipeline.engine import Engine
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.states import State
from serve.parent import engine as engine_module
from serve.parent import member as member_module
from serve.parent import own_engine as own_engine_module
from serve.parent import pings, spare
from serve.parent.engine import EngineProcess
from serve.parent.member import run_member
from tests.configs import changed, serve_config
from tests.errors import fails
from tests.front.pipeline.stage_model import next_token
from tests.ports import free_ports

pytestmark = pytest.mark.anyio
FACTS = {"mlx": "1"}


class Silent:
    def planned(self, stages: Any) -> None: ...

    def progressed(self, stage: Any) -> None: ...

    def loaded(self, stages: Any, room: int) -> None: ...

    def warming_up(self, done: int, total: int) -> None: ...

    def ready(self) -> None: ...


@pytest.fixture(autouse=True)
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process is left, however a test ends."""
    monkeypatch.setattr(EngineProcess, "program", "tests.front.pipeline.standin_engine")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    yield
    left = engines()
    for process in left:
        process.kill()
    assert not left


Members = dict[int, "asyncio.Task[None]"]


@asynccontextmanager
async def cluster(**flags: Any) -> AsyncIterator[Engine]:
    async with ranks(**flags) as (engine, _, _start):
        yield engine


@asynccontextmanager
async def ranks(**flags: Any) -> AsyncIterator[tuple[Engine, Members, Callable[[int], None]]]:
    """Three ranks' parents in this process, each with an engine process of its own; and what
    starts one of them again."""
    settings: dict[str, Any] = {"max_restarts": 1000, "join_timeout": 60.0, "warms_up": False}
    settings |= {"keeps_spare_engine": False, **flags}
    config = serve_config(**settings)
    address = Address("127.0.0.1", free_ports(1)[0])
    rank_0 = Cluster(0, 3, ("127.0.0.1",) * 3, (address,), "secret")
    engine = Engine(config, rank_0, Path("."), FACTS, Silent())
    await engine.listen()
    engine.start()
    members: Members = {}

    def start(rank: int) -> None:
        member = run_member(config, replace(rank_0, rank=rank), FACTS)
        members[rank] = asyncio.create_task(member)

    start(1)
    start(2)
    try:
        yield engine, members, start
    finally:
        try:
            await engine.close()
        finally:
            await asyncio.wait_for(asyncio.gather(*members.values(), return_exceptions=True), 60)


async def ready(engine: Engine, seconds: float = 60.0) -> None:
    async def wait() -> None:
        while engine.ready_reason():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), seconds)


def prompt(length: int, max_tokens: int, num: int = 1) -> Prompt:
    samplings = (Sampling(temperature=0),) * num
    return Prompt(list(range(1, length + 1)), max_tokens, samplings, frozenset())


async def collect(engine: Engine, wanted: Prompt) -> None:
    """Checks that an answer is whole: what the model says, each token once, in order."""
    generation = engine.submit([wanted])
    outputs: dict[int, list[int]] = {n: [] for n in range(len(wanted.samplings))}
    ids = [sequence.id for sequence in generation._sequences]
    async for number, event in generation:
        assert isinstance(event, Event)
        if event.token is not None:
            outputs[number].append(event.token)
        await asyncio.sleep(0)
    start = len(wanted.ids)
    for number, output in outputs.items():
        places = range(start, start + wanted.max_tokens)
        assert output == [next_token(ids[number], place) for place in places]


def engines() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if is_engine(child)]


def is_engine(process: psutil.Process) -> bool:
    try:
        is_alive = process.status() != psutil.STATUS_ZOMBIE
        return is_alive and EngineProcess.program in process.cmdline()
    except psutil.NoSuchProcess:
        return False  # It has just ended.


async def with_spares() -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Waits until each rank has a spare engine. Returns the engines that work, and the spare ones,
    which are younger."""
    await until(lambda: len(engines()) == 6)
    by_age = sorted(engines(), key=psutil.Process.create_time)
    return by_age[:3], by_age[3:]


def kill_one(chance: random.Random) -> None:
    try:
        if victims := engines():
            chance.choice(victims).kill()
    except psutil.NoSuchProcess:
        return  # It has just ended by itself.


@pytest.mark.parametrize("max_seconds", [100.0, 0.0])
async def test_auto_layout_is_chosen_after_measuring_the_links_of_all_ranks(
    max_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Over real connections. A link that cannot be measured in time is named."""
    monkeypatch.setattr(pings, "_MAX_SECONDS", max_seconds)
    caplog.set_level("INFO")
    async with cluster(tensor_parallel_size="auto") as engine:
        await ready(engine)
        await collect(engine, prompt(5, 5))
    layouts = [line for line in caplog.messages if "event=layout" in line]
    assert len(layouts) == (max_seconds == 0)
    assert all("rank 1" in line for line in layouts)


@pytest.mark.long
async def test_answers_are_complete_after_kills_at_any_moment() -> None:
    """Also in the middle of a start, and of a recovery."""
    chance = random.Random(11)
    async with cluster() as engine:
        await ready(engine)
        shapes = [
            (chance.randint(1, 60), chance.randint(100, 250), n % 4 // 3 + 1) for n in range(8)
        ]
        answers = [asyncio.create_task(collect(engine, prompt(*shape))) for shape in shapes]
        for _ in range(12):
            await asyncio.sleep(chance.choice([0.0, 0.05, 0.2, 0.6]))
            kill_one(chance)
        await asyncio.wait_for(asyncio.gather(*answers), 60)
        assert engine.pipeline()["num_restarts"] >= 3
        assert engine.pipeline()["num_running"] == 0
        assert len(engines()) == 3


@asynccontextmanager
async def cluster_with_spares(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Engine, list[psutil.Process], list[psutil.Process]]]:
    """A cluster that works, whose ranks have spare engines: rank 0's engine, the processes that
    work, and the spare ones."""
    monkeypatch.setattr(spare, "_QUIET_SECONDS", 0.0)
    async with cluster(keeps_spare_engine=True) as engine:
        await ready(engine)
        working, spares = await with_spares()
        yield engine, working, spares


async def test_a_lost_engine_is_replaced_by_the_spare_engine_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster_with_spares(monkeypatch) as (engine, working, spares):
        for victim in working:
            victim.kill()
        await asyncio.wait_for(collect(engine, prompt(10, 20)), 60)
        assert {process.pid for process in spares} <= {process.pid for process in engines()}


async def test_each_rank_is_asked_to_start_a_spare_engine_once_in_each_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster_with_spares(monkeypatch) as (engine, working, spares):
        for process in spares:
            process.kill()
        await until(lambda: len(engines()) == 3)
        await asyncio.sleep(0.5)  # Each engine has reported several times.
        assert {process.pid for process in engines()} == {process.pid for process in working}
        working[0].kill()
        await with_spares()
        await ready(engine)


async def test_all_processes_and_connections_are_closed_even_if_an_engine_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[EngineProcess] = []
    start = EngineProcess.start

    async def noted() -> EngineProcess:
        started.append(await start())
        return started[-1]

    monkeypatch.setattr(EngineProcess, "start", noted)
    async with cluster_with_spares(monkeypatch) as (engine, _, _):
        copies = Path(engine._driver._copies.name)
        assert copies.exists()
        with monkeypatch.context() as patch:
            # Nobody waits for the end of a process that was killed.
            patch.setattr(engine_module, "_END_SECONDS", 0.0)
            patch.setattr(engine_module, "_KILLED_SECONDS", 0.0)
            with fails(EngineError, "engine"):
                await engine.close()
            await until(lambda: not engines())
        assert not copies.exists()
    # They have ended, but asyncio may not know it yet, and would warn of them in a later test.
    await asyncio.gather(*(each.wait() for each in started))


async def test_requests_that_arrive_during_a_recovery_wait_for_its_end() -> None:
    async with cluster() as engine:
        await ready(engine)
        began = time.monotonic()
        engines()[0].kill()
        while not engine.ready_reason():
            await asyncio.sleep(0.001)
        await asyncio.wait_for(collect(engine, prompt(10, 20)), 60)
        assert engine.pipeline()["num_restarts"] == 1
        assert 0 < engine.pipeline()["recovery_seconds"] < time.monotonic() - began


@pytest.mark.long
async def test_a_request_whose_client_leaves_during_a_recovery_gets_one_more_token() -> None:
    """That token tells whether its request is what ended the engines."""
    async with cluster() as engine:
        await ready(engine)
        generation = engine.submit([prompt(10, 5000)])
        await generation.__anext__()
        engines()[0].kill()
        while not engine.ready_reason():
            await asyncio.sleep(0.001)
        generation.close()
        await ready(engine)
        await until(lambda: engine.pipeline()["num_running"] == 0, 2.0)
        sequence = generation._sequences[0]
        assert len(sequence.output) < 1000
        assert engine.pipeline()["num_waiting"] == 0


@pytest.mark.long
async def test_requests_that_crash_engines_are_found_even_if_their_clients_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POISON", "1500")
    async with cluster(max_restarts=2) as engine:
        await ready(engine)
        poison = replace(prompt(10, 5), ids=[1500] * 20)
        for number in range(3):
            generation = engine.submit([poison])
            await until(lambda n=number: engine.pipeline()["num_restarts"] > 3 * n)
            generation.close()
            await until(lambda n=number: engine.pipeline()["num_restarts"] == 3 * n + 3)
            await ready(engine)
        assert not engine.pipeline()["num_waiting"]
        await asyncio.wait_for(collect(engine, prompt(10, 30)), 60)


@pytest.mark.long
async def test_too_many_restarts_end_the_cluster_with_the_reason() -> None:
    async with cluster(max_restarts=2) as engine:
        await ready(engine)
        generation = engine.submit([prompt(10, 100_000)])
        for _ in range(3):
            await ready(engine)
            engines()[-1].kill()
            while not engine.ready_reason():
                await asyncio.sleep(0.001)
        error = await asyncio.wait_for(engine.failed(), 60)
        assert isinstance(error, EngineError)
        assert "ended by signal 9. The engines were restarted 2 times in 300 s" in str(error)
        with pytest.raises(EngineError):
            async for _ in generation:
                pass
        with fails(UnavailableError, "unavailable", match="the cluster failed"):
            engine.submit([prompt(10, 5)])


async def test_engines_stay_if_a_connection_between_parents_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that breaks when the engines have left their ring and have no order yet."""
    may_return, join_again = asyncio.Event(), member_module._join_again

    async def held(*given: Any) -> Any:
        await may_return.wait()
        return await join_again(*given)

    monkeypatch.setattr(member_module, "_join_again", held)
    monkeypatch.setattr(engine_module, "_LEAVE_SECONDS", 60.0)
    monkeypatch.setattr(engine_module, "_SILENT_SECONDS", 60.0)
    async with cluster() as engine:
        await ready(engine)
        before = {process.pid for process in engines()}
        answer = asyncio.create_task(collect(engine, prompt(10, 300)))
        await asyncio.sleep(0.1)
        control = engine._driver._engines._control
        control.disconnect(1)
        await until(lambda: engine._lifecycle.state is State.GATHERING)
        await until(lambda: engine._membership.ranks[2].has_stayed)
        control.disconnect(2)
        may_return.set()
        await asyncio.wait_for(answer, 60)
        await ready(engine)
        assert engine.pipeline()["num_restarts"] == 1
        assert {process.pid for process in engines()} == before
        assert all(stage.has_stayed for stage in engine._membership.stages)


async def test_engines_that_must_finish_a_long_step_before_they_leave_the_ring_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They can leave their ring only when the step is done. Meanwhile their parents give signs,
    each of which gives them more time."""
    computing: set[int] = set()
    receive = EngineProcess.receive

    async def noted(process: EngineProcess) -> Any:
        message = await receive(process)
        if process._computes:
            computing.add(process.pid)
        return message

    deadlines: set[float | None] = set()

    def has_more_time(engine: Engine) -> bool:
        deadlines.add(engine._lifecycle.deadline)
        return len(deadlines) > 5

    monkeypatch.setattr(EngineProcess, "receive", noted)
    monkeypatch.setattr(engine_module, "_LEAVE_SECONDS", 60.0)
    monkeypatch.setattr(engine_module, "_SILENT_SECONDS", 60.0)
    monkeypatch.setattr(own_engine_module, "_SIGN_SECONDS", 0.1)
    monkeypatch.setattr(watch_module, "RENEW_SECONDS", 60.0)
    monkeypatch.setenv("LEAVE_AFTER", str(tmp_path))
    async with cluster() as engine:
        await ready(engine)
        before = {process.pid for process in engines()}
        engine._driver._engines._control.disconnect(1)
        await until(lambda: computing == before)
        # From now on, an engine that does not compute would be given up at once.
        monkeypatch.setattr(engine_module, "_LEAVE_SECONDS", 0.0)
        assert engine._driver._engines._own.process
        own = engine._driver._engines._own.process.pid
        (tmp_path / str(own)).touch()
        await until(lambda: engine._lifecycle.state is State.STARTING)
        await until(lambda: has_more_time(engine))
        assert engine._lifecycle.state is State.STARTING
        for pid in before - {own}:
            (tmp_path / str(pid)).touch()
        await until(lambda: engine.pipeline()["num_restarts"] == 1)
        await ready(engine)
        assert {process.pid for process in engines()} == before
        assert engine.pipeline()["num_restarts"] == 1


async def test_creating_sequence_ids_needs_no_memory() -> None:
    async with cluster() as engine:
        await ready(engine)
        tracemalloc.start()
        for _ in range(10_000):
            next(engine._requests._sequence_ids)
        num_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert num_bytes < 100_000


async def lose(member: "asyncio.Task[None]") -> None:
    member.cancel()
    await asyncio.wait({member})


def layers(engine: Engine) -> list[tuple[int, list[int]]]:
    return [(stage["rank"], stage["layers"]) for stage in engine.pipeline()["stages"]]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), seconds)


@pytest.mark.slow
async def test_remaining_ranks_share_the_layers_until_lost_ranks_return(
    tmp_path: Path,
) -> None:
    flags = {"lora": ("poet=/p",), "adapter_root": tmp_path, "split": "2,4,6"}
    async with ranks(replan=True, join_timeout=2.0, **flags) as (engine, members, start):
        await ready(engine)
        whole = layers(engine)
        answers = [asyncio.create_task(collect(engine, prompt(10, 2000))) for _ in range(3)]
        await asyncio.sleep(0.1)
        await lose(members[1])
        await until(lambda: layers(engine) == [(0, [6, 12]), (2, [0, 6])])
        await ready(engine)
        await collect(engine, prompt(20, 30))
        await lose(members[2])
        await until(lambda: layers(engine) == [(0, [0, 12])])
        await ready(engine)
        await engine.adapters.load("pirate", "pirate", False)
        start(2)
        start(1)
        await until(lambda: layers(engine) == whole)
        await ready(engine)
        await asyncio.wait_for(asyncio.gather(*answers), 60)
        await collect(engine, prompt(20, 30))
        described = engine.adapters.registry.described()
        assert {a["name"]: a["version"] for a in described} == {"poet": 1, "pirate": 2}
        assert [len(a["bytes"]) for a in described] == [3, 3]


async def ring_after(
    caplog: pytest.LogCaptureFixture, lost: Sequence[int], returns: int
) -> list[int]:
    """The ranks that answer in the end, if the remaining ones are too few until one returns."""
    async with ranks(replan=True, join_timeout=2.0) as (engine, members, start):
        await ready(engine)
        answer = asyncio.create_task(collect(engine, prompt(10, 500)))
        for rank in lost:
            await lose(members[rank])
        await until(lambda: "event=waiting" in caplog.text)
        start(returns)
        await asyncio.wait_for(answer, 60)
        return [rank for rank, _ in layers(engine)]


@pytest.mark.long
async def test_ranks_that_are_too_small_for_the_model_wait_for_other_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MIN_RANKS", "3")
    assert await ring_after(caplog, [2], 2) == [0, 1, 2]
    assert "Too large." in caplog.text


@pytest.mark.long
async def test_a_ring_is_formed_as_soon_as_enough_ranks_have_returned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MIN_RANKS", "2")
    assert await ring_after(caplog, [1, 2], 2) == [0, 2]


@pytest.mark.long
async def test_ranks_without_room_for_a_short_sequence_wait_for_other_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def room(stages: list[Any], *_: Any) -> KvRoom:
        if len(stages) < 3:
            raise PlanError("There is room for 12 tokens only")
        return KvRoom(10_000, 32)

    monkeypatch.setattr("serve.front.pipeline.requests.room_under_limits", room)
    assert await ring_after(caplog, [2], 2) == [0, 1, 2]


@pytest.mark.long
async def test_a_returning_rank_with_other_program_versions_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ranks(replan=True, join_timeout=2.0) as (engine, members, start):
        await ready(engine)
        await lose(members[1])
        await until(lambda: len(layers(engine)) == 2)
        await ready(engine)
        monkeypatch.setitem(globals(), "FACTS", {"mlx": "2"})
        start(1)
        await until(lambda: 1 in engine._membership.joined)
        await collect(engine, prompt(10, 500))
        assert [rank for rank, _ in layers(engine)] == [0, 2]


async def refuse_rank_1(
    engine: Engine, start: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes again and cannot load, and the other two go on."""
    monkeypatch.setenv("BREAK_AT_ORDER", f"1,{ModelError.exit_code}")
    start(1)
    await until(lambda: engine._membership.unfit == {1})
    monkeypatch.delenv("BREAK_AT_ORDER")
    await until(lambda: len(layers(engine)) == 2)
    await ready(engine)


@pytest.mark.slow
async def test_a_returning_rank_that_cannot_load_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ranks(replan=True, join_timeout=2.0) as (engine, members, start):
        await ready(engine)
        whole = layers(engine)
        answer = asyncio.create_task(collect(engine, prompt(10, 2000)))
        await lose(members[1])
        await until(lambda: len(layers(engine)) == 2)
        await refuse_rank_1(engine, start, monkeypatch)
        await lose(members[1])
        start(1)
        await until(lambda: layers(engine) == whole)
        await asyncio.wait_for(answer, 60)


@pytest.mark.long
async def test_a_rank_that_could_not_load_can_later_form_a_ring_with_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MIN_RANKS", "2")
    async with ranks(replan=True, join_timeout=2.0) as (engine, members, start):
        await ready(engine)
        await lose(members[1])
        await until(lambda: layers(engine)[-1][0] == 2 and len(layers(engine)) == 2)
        await ready(engine)
        await refuse_rank_1(engine, start, monkeypatch)
        await lose(members[2])
        await until(lambda: "event=waiting" in caplog.text)
        await lose(members[1])
        start(1)
        await until(lambda: [rank for rank, _ in layers(engine)] == [0, 1])
        await ready(engine)


@pytest.mark.long
async def test_a_returning_rank_without_enough_memory_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program has taken its memory meanwhile."""
    has_been_away = False

    def room(stages: list[Any], *_: Any) -> KvRoom:
        if has_been_away and len(stages) == 3:
            raise PlanError("There is room for 12 tokens only")
        return KvRoom(10_000, 32)

    monkeypatch.setattr("serve.front.pipeline.requests.room_under_limits", room)
    async with ranks(replan=True, join_timeout=2.0) as (engine, members, start):
        await ready(engine)
        await lose(members[1])
        await until(lambda: len(layers(engine)) == 2)
        await ready(engine)
        has_been_away = True
        start(1)
        await until(lambda: engine._membership.unfit == {1})
        await until(lambda: [rank for rank, _ in layers(engine)] == [0, 2])
        await collect(engine, prompt(10, 20))


@pytest.mark.long
async def test_a_suspended_engine_of_rank_0_is_replaced_even_if_no_request_runs() -> None:
    async with ranks(stall_timeout=1.0) as (engine, _, _start):
        await ready(engine)
        assert engine._driver._engines._own.process
        os.kill(engine._driver._engines._own.process.pid, signal.SIGSTOP)
        await until(lambda: engine.pipeline()["num_restarts"] == 1)
        await ready(engine)
        await collect(engine, prompt(10, 20))


@pytest.mark.long
async def test_a_suspended_parent_is_a_fault_even_if_its_engine_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ranks(stall_timeout=1.0) as (engine, members, start):
        await ready(engine)
        answer = asyncio.create_task(collect(engine, prompt(10, 1500)))
        control = engine._driver._engines._control
        with monkeypatch.context() as deaf:
            deaf.setattr(engine._lifecycle, "_on_status", lambda *_: None)
            await until(lambda: engine.pipeline()["num_restarts"] == 1)
        await until(lambda: {1, 2} <= control.joined)
        await asyncio.wait_for(answer, 60)


@pytest.mark.long
async def test_the_return_of_a_rank_does_not_use_up_the_last_restart() -> None:
    async with ranks(replan=True, join_timeout=2.0, max_restarts=1) as (engine, members, start):
        await ready(engine)
        await lose(members[1])
        await until(lambda: len(layers(engine)) == 2)
        await ready(engine)
        start(1)
        await until(lambda: 1 in engine._membership.joined)
        await collect(engine, prompt(10, 500))
        assert not engine.ready_reason()


@pytest.mark.long
async def test_a_late_answer_from_before_a_fault_removes_no_adapter_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(lora_modules=("poet=/p",), adapter_root=tmp_path) as engine:
        await ready(engine)
        monkeypatch.setenv("READ_SECONDS", "0.5")
        for kill_after in (0.0, 0.3):  # the second one while adapters are read again
            await asyncio.sleep(kill_after)
            engines()[0].kill()
            await until(lambda: engine.ready_reason() == "loading adapters")
        retired: list[int] = []
        monkeypatch.setattr(engine._requests.scheduler, "retire", retired.append)
        await ready(engine)
        await collect(engine, prompt(10, 20))
        assert [a["version"] for a in engine.adapters.registry.described()] == [1]
        assert retired == []


@pytest.mark.long
async def test_sequences_that_the_remaining_ranks_cannot_hold_are_ended_or_shortened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sequence that fits so far goes on, up to the room that is left."""
    room = iter([KvRoom(10_000, 32), KvRoom(300, 32)])
    monkeypatch.setattr("serve.front.pipeline.requests.room_under_limits", lambda *_: next(room))
    async with ranks(replan=True, join_timeout=2.0) as (engine, members, _):
        await ready(engine)
        long = asyncio.create_task(collect(engine, prompt(310, 600)))
        generation = engine.submit([prompt(200, 9000)])
        await generation.__anext__()
        await lose(members[2])
        with fails(UnavailableError, "unavailable", match="300 tokens"):
            await asyncio.wait_for(long, 60)
        num_tokens = 1
        async for _, event in generation:
            assert isinstance(event, Event)
            num_tokens += event.token is not None
        assert num_tokens == 100


@pytest.mark.long
async def test_a_rank_that_does_not_return_ends_the_cluster_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ranks(return_timeout=1.0) as (engine, members, _):
        await ready(engine)
        await lose(members[2])
        error = await asyncio.wait_for(engine.failed(), 60)
        assert "Ranks [2] did not join within 1 s" in str(error)
        assert "did not join within 1 s" in str(error)
    assert "event=waiting ranks=2 timeout=1" in caplog.text


async def test_an_error_in_the_scheduler_ends_the_cluster_as_an_internal_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> list[Event]:
        raise KeyError("a bug")

    async with cluster() as engine:
        await ready(engine)
        monkeypatch.setattr(engine._requests.scheduler, "update", broken)
        with fails(BrigadeError, "internal_error", match="KeyError"):
            await asyncio.wait_for(collect(engine, prompt(10, 300)), 60)
        assert (await engine.failed()).exit_code == 1


async def test_an_error_in_a_task_of_the_driver_ends_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken() -> EngineProcess:
        raise KeyError("a bug")

    async with cluster() as engine:
        await ready(engine)
        monkeypatch.setattr(engine._driver._engines._own.spare, "take", broken)
        for process in engines():
            process.kill()
        error = await asyncio.wait_for(engine.failed(), 60)
        assert "KeyError: 'a bug'" in str(error)


@pytest.mark.long
async def test_a_request_that_crashes_engines_is_ended_and_other_requests_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POISON", "996")
    monkeypatch.setattr("serve.parent.restarts._FIRST_WAIT_SECONDS", 0.05)
    async with cluster(max_restarts=5) as engine:
        await ready(engine)
        others = [asyncio.create_task(collect(engine, prompt(10, 30))) for _ in range(2)]
        await asyncio.sleep(0)
        poison = replace(prompt(10, 5), ids=[996] * 20)
        with fails(BrigadeError, "request_given_up", match="4 times") as caught:
            await collect(engine, poison)
        assert caught.value.http_status == 500
        await asyncio.wait_for(asyncio.gather(*others), 60)
        assert engine.pipeline()["num_restarts"] == 4


@pytest.mark.long
async def test_requests_that_crash_engines_do_not_end_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More faults than max_restarts, and a stream that lives through all of them."""
    # No token of the model's own.
    monkeypatch.setenv("POISON", "1500")
    async with cluster(max_restarts=2) as engine:
        await ready(engine)
        stream = asyncio.create_task(collect(engine, prompt(10, 3000)))
        poison = replace(prompt(10, 5, num=2), ids=[1500] * 20)
        for _ in range(3):
            with fails(BrigadeError, "request_given_up", match="3 times"):
                await asyncio.wait_for(collect(engine, poison), 60)
        await asyncio.wait_for(stream, 60)
        assert engine.pipeline()["num_restarts"] == 9
        assert engine.pipeline()["num_waiting"] == 0


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_can_never_start_ends_the_cluster_at_once(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setenv("BREAK_AT_ORDER", f"{rank},{ModelError.exit_code}")
    async with cluster() as engine:
        error = await asyncio.wait_for(engine.failed(), 60)
        assert isinstance(error, ModelError)
        assert str(error) == f"Rank {rank} cannot."
        assert engine.pipeline()["num_restarts"] == 0


@pytest.mark.long
async def test_the_cluster_gives_up_engines_that_never_start_after_a_few_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BREAK_AT_ORDER", f"1,{ClusterError.exit_code}")
    async with cluster(max_restarts=2) as engine:
        error = await asyncio.wait_for(engine.failed(), 60)
        assert isinstance(error, BrigadeError)
        assert error.exit_code == ClusterError.exit_code
        assert "Rank 1 cannot. The engines were restarted 2 times" in str(error)


@pytest.mark.long
async def test_a_suspended_engine_is_a_fault_only_after_the_stall_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(stall_timeout=1000.0) as engine:
        await ready(engine)
        assert engine._driver._engines._own.process
        victim = engine._driver._engines._own.process.pid
        answer = asyncio.create_task(collect(engine, prompt(10, 400)))
        await until(lambda: engine.pipeline()["num_running"] == 1)
        os.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(victim, signal.SIGCONT)
        await asyncio.wait_for(answer, 60)
        assert engine.pipeline()["num_restarts"] == 0
        engine._lifecycle._config = changed(engine._lifecycle._config, stall_timeout=2.0)
        answer = asyncio.create_task(collect(engine, prompt(10, 400)))
        await until(lambda: engine.pipeline()["num_running"] == 1)
        os.kill(victim, signal.SIGSTOP)
        began = time.monotonic()
        await until(lambda: engine.pipeline()["num_restarts"] > 0)
        assert time.monotonic() - began > 1.5
        assert "rank 0 on 127.0.0.1 has been silent for" in caplog.text
        await asyncio.wait_for(answer, 60)


@pytest.mark.long
async def test_a_rank_is_not_replaced_for_a_suspended_engine_if_its_parent_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing runs: it is only silent. The parent starts another engine by itself."""
    async with cluster(stall_timeout=1.0) as engine:
        await ready(engine)
        engines()[1].suspend()
        deadline = time.monotonic() + 60
        while not engine.pipeline()["num_restarts"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await ready(engine)
        assert "event=rank_silent" not in caplog.text
        await collect(engine, prompt(10, 5))


@pytest.mark.long
async def test_adapters_keep_their_version_numbers_after_a_fault(tmp_path: Path) -> None:
    async with cluster(lora_modules=("poet=/p",), adapter_root=tmp_path) as engine:
        await ready(engine)
        await engine.adapters.load("pirate", "pirate", False)
        versions = {a["name"]: a["version"] for a in engine.adapters.registry.described()}
        assert versions == {"poet": 1, "pirate": 2}
        await engine.adapters.unload("poet")
        loading = None
        for _ in range(2):
            engines()[0].kill()
            while not engine.ready_reason():
                await asyncio.sleep(0.001)
            # One that is asked for meanwhile comes when the engines do.
            loading = loading or asyncio.create_task(engine.adapters.load("late", "late", False))
            await ready(engine)
        assert loading
        await loading
        again = {a["name"]: a["version"] for a in engine.adapters.registry.described()}
        assert again == {"pirate": 2, "late": 3}


@pytest.mark.long
async def test_a_fault_while_adapters_are_restored_counts_as_another_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for a mistake of the server's own, which ends the cluster."""
    async with cluster(lora_modules=("poet=/p",), adapter_root=tmp_path) as engine:
        await ready(engine)
        monkeypatch.setenv("READ_SECONDS", "0.5")
        for _ in range(2):
            engines()[0].kill()
            deadline = time.monotonic() + 60
            while engine.ready_reason() != "loading adapters":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.001)
        await ready(engine)
        assert engine.pipeline()["num_restarts"] == 2
        assert [a["version"] for a in engine.adapters.registry.described()] == [1]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_cluster_is_ready_only_after_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.02")
    seen = set()
    async with cluster(warms_up=True) as engine:
        while reason := engine.ready_reason():
            seen.add(reason)
            await asyncio.sleep(0.005)
        assert engine.pipeline()["kv_tokens"] == 0
        await collect(engine, prompt(20, 5))
    assert "warming up" in seen
    async with cluster(warms_up=False) as engine:
        while reason := engine.ready_reason():
            assert reason != "warming up"
            await asyncio.sleep(0.005)


async def test_an_engine_that_ends_during_the_warm_up_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.02")
    async with cluster(warms_up=True) as engine:
        for process in range(3):
            while engine.ready_reason() != "warming up":
                await asyncio.sleep(0.005)
            engines()[process].kill()
            while engine.ready_reason() == "warming up":
                await asyncio.sleep(0.005)
        await ready(engine)
        await collect(engine, prompt(20, 5))


async def test_a_request_ends_the_warm_up_of_new_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.1")  # A warm-up takes four seconds.
    async with cluster(warms_up=False) as engine:
        await ready(engine)
        engine._requests._config = changed(engine._requests._config, warms_up=True)
        engines()[0].kill()
        while engine.ready_reason() != "warming up":
            await asyncio.sleep(0.01)
        num_steps = engine._requests._warm_up._num_steps if engine._requests._warm_up else 0
        warm_up = engine._requests._warm_up
        await asyncio.wait_for(collect(engine, prompt(3, 1)), 60)
        assert warm_up is not None
        assert warm_up._num_steps <= num_steps + 12
