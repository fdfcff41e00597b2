"""Hosts that have nothing but cables, each between two of them and with a subnet of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path

import msgspec
import psutil
import pytest

from serve.selftest.report import Line, Verdict
from serve.selftest.section import Context, SectionRun
from tests.cluster.recovery.crowd import is_engine
from tests.cluster.recovery.test_namespaces import ip
from tests.cluster.recovery.test_recovery import Stream, check_same, run_streams
from tests.cluster.servers import (
    BIN,
    TINY_CHAT,
    Server,
    alone,
    running,
    serve_flags,
    started,
)
from tests.selftest.test_sections import INSIDE, ROOT, SECTION

pytestmark = pytest.mark.timeout(300)

# A network for clients, of this machine and rank 0's host only.
HERE, THERE = (f"198.19.{os.getpid() % 256}.{end}" for end in (1, 2))
CLIENTS = f"bg{os.getpid()}c"
PORT = 8080  # in the namespace of rank 0
NUM_STREAMS, NUM_TOKENS = 4, 80

# In place of ssh: it enters the namespace of that name.
SSH = """#!/bin/sh
shift $(($# - 2))
exec ip netns exec "$1" sh -c "$2"
"""


class Hosts:
    """Namespaces that stand for hosts."""

    def __init__(self, folder: Path, num_hosts: int) -> None:
        self.names = [f"brigade{os.getpid()}-{rank}" for rank in range(num_hosts)]
        self.num_cables = 0
        self._folder = folder
        self._ssh = folder / "ssh"
        self._ssh.write_text(SSH)
        self._ssh.chmod(0o755)

    def make(self) -> None:
        for name in self.names:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        first = self.names[0]
        ip(f"link add {CLIENTS} type veth peer name clients netns {first}")
        ip(f"addr add {HERE}/30 dev {CLIENTS}")
        ip(f"link set {CLIENTS} up")
        ip(f"-n {first} addr add {THERE}/30 dev clients")
        ip(f"-n {first} link set clients up")

    def remove(self) -> None:
        for name in self.names:
            with suppress(OSError, subprocess.CalledProcessError):  # It was not made.
                ip(f"netns del {name}")  # and the cables with it

    def lay_cable(self, one: int, other: int, *ends: str) -> None:
        """Connects two hosts, which get these addresses, or those of the cable's own subnet."""
        first = 4 * self.num_cables + 1
        addresses = ends or (f"192.168.0.{first}/30", f"192.168.0.{first + 1}/30")
        device = f"cable{self.num_cables}"
        self.num_cables += 1
        names = self.names[one], self.names[other]
        ip(f"link add {device} netns {names[0]} type veth peer name {device} netns {names[1]}")
        for name, address in zip(names, addresses, strict=True):
            ip(f"-n {name} addr add {address} dev {device}")
            ip(f"-n {name} link set {device} up")

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 60
        for name in self.names:
            while "DOWN" in ip(f"-n {name} -brief link"):
                assert time.monotonic() < deadline, "the cables have no carrier"
                time.sleep(0.05)

    def command(self, name: str, written: Sequence[str] = ()) -> list[str]:
        """Returns the beginning of a command line of `brigade`. The hostfile has the written
        addresses, one for each host, or none."""
        self.wait_until_up()
        entries = [
            {"ssh": host, "ips": list(written[at : at + 1])} for at, host in enumerate(self.names)
        ]
        hostfile = self._folder / "hosts.json"
        hostfile.write_text(json.dumps(entries))
        return [str(BIN / "brigade"), name, "--hostfile", str(hostfile), "--ssh", str(self._ssh)]


Make = Callable[[int], Hosts]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Hosts] = []

    def make_hosts(num_hosts: int) -> Hosts:
        hosts = Hosts(tmp_path, num_hosts)
        made.append(hosts)
        try:
            hosts.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        return hosts

    yield make_hosts
    for hosts in made:
        hosts.remove()


@pytest.fixture(scope="module")
def expected() -> list[Stream]:
    """The answers of one rank."""
    with running(1, launch=alone) as server:
        return run_streams(server, num_streams=NUM_STREAMS, num_tokens=NUM_TOKENS)


@contextmanager
def serving(hosts: Hosts, *flags: str, written: Sequence[str] = ()) -> Iterator[Server]:
    serve = serve_flags(PORT, TINY_CHAT, "--host", THERE, *flags)
    with started([*hosts.command("launch", written), "--", "serve", *serve], PORT) as server:
        server.host = THERE
        server.wait_until_ready()
        yield server


def engine(server: Server, rank: int) -> psutil.Process:
    """Returns a rank's engine. Only clients on rank 0's host may ask the server for it."""
    workers = filter(is_engine, server.family())
    (found,) = [worker for worker in workers if worker.environ()["MLX_RANK"] == str(rank)]
    return found


def check(server: Server, expected: list[Stream]) -> None:
    """Compares answers with those of one rank, also when an engine is killed."""

    def kill() -> None:
        time.sleep(0.3)
        engine(server, 1).kill()

    def streams(disturb: Callable[[], None] = lambda: None) -> list[Stream]:
        return run_streams(server, disturb, NUM_STREAMS, NUM_TOKENS)

    check_same(streams(), expected)
    check_same(streams(kill), expected)
    server.wait_for_log("event=recovered")
    check_same(streams(), expected)


@pytest.mark.long
def test_three_hosts_with_a_cable_for_each_pair_serve(make: Make, expected: list[Stream]) -> None:
    """The hostfile is that of mlx.distributed_config: each host has its address on the cable to the
    one before."""
    hosts = make(3)
    for one, other in combinations(range(3), 2):
        hosts.lay_cable(one, other)
    with serving(hosts, written=("192.168.0.5", "192.168.0.2", "192.168.0.10")) as server:
        check(server, expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, 2])
