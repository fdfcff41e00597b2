"""Names, versions, memory: the registry with two simulated ranks."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve.core.errors import (
    AdapterError,
    BrigadeError,
    ClusterError,
    EngineError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve.core.messages import AdapterRefused
from tests.errors import fails
from tests.front.fakes import CONFIG, FakeRanks

pytestmark = pytest.mark.anyio


async def test_requests_for_a_name_use_its_newest_version() -> None:
    ranks = FakeRanks()
    adapters = ranks.adapters
    await adapters.load("x", "a", in_place=False)
    assert await adapters.version("x") == 1
    assert await adapters.version("tiny") == 0
    with fails(RequestError, "name_taken"):
        await adapters.load("x", "b", in_place=False)
    await adapters.load("x", "b", in_place=True)
    assert await adapters.version("x") == 2
    assert ranks.held == {2}
    assert adapters.registry.statistics.to_json()["num_requests"] == {"x": 2}
    await adapters.unload("x")
    assert ranks.held == set()
    with pytest.raises(NotFoundError):
        await adapters.version("x")
    with fails(NotFoundError, "adapter_not_found"):
        await adapters.unload("x")
    assert adapters.registry.statistics.to_json()["num_swapped"] == 1


async def test_requests_of_unloaded_adapters_are_no_longer_counted() -> None:
    """Else each name that was ever loaded would be a label of a metric."""
    ranks = FakeRanks()
    for number in range(20):
        await ranks.adapters.load(f"x{number}", "a", in_place=False)
        await ranks.adapters.version(f"x{number}")
        await ranks.adapters.unload(f"x{number}")
    assert ranks.adapters.registry.statistics.to_json()["num_requests"] == {}


async def refused(
    ranks: FakeRanks, kind: type[BrigadeError], message: str, status: int | None = None
) -> None:
    before = ranks.adapters.registry.described(), await ranks.adapters.version("x"), set(ranks.held)
    with pytest.raises(kind, match=message) as raised:
        await ranks.adapters.load("x", "b", in_place=True)
    assert status is None or raised.value.http_status == status
    after = ranks.adapters.registry.described(), await ranks.adapters.version("x"), set(ranks.held)
    assert after[0] == before[0]
    assert after[1:] == before[1:]


async def test_a_load_that_one_rank_refuses_changes_nothing() -> None:
    ranks = FakeRanks()
    await ranks.adapters.load("x", "a", in_place=False)
    ranks.refusals[1] = {"message": "No adapter found for b.", "status": 404}
    await refused(ranks, AdapterError, "Rank 1: No adapter found", 404)
    ranks.refusals[0] = {"message": "q_proj.lora_a has values", "status": 400}
    await refused(ranks, AdapterError, "^q_proj.lora_a has values", 400)
    ranks.refusals.clear()
    ranks.own = (["a"], [])
    await refused(ranks, AdapterError, "it changes b, which this model does not have")


async def test_a_version_number_is_used_again_if_every_rank_has_refused_it() -> None:
    ranks = FakeRanks()
    ranks.refusals = {
        0: {"message": "No adapter found for a.", "status": 404},
        1: {"message": "No adapter found for a.", "status": 404},
    }
    for _ in range(3):
        with fails(AdapterError, "adapter", match="^No adapter found") as raised:
            await ranks.adapters.load("x", "a", in_place=False)
        assert raised.value.http_status == 404
    ranks.refusals.clear()
    await ranks.adapters.load("x", "a", in_place=False)
    assert await ranks.adapters.version("x") == 1


async def test_a_version_number_is_not_used_again_if_any_rank_has_loaded_it() -> None:
    ranks = FakeRanks()
    ranks.refusals[1] = {"message": "No adapter found for a.", "status": 404}
    with fails(AdapterError, "adapter", match="Rank 1: "):
        await ranks.adapters.load("x", "a", in_place=False)
    ranks.refusals.clear()
    await ranks.adapters.load("x", "a", in_place=False)
    assert await ranks.adapters.version("x") == 2


async def test_a_load_that_a_rank_answers_too_late_is_refused_and_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = FakeRanks(load_timeout=1.0)
    await ranks.adapters.load("x", "a", in_place=False)
    ranks.is_silent = True
    await refused(ranks, AdapterError, "Rank 1 does not answer", 503)
    ranks.held.add(2)  # It comes now.
    ranks.adapters.on_message(1, AdapterRefused(2, "late", 400))
    assert ranks.held == {1}


async def test_a_load_fails_at_once_when_the_cluster_breaks() -> None:
    ranks = FakeRanks()
    ranks.is_silent = True
    loading = asyncio.create_task(ranks.adapters.load("x", "a", in_place=False))
    await asyncio.sleep(0.01)
    ranks.adapters.fail(EngineError("gone"))
    with fails(EngineError, "engine"):
        await asyncio.wait_for(loading, 60)


@pytest.mark.parametrize("name", ["tiny", "../x", "/etc", "a b", "x\n", "", "a/b/c", "x" * 200])
async def test_invalid_names_are_refused(name: str) -> None:
    with fails(RequestError, "adapter_name"):
        await FakeRanks().adapters.load(name, "a", in_place=False)


async def test_loading_over_http_is_refused_without_an_adapter_root() -> None:
    ranks = FakeRanks(adapter_root=None)
    with fails(AdapterError, "not_allowed") as raised:
        await ranks.adapters.load("x", "a", in_place=False)
    assert raised.value.http_status == 403
    assert not ranks.paths


async def test_adapters_given_at_the_start_may_be_in_any_folder() -> None:
    ranks = FakeRanks(adapter_root=None, lora_modules=("x=/any/where", "y=/else=where"))
    await ranks.adapters.load_at_start()
    assert ranks.adapters.registry.names == ["tiny", "x", "y"]
    assert ranks.paths == ["/any/where", "/else=where"]


# --- memory: two ranks with 100 and 50 KB for each adapter


async def test_the_least_recently_used_adapter_is_evicted_and_read_again() -> None:
    ranks = FakeRanks(adapter_memory="200KB,1MB")
    adapters = ranks.adapters
    for name in "abc":
        await adapters.load(name, name, in_place=False)
    assert ranks.held == {2, 3}
    assert await adapters.version("b") == 2
    assert await adapters.version("a") == 4
    assert ranks.held == {2, 4}, "c was used least recently"
    ranks.running[0] = 5
    listed = [(a["version"], a["num_running"]) for a in adapters.registry.described()]
    assert listed == [(4, 0), (2, 0), (None, 0)]


async def test_pinned_adapters_and_those_in_use_are_not_evicted() -> None:
    ranks = FakeRanks(adapter_memory="200KB")
    adapters = ranks.adapters
    await adapters.load("a", "a", in_place=False)
    await adapters.load("b", "b", in_place=False)
    await adapters.change("a", pin=True, default=None, preload=False)
    ranks.running[2] = 1
    with fails(OverloadedError, "adapters_in_use"):
        await adapters.load("c", "c", in_place=False)
    assert ranks.held == {1, 2}
    ranks.running[2] = 0
    await adapters.load("c", "c", in_place=False)
    assert ranks.held == {1, 4}
    await adapters.change("a", pin=False, default=None, preload=False)
    assert await adapters.version("c") == 4
    assert await adapters.version("b") == 5
    assert ranks.held == {4, 5}


async def test_replacing_an_adapter_frees_its_old_version_if_it_is_unused() -> None:
    ranks = FakeRanks(adapter_memory="100KB")
    await ranks.adapters.load("a", "a", in_place=False)
    await ranks.adapters.load("a", "b", in_place=True)
    assert ranks.held == {2}
    ranks.running[2] = 1
    await refused_overload(lambda: ranks.adapters.load("a", "c", in_place=True))
    assert ranks.held == {2}
    await ranks.adapters.unload("a")
    await refused_overload(lambda: ranks.adapters.load("z", "z", in_place=False))
    ranks.running[2] = 0
    await ranks.adapters.load("z", "z", in_place=False)


async def refused_overload(call: Callable[[], Awaitable[Any]]) -> None:
    with pytest.raises(OverloadedError):
        await call()


async def test_an_adapter_that_exceeds_all_memory_is_refused() -> None:
    ranks = FakeRanks(adapter_memory="99KB")
    with fails(AdapterError, "no_memory"):
        await ranks.adapters.load("a", "a", in_place=False)
    assert not ranks.held


async def test_a_request_for_an_adapter_whose_files_are_gone_gets_status_503() -> None:
    ranks = FakeRanks(adapter_memory="100KB")
    await ranks.adapters.load("a", "/secret/a", in_place=False)
    await ranks.adapters.load("b", "b", in_place=False)
    ranks.refusals[0] = {"message": "No adapter found for /secret/a.", "status": 404}
    with pytest.raises(UnavailableError) as raised:
        await ranks.adapters.version("a")
    assert "secret" not in str(raised.value)
    assert await ranks.adapters.version("b") == 2
    ranks.refusals.clear()
    assert await ranks.adapters.version("a") == 4


async def test_an_evicted_adapter_is_loaded_only_once_for_many_requests() -> None:
    ranks = FakeRanks(adapter_memory="100KB")
    await ranks.adapters.load("a", "a", in_place=False)
    await ranks.adapters.load("b", "b", in_place=False)
    versions = await asyncio.gather(*(ranks.adapters.version("a") for _ in range(9)))
    assert versions == [3] * 9


async def test_the_default_model_is_listed_first() -> None:
    ranks = FakeRanks()
    await ranks.adapters.load("x", "a", in_place=False)
    await ranks.adapters.change("x", pin=None, default=True, preload=False)
    assert ranks.adapters.registry.names == ["x", CONFIG.model_name]
    await ranks.adapters.unload("x")
    assert ranks.adapters.registry.names == [CONFIG.model_name]


# --- engines that restart


def restart(ranks: FakeRanks) -> None:
    ranks.held.clear()
    ranks.adapters.interrupt()


async def test_new_engines_load_only_versions_that_are_current_or_in_use() -> None:
    ranks = FakeRanks()
    adapters = ranks.adapters
    for name in ("a", "b", "c"):
        await adapters.load(name, name, in_place=False)
    ranks.running[1] = 2  # a's first version, which is replaced while it is in use
    await adapters.load("a", "a2", in_place=True)
    await adapters.unload("b")
    restart(ranks)
    ranks.paths.clear()
    await adapters.restore()
    assert ranks.held == {1, 3, 4}
    assert sorted(ranks.paths) == ["a", "a2", "c"]
    assert (await adapters.version("a"), await adapters.version("c")) == (4, 3)


async def test_idle_adapters_are_evicted_if_a_new_ring_has_less_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = FakeRanks(adapter_memory="200KB")
    for name in ("a", "b"):
        await ranks.adapters.load(name, name, in_place=False)
    await ranks.adapters.version("a")
    ranks.num_bytes = [150_000, 50_000]
    restart(ranks)
    await ranks.adapters.restore()
    assert ranks.held == {1}, "b was used least recently"
    ranks.num_bytes = [250_000, 50_000]
    ranks.running[1] = 1
    restart(ranks)
    await ranks.adapters.restore()
    assert ranks.held == {1}, "no request ends for it"
    assert "event=over_adapter_memory" in caplog.text


@pytest.mark.parametrize("fault", ["other files", "no files"])
async def test_requests_end_if_the_files_of_their_adapter_have_changed(fault: str) -> None:
    ranks = FakeRanks()
    adapters = ranks.adapters
    await adapters.load("x", "x", in_place=False)
    ranks.running[1] = 1
    restart(ranks)
    if fault == "other files":
        ranks.checksum = "other"
    else:
        ranks.refusals[1] = {"message": "no such folder", "status": 404}
    await adapters.restore()
    assert isinstance(ranks.ended[1], UnavailableError), "a mixture would be worse"
    assert ranks.held == set()
    ranks.adapters.resume()
    if fault == "other files":
        assert await adapters.version("x") == 2
    else:
        with fails(UnavailableError, "unavailable"):
            await adapters.version("x")


async def test_a_load_that_a_fault_interrupts_is_repeated() -> None:
    ranks = FakeRanks()
    ranks.is_silent = True
    loading = asyncio.create_task(ranks.adapters.load("x", "x", in_place=False))
    while not ranks.paths:
        await asyncio.sleep(0)
    restart(ranks)
    ranks.is_silent = False
    await asyncio.sleep(0.05)
    assert not loading.done(), "there are no engines that could answer"
    await ranks.adapters.restore()
    ranks.adapters.resume()
    await loading
    assert ranks.paths == ["x", "x"]
    assert await ranks.adapters.version("x") == 1
    assert ranks.held == {1}


async def test_a_load_that_crashes_the_engines_is_not_repeated_for_ever() -> None:
    ranks = FakeRanks()
    ranks.is_silent = True
    loading = asyncio.create_task(ranks.adapters.load("x", "x", in_place=False))
    for number in (1, 2):
        while len(ranks.paths) < number:
            await asyncio.sleep(0)
        restart(ranks)
        ranks.adapters.resume()
    with fails(AdapterError, "engines_ended") as caught:
        await loading
    assert caught.value.http_status == 503
    assert ranks.adapters.registry.names == [CONFIG.model_name]


async def test_a_load_succeeds_despite_a_fault_right_after_the_last_answer() -> None:
    """The registry has not heard it yet, so it does not restore the version."""
    ranks = FakeRanks()
    loading = asyncio.create_task(ranks.adapters.load("x", "x", in_place=False))
    while not ranks.held:
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the answers
    restart(ranks)
    await ranks.adapters.restore()
    ranks.adapters.resume()
    await loading
    assert ranks.held == {await ranks.adapters.version("x")}


async def test_ranks_are_told_which_versions_they_may_have_copies_of() -> None:
    ranks = FakeRanks()
    await ranks.adapters.load("x", "a", in_place=False)
    ranks.running[1] = 1
    await ranks.adapters.load("x", "b", in_place=True)
    restart(ranks)
    await ranks.adapters.restore()
    ranks.adapters.resume()
    ranks.running[1] = 0
    await ranks.adapters.unload("x")
    await ranks.adapters.load("y", "c", in_place=False)
    assert ranks.told_held == [[], [1], [1, 2], [1, 2], []]


async def test_an_adapter_unloaded_while_adapters_are_restored_is_not_kept() -> None:
    ranks = FakeRanks()
    await ranks.adapters.load("x", "x", in_place=False)
    restart(ranks)
    restoring = asyncio.create_task(ranks.adapters.restore())
    while len(ranks.paths) < 2:
        await asyncio.sleep(0)
    await ranks.adapters.unload("x")
    await restoring
    assert ranks.held == set()


async def test_a_rank_that_does_not_restore_an_adapter_is_a_fault_and_loses_no_adapter() -> None:
    ranks = FakeRanks(load_timeout=1.0)
    await ranks.adapters.load("a", "a", in_place=False)
    ranks.adapters.interrupt()
    ranks.is_silent, ranks.running[1] = True, 1
    with fails(ClusterError, "silent_rank", match="Rank 1"):
        await ranks.adapters.restore()
    assert not ranks.ended
