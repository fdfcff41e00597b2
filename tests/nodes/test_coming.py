"""Bytes that a neighbour is fetching from the hub: the hub need not send them twice."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.types import ASGIApp

from serve.hub import neighbours
from serve.hub.claims import Claims, claimed_by_others
from serve.hub.digests import BLOCK_BYTES
from serve.hub.partial import FetchOrder, PartialModel
from tests.hub import checkpoints
from tests.hub.server import COMMIT, REPO, FakeHub
from tests.nodes.damage import Answer, spoiling
from tests.nodes.machines import Machine, Machines
from tests.test_launcher import ROOT, wait_until

pytestmark = pytest.mark.long

NAME = "model.embed.weight"
NUM_BYTES = len(checkpoints.tensors()[NAME][1])
SHARED = FetchOrder(set(), {NAME})

RANK = """
import sys
from pathlib import Path
from serve.hub.partial import open_partial
cache, repo, commit, name = sys.argv[1:]
model = open_partial(repo, commit, Path(cache))
print(model.fetch([name], lambda done, total: None), flush=True)
"""


@contextmanager
def rank_that_fetches(hub: FakeHub, machine: Machine) -> "Iterator[subprocess.Popen[str]]":
    """Runs a rank of a machine, and waits until the hub has begun to send it the embedding, of
    which it sends only a part before it is to speak."""
    hub.faults.silent_after = NUM_BYTES // 2
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(machine.cache.parent)}
    environment["PYTHONPATH"] = str(ROOT)
    environment.pop("BRIGADE_NEIGHBOURS", None)
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(machine.cache), REPO, COMMIT, NAME],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: num_times_asked(hub) == 1 or process.poll() is not None)
        yield process
    finally:
        process.kill()
        process.communicate()
        hub.speak()


def num_times_asked(hub: FakeHub) -> int:
    """Counts the answers of which more than a header has gone out."""
    return sum(served.end - served.start > 20_000 for served in hub.served)


def fetch(model: PartialModel) -> int:
    """Returns how many bytes a neighbour gave."""
    before = model.neighbour_bytes
    assert model.fetch([NAME], lambda *_: None, order=SHARED) == NUM_BYTES
    place = model.tensors[NAME]
    with place.file.open("rb") as stream:
        stream.seek(place.start)
        assert stream.read(NUM_BYTES) == checkpoints.tensors()[NAME][1]
    return model.neighbour_bytes - before


def test_a_rank_waits_for_what_a_neighbour_is_fetching(hub: FakeHub, machines: Machines) -> None:
    first, second = machines.make("first", "second")

    def go_on(answer: Answer, source: random.Random) -> None:
        if json.loads(answer.body)["coming"]:
            hub.speak()

    def noting(inner: ASGIApp) -> ASGIApp:
        return spoiling(inner, go_on, random.Random(), "/held/")

    with machines.serving(first, wrapped=noting), rank_that_fetches(hub, first) as process:
        assert fetch(second.open()) == NUM_BYTES
        assert process.wait(60) == 0
    assert num_times_asked(hub) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_asks_the_hub_if_its_neighbour_gets_no_further(
    hub: FakeHub, machines: Machines, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(neighbours, "_MAX_STILL_SECONDS", 3.0)
    first, second = machines.make("first", "second")
    with machines.serving(first), rank_that_fetches(hub, first) as process:
        process.send_signal(number)
        hub.speak()
        assert fetch(second.open()) < NUM_BYTES
    assert num_times_asked(hub) == 2


def test_claims_of_other_processes_are_seen_in_blocks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("claims") / "file.claims"
    assert claimed_by_others(path, [(0, 10)]) == []
    claims = Claims(path)
    claims.open()
    program = (
        "import sys; from pathlib import Path; from serve.hub.claims import claimed_by_others\n"
        "print(claimed_by_others(Path(sys.argv[1]), [(5, 30 << 20)]))"
    )

    def seen() -> str:
        command = [sys.executable, "-c", program, str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    with claims.claim((BLOCK_BYTES + 7, 2 * BLOCK_BYTES + 1)) as is_mine:
        assert is_mine
        assert seen() == str([(BLOCK_BYTES, 3 * BLOCK_BYTES)])
    assert seen() == "[]"
