"""Every kind of fault once, under a running answer. A cluster goes on after it, or ends; either
way no process is left and no port is held."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.cluster.recovery.test_recovery import Stream
from tests.cluster.servers import BIN, TINY_CHAT, Server, brigade_launch, gone, quick, started
from tests.cluster.servers import serve_flags as flags_of
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

Fault = Callable[[Server, Path], object]


class Client(Stream):
    """It may lose its connection where the cluster ends."""

    def run(self) -> None:
        with suppress(httpx2.HTTPError, AssertionError):
            super().run()


def parent(server: Server, rank: int) -> psutil.Process:
    return psutil.Process(server.get("/admin/pipeline")["stages"][rank]["pid"])


def to_engines(signum: signal.Signals, *ranks: int) -> Fault:
    def fault(server: Server, _: Path) -> None:
        engines = server.engines()
        for rank in ranks:
            engines[rank].send_signal(signum)

    return fault


def to_parent(signum: signal.Signals, rank: int) -> Fault:
    return lambda server, _: parent(server, rank).send_signal(signum)


def to_launcher(*signums: signal.Signals) -> Fault:
    def fault(server: Server, _: Path) -> None:
        for signum in signums:
            server.process.send_signal(signum)
            time.sleep(0.1)

    return fault


def whole_rank(server: Server, _: Path) -> None:
    one = parent(server, 1)
    for process in (one, *one.children(recursive=True)):
        process.kill()


def stopped_rank(server: Server, _: Path) -> None:
    one = parent(server, 1)
    for process in (one, *one.children(recursive=True)):
        process.suspend()


def then_drained(fault: Fault) -> Fault:
    def both(server: Server, model: Path) -> None:
        fault(server, model)
        assert httpx2.post(f"{server.url}/admin/drain?seconds=1").status_code == 202

    return both


def engine_again(server: Server, model: Path) -> None:
    """Killed, and so is the one that comes in its place."""
    for life in (1, 2, 3):
        while 1 not in (engines := server.engines()):
            time.sleep(0.02)
        engines[1].kill()
        server.wait_for_log(f"event=recovering life={life}")


def launcher_in_recovery(server: Server, model: Path) -> None:
    to_engines(signal.SIGKILL, 1)(server, model)
    server.wait_for_log("event=recovering")
    server.process.kill()


def signal_in_recovery(server: Server, model: Path) -> None:
    to_engines(signal.SIGKILL, 0)(server, model)
    server.wait_for_log("event=recovering")
    server.process.terminate()


def garbage(server: Server, _: Path) -> None:
    for port in ports_of(server.family()):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"\x00\xffGET / HTTP/1.1\r\n\r\n" * 20)


def model_gone(server: Server, model: Path) -> None:
    shutil.rmtree(model)
    to_engines(signal.SIGKILL, 1)(server, model)


def frozen_rank_0(server: Server, _: Path) -> None:
    parent(server, 0).suspend()
    server.process.terminate()


def stop_command(server: Server, _: Path) -> None:
    stop = ["launch", "--stop", str(server.process.pid)]
    subprocess.run([str(BIN / "brigade"), *stop], check=True, capture_output=True)


GOES_ON: dict[str, Fault] = {
    "rank 0's engine killed": to_engines(signal.SIGKILL, 0),
    "rank 1's engine killed": to_engines(signal.SIGKILL, 1),
    "both engines killed": to_engines(signal.SIGKILL, 0, 1),
    "rank 0's engine aborts": to_engines(signal.SIGABRT, 0),
    "rank 1's engine has a bad pointer": to_engines(signal.SIGSEGV, 1),
    "rank 0's engine stopped": to_engines(signal.SIGSTOP, 0),
    "rank 1's engine stopped": to_engines(signal.SIGSTOP, 1),
    "both engines stopped": to_engines(signal.SIGSTOP, 0, 1),
    "an engine killed again and again": engine_again,
    "rank 1's parent killed": to_parent(signal.SIGKILL, 1),
    "rank 1's parent stopped": to_parent(signal.SIGSTOP, 1),
    "rank 1 stopped as a whole": stopped_rank,
    "rank 1 killed as a whole": whole_rank,
    "SIGTERM to rank 1's parent": to_parent(signal.SIGTERM, 1),
    "garbage on every port": garbage,
}
ENDS: dict[str, tuple[Fault, int]] = {
    "SIGTERM": (to_launcher(signal.SIGTERM), 0),
    "SIGINT": (to_launcher(signal.SIGINT), 0),
    "the terminal goes": (to_launcher(signal.SIGHUP), 0),
    "two signals": (to_launcher(signal.SIGTERM, signal.SIGTERM), 137),
    "--stop": (stop_command, 0),
    "the launcher killed": (to_launcher(signal.SIGKILL), -signal.SIGKILL),
    "the launcher killed in a recovery": (launcher_in_recovery, -signal.SIGKILL),
    "a signal in a recovery": (signal_in_recovery, 0),
    "rank 0's parent killed": (to_parent(signal.SIGKILL, 0), 137),
    "SIGTERM to rank 0's parent": (to_parent(signal.SIGTERM, 0), 0),
    "rank 0's parent stopped, then a signal": (frozen_rank_0, 137),
    "rank 1's parent stopped, then drained": (then_drained(to_parent(signal.SIGSTOP, 1)), 0),
    "rank 1 stopped as a whole, then drained": (then_drained(stopped_rank), 0),
    "rank 1 killed as a whole, then drained": (then_drained(whole_rank), 0),
    "rank 1's engine killed, then drained": (then_drained(to_engines(signal.SIGKILL, 1)), 0),
    "the model is gone": (model_gone, 3),
}


def test_there_are_at_least_twenty_kinds_of_faults() -> None:
    assert len(GOES_ON) + len(ENDS) >= 20


def ports_of(processes: list[psutil.Process]) -> set[int]:
    ports = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections("tcp")
            ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return ports


@pytest.mark.parametrize("kind", [*GOES_ON, *ENDS])
def test_each_kind_of_fault_leaves_no_process_and_no_open_port(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY_CHAT, model)
    port = free_ports(1)[0]
    more = (quick(stall_timeout=2, return_timeout=30, max_restarts=9),)
    command = brigade_launch(2, flags_of(port, model, *more, "--served-model-name", "tiny-chat"))
    with started(command, port) as server:
        server.wait_until_ready()
        stream = Client(server, 1)
        stream.start()
        time.sleep(0.3)
        family, ports = server.family(), ports_of(server.family())
        assert len(ports) >= 2
        try:
            if kind in GOES_ON:
                GOES_ON[kind](server, model)
                stream.join(60)
                assert stream.end == "data: [DONE]", server.text
                family, code = server.family() + family, 0
                server.process.terminate()
            else:
                fault, code = ENDS[kind]
                fault(server, model)
            assert server.process.wait(60) == code, server.text
            stream.join(60)
            assert not stream.is_alive()
            assert gone(family, 60), server.text
            assert not ports & held()
        finally:
            for process in family:
                if process.is_running():
                    process.kill()


def held() -> set[int]:
    """All ports on which any process listens."""
    connections = psutil.net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