def test_four_hosts_with_a_cable_for_each_pair_serve(
    make: Make, expected: list[Stream], num_shards: int
) -> None:
    hosts = make(4)
    for one, other in combinations(range(4), 2):
        hosts.lay_cable(one, other)
    with serving(hosts, "--tensor-parallel-size", str(num_shards)) as server:
        check(server, expected)


@pytest.mark.slow
def test_two_hosts_with_two_cables_serve(make: Make, expected: list[Stream]) -> None:
    hosts = make(2)
    hosts.lay_cable(0, 1)
    hosts.lay_cable(1, 0)
    with serving(hosts) as server:
        check(server, expected)


@pytest.mark.slow
def test_two_hosts_whose_link_local_addresses_have_changed_serve(
    make: Make, expected: list[Stream]
) -> None:
    hosts = make(2)
    hosts.lay_cable(0, 1, "169.254.7.1/16", "169.254.7.2/16")
    with serving(hosts, written=("169.254.1.1", "169.254.1.2")) as server:
        check(server, expected)
        assert server.text.count("is not an address of this host any more") == 2


@pytest.mark.slow
def test_hosts_without_a_cable_to_rank_0_are_named(make: Make) -> None:
    hosts = make(3)
    hosts.lay_cable(0, 1)
    hosts.lay_cable(1, 2)
    words = ["--", "serve", "--model", str(TINY_CHAT)]
    launch = subprocess.run([*hosts.command("launch"), *words], capture_output=True, text=True)
    assert launch.returncode == 6
    last = launch.stderr.splitlines()[-1]
    assert f"{hosts.names[0]} and {hosts.names[2]}: they have no network in common" in last
    assert "192.168.0.6/30 on cable1" in last
    assert "rank 0 and every other rank exchange messages: connect these hosts" in last
    assert f"{hosts.names[1]} and" not in last


