"""A rank with a network of its own: its cable can be pulled, which breaks no connection."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.recovery.test_links import num_restarts
from tests.cluster.recovery.test_recovery import check_same, run_streams
from tests.cluster.servers import LOG_SECONDS, TINY_CHAT, Server, alone, quick, serve_flags, started
from tests.ports import free_ports

HERE, THERE = "198.18.77.1", "198.18.77.2"  # a range for tests of networks
STALL_SECONDS = 8


def ip(words: str) -> str:
    command = ["ip", *words.split()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


class Cable:
    """From this machine to a namespace."""

    def __init__(self) -> None:
        self.space = f"brigade{os.getpid()}"
        self.ends = f"bg{os.getpid()}a", f"bg{os.getpid()}b"

    def lay(self) -> None:
        here, there = self.ends
        ip(f"netns add {self.space}")
        ip(f"link add {here} type veth peer name {there}")
        ip(f"link set {there} netns {self.space}")
        ip(f"addr add {HERE}/30 dev {here}")
        ip(f"-n {self.space} addr add {THERE}/30 dev {there}")
        ip(f"link set {here} up")
        ip(f"-n {self.space} link set lo up")
        self.plug()

    def pull(self) -> None:
        ip(f"-n {self.space} link set {self.ends[1]} down")

    def plug(self) -> None:
        ip(f"-n {self.space} link set {self.ends[1]} up")


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    try:
        cable.lay()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield cable
    finally:
        ip(f"netns del {cable.space}")  # and the cable with it


@contextmanager
def two_ranks(folder: Path, cable: Cable) -> Iterator[Server]:
    ports = free_ports(4)
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"{HERE}:{ports[0]}"], [f"{THERE}:{ports[1]}"]]))
    variables = [f"MLX_HOSTFILE={hostfile}", f"BRIGADE_CONTROL={HERE}:{ports[2]}"]
    flags = serve_flags(ports[3], TINY_CHAT, quick(stall_timeout=STALL_SECONDS))
    command = ["env", *variables, "BRIGADE_SECRET=s"]
    with ExitStack() as stack:
        far = ["ip", "netns", "exec", cable.space, *command, "MLX_RANK=1", *alone(flags)]
        stack.enter_context(started(far))
        near = [*command, "MLX_RANK=0", *alone(flags)]
        server = stack.enter_context(started(near, ports[3]))
        server.wait_until_ready()
        yield server


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pulled_cable_changes_no_token(tmp_path: Path, cable: Cable) -> None:
    with two_ranks(tmp_path, cable) as server:
        expected = run_streams(server)

        def pull_for_two_seconds() -> None:
            time.sleep(0.5)
            cable.pull()
            time.sleep(2)
            cable.plug()

        def pull_until_noticed() -> None:
            time.sleep(0.5)
            cable.pull()
            began = time.monotonic()
            while not num_restarts(server):
                assert time.monotonic() < began + LOG_SECONDS, server.text
                time.sleep(0.05)
            print(f"noticed after {time.monotonic() - began:.1f} s of {STALL_SECONDS} s")
            time.sleep(5)
            cable.plug()

        check_same(run_streams(server, pull_for_two_seconds), expected)
        assert num_restarts(server) == 0, "a short break is none"
        check_same(run_streams(server, pull_until_noticed), expected)
        check_same(run_streams(server), expected)
        # Nobody speaks, and the rank comes back as another connection.
        num_gone = server.text.count("event=rank_gone")
        cable.pull()
        deadline = time.monotonic() + 60
        while server.text.count("event=rank_gone") == num_gone:
            assert time.monotonic() < deadline, server.text
            time.sleep(0.1)
        cable.plug()
        server.wait_until_ready()
        check_same(run_streams(server), expected)
