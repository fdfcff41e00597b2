"""Requests that break inside an engine end alone, and rows of clients that go end soon.

The engines are real ones; what breaks or slows them comes from inside/sitecustomize.py.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cluster.conftest import mlx_lm_answer  # noqa: F401
from tests.cluster.servers import Server, quick, running
from tests.faults.cases import CHAT, GOOD, JSON, good_body, post, said
from tests.test_launcher import wait_until

pytestmark = pytest.mark.long

INSIDE = str(Path(__file__).parent / "inside")
BROKEN_SEED = 666
FATAL_SEED = 667
STEP_SECONDS = 0.2  # far more than the news of a client's end takes
MAX_STEPS = 2  # of a sequence, after its client has gone
# Whether a client that waits for a whole reply has gone or only closed its sending side takes two
# writes to find out, 0.1 s apart: that is a step more.
MAX_STEPS_OF_A_REPLY = 3


def ask(server: Server, **changes: Any) -> httpx2.Response:
    return httpx2.post(server.url + CHAT, content=good_body(**changes), headers=JSON, timeout=60)


# --- one row's sampling


@pytest.fixture(scope="module")
def broken() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", INSIDE)
        patch.setenv("BROKEN_SEED", str(BROKEN_SEED))
        with running(2) as server:
            yield server


def test_only_the_request_whose_sampling_fails_ends(
    broken: Server,
    mlx_lm_answer: Callable[..., str],  # noqa: F811
) -> None:
    def answer(n: int) -> httpx2.Response:
        if n % 3 == 1:
            return ask(broken, temperature=1, seed=BROKEN_SEED, stream=n % 2 == 0)
        return ask(broken, max_tokens=30)

    with ThreadPoolExecutor(12) as threads:
        replies = list(threads.map(answer, range(12)))
    expected = mlx_lm_answer(GOOD["messages"][0]["content"], max_tokens=30)
    for n, reply in enumerate(replies):
        if n % 3 != 1:
            assert reply.json()["choices"][0]["message"]["content"] == expected
        elif n % 2:
            assert reply.status_code == 500
            assert reply.json()["error"]["type"] == "server_error"
        else:
            events = reply.text.split("\n\n")
            assert json.loads(events[-3].removeprefix("data: "))["error"]["type"] == "server_error"
            assert events[-2:] == ["data: [DONE]", ""]
        assert "seed" not in reply.text, "the reason is for the log"
    line = broken.wait_for_log("event=row_failed .*")
    assert "FORGED" in line, "it is one line"
    assert not [line for line in broken.log if line.startswith("FORGED")]
    assert broken.get("/ready") == {"status": "ready"}
    wait_for(broken, num_running=0)


def test_other_seeds_and_greedy_requests_work_beside_a_seed_that_fails(broken: Server) -> None:
    assert ask(broken, temperature=1, seed=BROKEN_SEED + 1).status_code == 200
    assert ask(broken, temperature=0, seed=BROKEN_SEED).status_code == 200, "greedy needs no key"


# --- requests that end engines


@pytest.fixture
def fragile() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", INSIDE)
        patch.setenv("FATAL_SEED", str(FATAL_SEED))
        with running(2, quick(max_restarts=2)) as server:
            yield server


def test_requests_that_crash_engines_are_given_up_and_other_requests_go_on(
    fragile: Server,
    mlx_lm_answer: Callable[..., str],  # noqa: F811
) -> None:
    """Each has both restarts that there are, and a stream goes on through all of them."""
    story: dict[str, Any] = {"messages": said("Tell me a story."), "max_tokens": 150}
    undisturbed = ask(fragile, **story, ignore_eos=True).json()
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(ask, fragile, **story, ignore_eos=True)
        fatal = [ask(fragile, temperature=1, seed=FATAL_SEED) for _ in range(2)]
        beside = threads.submit(ask, fragile, max_tokens=30)
        assert [reply.status_code for reply in fatal] == [500, 500]
        codes = [reply.json()["error"]["code"] for reply in fatal]
        assert codes == ["request_given_up"] * 2
        assert other.result().json()["choices"] == undisturbed["choices"]
        expected = mlx_lm_answer(GOOD["messages"][0]["content"], max_tokens=30)
        assert beside.result().json()["choices"][0]["message"]["content"] == expected
    assert fragile.text.count("event=request_given_up") == 2
    wait_for(fragile, num_running=0)
    assert fragile.get("/admin/pipeline")["num_restarts"] == 6
    assert fragile.process.poll() is None


# --- clients that go


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """Each step takes so long that those after a client's end can be counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", INSIDE)
        patch.setenv("STEP_SECONDS", str(STEP_SECONDS))
        flags = ("--no-enable-prefix-caching", quick(prefill_chunk=16), "--max-num-seqs", "1")
        with running(2, *flags) as server:
            yield server