@pytest.mark.slow
def test_hosts_with_link_local_addresses_of_other_cables_are_named(make: Make) -> None:
    """All three look as if they were in one network."""
    hosts = make(3)
    hosts.lay_cable(0, 2, "169.254.7.1/16", "169.254.7.3/16")
    hosts.lay_cable(1, 2, "169.254.7.2/16", "169.254.7.4/16")
    words = ["--", "serve", "--model", str(TINY_CHAT)]
    launch = subprocess.run([*hosts.command("launch"), *words], capture_output=True, text=True)
    assert launch.returncode == 6
    last = launch.stderr.splitlines()[-1]
    assert f"{hosts.names[0]} and {hosts.names[1]}: they have no network in common" in last
    assert f"{hosts.names[0]} tried 169.254.7.2: " in last
    assert "Local Network" in last


@contextmanager
def losing_link(make: Make, folder: Path, **changes: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The self-test on the first of two hosts, as it loses the link; `changes` are of its names."""
    hosts = make(2)
    hosts.lay_cable(0, 1)
    hosts.wait_until_up()
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": hosts.names[1]}]))
    context = Context(hostfile=str(hostfile), ssh=(str(folder / "ssh"),))
    changes["MEASUREMENTS"] = "[link_lost]"
    faults = [f"{SECTION} | serve.selftest.faults:{name} = {changes[name]}" for name in changes]
    environment = {"PYTHONPATH": f"{INSIDE}:{ROOT}", "SELFTEST_FAULT": "\n".join(faults)}
    runner = [sys.executable, "-m", "serve.selftest.runner"]
    job = msgspec.json.encode(SectionRun("faults", context)).decode()
    with subprocess.Popen(
        ["ip", "netns", "exec", hosts.names[0], *runner, job, "280"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        yield process


def judged(process: "subprocess.Popen[bytes]") -> dict[str, Line]:
    out, _ = process.communicate()
    lines = [msgspec.json.decode(text, type=Line) for text in out.splitlines()]
    return {line.id: line.judged() for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "verdict"), [(30, Verdict.EXPECTED), (100, Verdict.WORSE)])
def test_the_self_test_measures_a_lost_link(
    make: Make, tmp_path: Path, seconds: int, verdict: Verdict
) -> None:
    with losing_link(make, tmp_path, _DOWN_SECONDS=str(seconds)) as process:
        found = judged(process)
    pause = found["faults.cable_pause"]
    assert pause.verdict is verdict, found
    assert float(pause.value) > seconds - 5
    assert found["faults.text"].value == "yes"


@pytest.mark.slow
def test_the_self_test_asks_a_user_without_sudo_to_pull_the_cable(
    make: Make, tmp_path: Path
) -> None:
    with losing_link(make, tmp_path, _take_down="lambda name: False") as process:
        assert process.stderr is not None
        assert b"Pull the cable of cable0 now" in process.stderr.readline()
        first = f"brigade{os.getpid()}-0"
        ip(f"-n {first} link set cable0 down")
        time.sleep(10)
        ip(f"-n {first} link set cable0 up")
        found = judged(process)
    assert found["faults.cable_pause"].verdict is Verdict.EXPECTED, found
    assert found["faults.text"].value == "yes"


@pytest.mark.slow
def test_doctor_measures_each_cable(make: Make) -> None:
    hosts = make(3)
    for one, other in combinations(range(3), 2):
        hosts.lay_cable(one, other)
    command = [*hosts.command("doctor"), "--json", "--port", "0"]
    doctor = subprocess.run(command, capture_output=True, text=True)
    assert doctor.returncode in (0, 1), doctor.stdout
    findings = json.loads(doctor.stdout)
    hops = [finding["where"] for finding in findings if "→" in finding["where"]]
    assert len(hops) == 6
    assert f"{hosts.names[2]} → {hosts.names[1]} (192.168.0.9)" in hops
    assert "the sum over 3 ranks is correct" in findings[-1]["what"]
