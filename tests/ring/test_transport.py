"""The transport over the real ring of MLX, between real processes."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from serve.core.addresses import Addresses
from serve.core.config import Address, parse_address
from serve.core.errors import ClusterError
from serve.core.messages import Order
from serve.core.wire import frame
from serve.ring import regroup
from serve.ring.peers import Grid, meet
from serve.ring.transport import form_group
from tests.errors import fails
from tests.ports import free_ports


def run_ring(
    tmp_path: Path,
    program: str,
    num_ranks: int,
    programs: str = "tests.ring.ring_programs",
    seconds: float = 60.0,
) -> list[str]:
    """What each rank printed. The program's name may be followed by an argument."""
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(num_ranks)]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", programs, *program.split()],
            env={
                **os.environ,
                "MLX_RANK": str(rank),
                "MLX_HOSTFILE": str(hostfile),
                "NUM_RANKS": str(num_ranks),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for _, errors in outputs:
        assert "AssertionError" not in errors, errors
    return [output.strip() for output, _ in outputs]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_messages_arrive_complete_and_in_order(tmp_path: Path, num_ranks: int) -> None:
    assert run_ring(tmp_path, "around", num_ranks) == ["fine"] * num_ranks


def test_a_message_can_arrive_while_another_message_waits_to_be_sent(tmp_path: Path) -> None:
    came_first, _, _ = run_ring(tmp_path, "one_ahead", 3)
    assert came_first == "True"


def test_two_launches_on_the_same_ports_are_detected(tmp_path: Path) -> None:
    for output in run_ring(tmp_path, "other_nonce", 2):
        assert "two launches met on the same ports" in output


def test_a_peer_that_dies_raises_an_error_at_once(tmp_path: Path) -> None:
    first, _ = run_ring(tmp_path, "peer_dies", 2)
    assert "broke" in first


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_transport_that_leaves_its_ring_can_join_another_ring(
    tmp_path: Path, num_ranks: int
) -> None:
    """A message of an earlier ring, which was on its way when the ring was left, never comes."""
    for sizes in run_ring(tmp_path, "again 4", num_ranks):
        threads, _, threads_at_the_end, _, num_descriptors = map(int, sizes.split())
        assert threads_at_the_end <= threads
        assert num_descriptors < 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_joining_a_thousand_rings_uses_no_more_threads_or_memory(
    tmp_path: Path, num_ranks: int
) -> None:
    """Prints threads, megabytes and descriptors after the first hundred rings and at the end."""
    for sizes in run_ring(tmp_path, "many 1000", num_ranks, seconds=1700):
        print(sizes)
        threads, megabytes, descriptors, *at_the_end = map(int, sizes.split())
        threads_at_the_end, megabytes_at_the_end, descriptors_at_the_end = at_the_end
        assert threads_at_the_end <= threads
        assert descriptors_at_the_end == descriptors
        assert megabytes_at_the_end <= megabytes + 4


def test_failed_connections_leave_no_open_descriptor(tmp_path: Path) -> None:
    """MLX opens another socket for each attempt to connect, and closes none that has failed."""
    for counts in run_ring(tmp_path, "late", 2):
        assert len(set(counts.split())) == 1, counts


def test_the_ring_is_not_formed_anew_if_descriptors_could_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert regroup.objection() is None
    monkeypatch.setattr(regroup, "_MAX_SHARE_OF_DESCRIPTORS", 0)
    assert "descriptors are open" in (regroup.objection() or "")


def test_the_ring_is_not_formed_anew_if_mlx_lacks_clear_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert regroup.objection() is None
    monkeypatch.setattr(regroup, "_CLEAR_BACKENDS", "no_such_function")
    assert "does not offer clear_backends" in (regroup.objection() or "")


def test_a_rank_that_waits_uses_almost_no_processor_time(tmp_path: Path) -> None:
    _, second = run_ring(tmp_path, "idle", 2)
    assert float(second) < 0.2


def wait_until_listening(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while not any(each.status == psutil.CONN_LISTEN for each in process.net_connections("tcp")):
        assert time.monotonic() < deadline, "it does not listen"
        time.sleep(0.1)


@pytest.mark.long
def test_an_engine_whose_parent_was_killed_ends_even_while_it_joins_a_ring(
    tmp_path: Path,
) -> None:
    """Nor does it need the launch's hostfile, or the folder, which systems clean after days."""
    addresses = [[f"127.0.0.1:{port}"] for port in free_ports(2)]
    order = Order(
        rank=0,
        ring=(0, 1),
        hosts=("127.0.0.1", "127.0.0.1"),
        addresses=Addresses.known_to_all(0, addresses),
        nonce=1,
        model=str(tmp_path),
        commit=None,
        cache_dir=None,
        copies=str(tmp_path / "gone"),
        layers=(0, 1),
        kv_bits=None,
        join_timeout=10.0,
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = subprocess.Popen(
            [sys.executable, "-m", "serve.rank.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "MLX_HOSTFILE": str(tmp_path / "gone.json"), "MLX_RANK": "0"},
            stderr=subprocess.PIPE,
        )
        ours.sendall(frame(order))
        own, other = (parse_address(address, "") for (address,) in addresses)
        # A neighbour that meets the engine, and then never joins MLX's ring.
        meet(Grid(1, 2, (own, other), order.nonce, 60.0)).close()
        wait_until_listening(psutil.Process(engine.pid))
    try:
        _, said = engine.communicate(timeout=60)
    finally:
        engine.kill()
    assert b"in form_group" in said, "it had not begun, or was through"


def test_connections_to_neighbours_have_keep_alive_and_a_timeout() -> None:
    """A ring of one rank, which is its own neighbour on both sides."""
    (port,) = free_ports(1)
    neighbours = meet(Grid(0, 1, (Address("127.0.0.1", port),), 5, 60.0))
    for neighbour in (neighbours.row_left, neighbours.row_right):
        connection = neighbour.tcp_socket
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
    neighbours.close()


def test_a_ring_that_cannot_be_formed_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts.json").write_text('[["nowhere"], ["127.0.0.1:1"]]')
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    with fails(ClusterError, "cluster"):
        form_group(Grid(0, 2, (), 5, 5.0), mx.new_stream(mx.cpu))