def request(**changes: Any) -> bytes:
    body = good_body(**{"temperature": 2, "seed": 5, "max_tokens": 500, **changes})
    return post(b"Content-Length: %d" % len(body), body=body)


def begun(server: Server, since: float, kind: str = "") -> dict[int, int]:
    """Steps of a kind that began on each rank since then, once the ranks have reported, which they
    do four times a second."""
    time.sleep(0.6)
    trace = server.get("/admin/trace?seconds=60")["traceEvents"]
    steps = [event for event in trace if event["ph"] == "X" and event["args"]["rows"]]
    steps = [step for step in steps if step["name"].startswith(kind)]
    return {rank: sum(s["pid"] == rank and s["ts"] / 1e6 > since for s in steps) for rank in (0, 1)}


def kv_bytes(server: Server) -> list[int]:
    return [stage["kv_bytes"] for stage in server.get("/admin/pipeline")["stages"]]


def wait_until_nothing_is_held(server: Server) -> None:
    """Ranks report their memory once in a while."""
    wait_until(lambda: not any(kv_bytes(server)))


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": said("Tell me a story."), "stream": True},
        {"messages": said("Tell me a story."), "stream": False},
        {"messages": said("word " * 1000), "stream": True},
        {"messages": said("word " * 1000), "stream": False},
    ],
    ids=["a stream", "a reply", "prefill of a stream", "prefill of a reply"],
)
def test_rows_of_a_client_that_disconnects_are_freed_within_two_steps(
    slow: Server, changes: dict[str, Any]
) -> None:
    """Of three clients, because on a busy machine the news of one may take longer than a step."""
    allowed = MAX_STEPS if changes["stream"] else MAX_STEPS_OF_A_REPLY
    counts: list[int] = []
    while not counts or min(counts) > allowed:
        assert len(counts) < 3, counts
        counts.append(num_steps_after_a_client_left(slow, request(**changes)))


def num_steps_after_a_client_left(slow: Server, sent: bytes) -> int:
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(sent)
        wait_for(slow, num_running=1)
        wait_until(lambda: min(kv_bytes(slow)) > 0)
    left = time.time()
    wait_for(slow, num_running=0, kv_tokens=0)
    steps = begun(slow, left)
    wait_until_nothing_is_held(slow)
    return max(steps.values())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_while_it_waits_never_runs(slow: Server, stream: bool) -> None:
    fields = {"max_tokens": 30, "ignore_eos": True}
    first = threading.Thread(target=ask, args=(slow,), kwargs=fields)
    asked = time.time()
    first.start()
    wait_until(lambda: min(begun(slow, asked, "decode").values()) > 0)
    sent = time.time()
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(request(stream=stream, messages=said("Tell me a story.")))
        wait_for(slow, num_waiting=1)
    wait_for(slow, num_waiting=0, num_running=1)
    first.join()
    wait_for(slow, num_running=0)
    wait_until(lambda: max(begun(slow, sent, "decode").values()) > 1)
    assert begun(slow, sent, "prefill") == {0: 0, 1: 0}
    wait_until_nothing_is_held(slow)


def wait_for(server: Server, **state: int) -> None:
    deadline = time.monotonic() + 60
    while any(server.get("/admin/pipeline")[name] != value for name, value in state.items()):
        assert time.monotonic() < deadline, state
        time.sleep(0.01)
