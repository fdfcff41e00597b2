"""Tries out the features of the operating system and of Python that Brigade needs."""

import fcntl
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import psutil

from launcher.command import HOST
from launcher.facts import tool
from launcher.process import signal_group
from serve.core.connection import keep_alive
from serve.core.folder import full_sync, own_folder
from serve.core.open_files import allow_files
from serve.selftest.report import Line, not_tried
from serve.selftest.section import Context

_SPARSE_BYTES = 1 << 30
_SYNCED_BYTES = 1 << 20
_SLEEP_SECONDS = 0.05
_NUM_SLEEPS = 20
_END_SECONDS = 10.0
PORT_ACTIVE = "PORT_ACTIVE"
# Lines of ibv_devices, such as "rdma_en2  e0c5797d9c8fac05", and of ibv_devinfo.
_DEVICE = re.compile(r"^\s*(\S+)\s+[0-9a-f]{16}\s*$", re.MULTILINE)
_STATE = re.compile(r"^hca_id:\s*(\S+).*(?:\n(?!hca_id).*)*?\n\s*state:\s*(\w+)", re.MULTILINE)
_SLEEPER = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]


def yes(is_right: bool) -> str:
    return "yes" if is_right else "no"


def chip(_: Context) -> Iterator[Line]:
    yield Line(
        "system.chip", tool("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    )
    yield Line("system.macos_build", tool("sw_vers", "-buildVersion") or "none")
    started = os.environ.get("TERM_PROGRAM", "another program")
    yield Line("system.started_by", "ssh" if "SSH_CONNECTION" in os.environ else started)


def wheel(_: Context) -> Iterator[Line]:
    """Compares the tags of MLX's wheel with the interpreter that runs it."""
    text = distribution("mlx").read_text("WHEEL") or ""
    tags = [line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag: ")]
    own = f"cp{sys.version_info.major}{sys.version_info.minor}", platform.machine()
    fits = any(tag.startswith(own[0]) and tag.endswith(own[1]) for tag in tags)
    yield Line("system.wheel", ", ".join(tags) or "none")
    yield Line("system.wheel_fits", yes(fits))


def rdma(_: Context) -> Iterator[Line]:
    yield Line("system.rdma_enabled", tool("rdma_ctl", "status") or "unknown")
    states = port_states()
    if not states:
        yield not_tried("system.rdma", "this system lists no devices for RDMA")
        return
    yield Line("system.rdma", len(states))
    num_active = list(states.values()).count(PORT_ACTIVE)
    yield Line("system.rdma_active", num_active)


def port_states() -> dict[str, str]:
    """Returns the state of each device's port, such as PORT_ACTIVE, by the device's name. It is ""
    for devices that ibv_devinfo does not describe."""
    states = {name: "" for name in _DEVICE.findall(tool("ibv_devices"))}
    return states | dict(_STATE.findall(tool("ibv_devinfo")))


def keep_alive_options(_: Context) -> Iterator[Line]:
    """Sets the options that notice a peer without power, and reads them back."""
    name = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    with socket.create_server((HOST, 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        keep_alive(client)
        idle = client.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        every = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
    yield Line("system.keep_alive", f"{idle}, {every}")


def disk(_: Context) -> Iterator[Line]:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(_SYNCED_BYTES))
        file.flush()
        started = time.perf_counter()
        os.fsync(file.fileno())
        handed = time.perf_counter()
        full_sync(file.fileno())
        on_disk = (time.perf_counter() - handed) * 1e3
        yield Line("system.sync", on_disk, {"fsync before": (handed - started) * 1e3})
        file.truncate(_SPARSE_BYTES)
        yield Line("system.sparse", os.fstat(file.fileno()).st_blocks * 512 / 1e6)


def folder_lock(_: Context) -> Iterator[Line]:
    with own_folder() as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        is_locked = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = True
        finally:
            os.close(descriptor)
    yield Line("system.folder_lock", yes(is_locked))


def open_files(_: Context) -> Iterator[Line]:
    yield Line("system.open_files", float(allow_files()))
    with open(os.devnull) as file:
        yield Line("system.dev_fd", yes(Path(f"/dev/fd/{file.fileno()}").exists()))


def ending_processes(_: Context) -> Iterator[Line]:
    """Kills a process group of which only a zombie is left, and finds processes by environment."""
    environment = {**os.environ, "BRIGADE_SELFTEST": "child"}
    with subprocess.Popen(
        _SLEEPER, env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # Until then, its environment may not be set.
        is_found = psutil.Process(child.pid).environ().get("BRIGADE_SELFTEST") == "child"
        signal_group(child.pid, signal.SIGKILL)
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        signal_group(child.pid, signal.SIGKILL)
        has_ended = child.wait(_END_SECONDS) == -signal.SIGKILL
    yield Line("system.kill", yes(is_found and has_ended))


def timer(_: Context) -> Iterator[Line]:
    late = []
    for _number in range(_NUM_SLEEPS):
        started = time.perf_counter()
        time.sleep(_SLEEP_SECONDS)
        late.append(time.perf_counter() - started - _SLEEP_SECONDS)
    yield Line("system.timer", max(late) * 1e3)


MEASUREMENTS = [
    chip,
    wheel,
    rdma,
    keep_alive_options,
    disk,
    folder_lock,
    open_files,
    ending_processes,
    timer,
]
