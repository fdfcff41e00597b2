"""Collects the facts of a host. `launcher.checks` evaluates them.

The questions to macOS were written from documentation, and have not run there yet.
"""

import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from launcher.command import HOST, LAUNCHER
from launcher.process import bound
from serve.core.agent_messages import HostFacts, MacFacts, NetworkAddress, PrefixFolder
from serve.core.blas import with_openblas
from serve.core.checkpoint import read_checkpoint
from serve.core.config import hub_id
from serve.core.errors import AddressError, BrigadeError
from serve.core.facts import files, has_package, versions

_ENGINE = "serve.rank.worker"
_RANK_MODULES = {_ENGINE, "serve.cli.main", "serve.cli.fine_tune"}
# MLX's backends on Linux, each with the extra that installs it.
_BACKENDS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}
_CHIP = re.compile(r"^model name\s*: (.+)", re.MULTILINE)
_OURS = re.compile(r"\b(brigade|launcher)\b")
_LIST_PORTS = ("networksetup", "-listallhardwareports")
_SETTING = re.compile(r"^ *([a-z]+) +(\d+)", re.MULTILINE)
_PORT = re.compile(r"Hardware Port: (.+)\nDevice: (\S+)")
_FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_TOOL_SECONDS = 5.0


def host_facts(
    model: str | None,
    ips: list[str],
    prefix_cache_dir: str | None = None,
    port: int | None = None,
) -> HostFacts:
    """Returns the facts of this host that DescribeHost asks for."""
    memory = psutil.virtual_memory()
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    digests: dict[str, str] | None = None
    model_error: str | None = None
    hub_model = hub_id(Path(model)) if model else None
    if model and not hub_model:
        try:
            digests = model_facts(Path(model))
        except BrigadeError as error:
            model_error = str(error)
    return HostFacts(
        host=socket.gethostname(),
        system=platform.system(),
        python=platform.python_version(),
        executable=sys.executable,
        versions=versions(),
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        free_disk_bytes=shutil.disk_usage(_existing(cache)).free,
        max_files=_max_files(),
        blas=with_openblas(os.environ).get("LD_PRELOAD"),
        variables={k: v for k, v in os.environ.items() if k.startswith("MLX_")},
        strays=strays(),
        interfaces={ip: interface(ip) for ip in ips},
        unusable={ip: reason for ip in ips if (reason := _unusable(ip))},
        time=time.time(),
        model=digests,
        model_error=model_error,
        hub_model=hub_model,
        prefix_folder=prefix_folder(Path(prefix_cache_dir)) if prefix_cache_dir else None,
        mac=mac_facts() if sys.platform == "darwin" else None,
        port=port,
        port_holder=listener(port) if port else None,
        backend=next((extra for name, extra in _BACKENDS.items() if has_package(name)), ""),
        chip=_chip(),
        load=os.getloadavg()[0],
        rdma=_rdma_devices(),
        ranks=running_ranks(),
    )


def _max_files() -> int:
    """Returns the largest limit of open files that a process may give itself, -1 if there is none.
    RLIM_INFINITY is a large positive number on macOS."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return -1 if hard == resource.RLIM_INFINITY else hard


def model_facts(folder: Path) -> dict[str, str]:
    """Returns the digests that ranks compare at the start. Raises BrigadeError."""
    checkpoint = read_checkpoint(folder)
    return files(folder, checkpoint.digest)


def prefix_folder(folder: Path) -> PrefixFolder:
    """Describes a folder for prefixes, which the first start makes if it does not exist yet."""
    num_bytes = 0
    for path in folder.glob("rank-*/*/*.safetensors"):
        with suppress(FileNotFoundError):  # A running rank may have deleted it meanwhile.
            num_bytes += path.stat().st_size
    there = _existing(folder)
    problem = None
    if not there.is_dir():
        problem = f"{there} is not a folder"
    elif not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        problem = f"{there} cannot be written"
    return PrefixFolder(str(folder), num_bytes, shutil.disk_usage(there).free, problem)


def strays() -> list[int]:
    """Returns the process ids of ranks and engines whose launcher is gone: their parent is init, or
    a session's systemd. A rank that runs as a service of init has no BRIGADE_LEASH and does not
    count. In a container the launcher may be process 1."""
    found = []
    for process, modules in _ranks():
        with suppress(psutil.Error):
            parent = process.parent()
            if parent and parent.pid != 1 and parent.name() != "systemd":
                continue
            if parent and _OURS.search(" ".join(parent.cmdline())):
                continue
            if modules == {_ENGINE} or "BRIGADE_LEASH" in process.environ():
                found.append(process.pid)
    return found


def _ranks() -> Iterator[tuple[psutil.Process, set[str]]]:
    """Yields each rank and engine of this host with the module that it runs."""
    for process in psutil.process_iter(["cmdline"]):
        modules = _RANK_MODULES.intersection(process.info["cmdline"] or ())
        if modules:
            yield process, modules


def running_ranks() -> list[str]:
    """Returns which ranks run on this host, and of whose launch, where the system tells."""
    found = []
    for process, modules in _ranks():
        if _ENGINE in modules:
            continue
        with suppress(psutil.Error):
            environment = process.environ()
            whose = f"{environment[LAUNCHER]}'s" if LAUNCHER in environment else "a"
            found.append(f"rank {environment.get('MLX_RANK', '0')} of {whose} launch")
    return sorted(found)


def kill_former(secret: str, rank: int) -> None:
    """Kills the remains of a rank to which the launcher with this secret lost the connection."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            own = environment.get("BRIGADE_SECRET"), environment.get("MLX_RANK")
            if own == (secret, str(rank)):
                process.kill()


def interface(ip: str) -> str | None:
    """Returns the name of the interface that has this address."""
    if ipaddress.ip_address(ip).is_loopback:
        ip = HOST
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return str(name)
    return None


def network_addresses() -> list[NetworkAddress]:
    """Returns the IPv4 addresses of this host's interfaces that are up. MLX's ring has no IPv6."""
    states = psutil.net_if_stats()
    ports = {device: port for port, device in _PORT.findall(tool(*_LIST_PORTS))}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for address in addresses:
            if address.family == socket.AF_INET:
                # The end of a tunnel may have no netmask.
                netmask = address.netmask or "255.255.255.255"
                length = ipaddress.IPv4Network(f"0.0.0.0/{netmask}").prefixlen
                kind = ports.get(name) or _linux_kind(name)
                found.append(NetworkAddress(address.address, length, name, kind))
    return found


def _linux_kind(name: str) -> str:
    """Returns an interface's name on Linux, or macOS's word for Wi-Fi or Thunderbolt."""
    if Path("/sys/class/net", name, "wireless").exists():
        return "Wi-Fi"
    return name.replace("thunderbolt", "Thunderbolt ")


def _chip() -> str:
    with suppress(OSError):
        if found := _CHIP.search(Path("/proc/cpuinfo").read_text()):
            return found[1]
    return tool("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()


def _rdma_devices() -> list[str]:
    with suppress(OSError):
        return sorted(os.listdir("/sys/class/infiniband"))
    return re.findall(r"\brdma_\w+", tool("ibv_devices"))


def listener(port: int) -> str | None:
    """Returns the program that listens on a port of this host, or None."""
    with suppress(psutil.AccessDenied):  # macOS answers only root
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return _name(connection.pid)
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            return "another program"
        return None


def _name(pid: int | None) -> str:
    with suppress(psutil.Error):
        if pid is not None:
            return f"{psutil.Process(pid).name()} (pid {pid})"
    return "another user's program"


def _unusable(ip: str) -> str | None:
    try:
        bound(ip).close()
    except AddressError as error:
        return str(error)
    return None


def mac_facts() -> MacFacts:
    """Returns the facts of this Mac. Not run on macOS yet."""
    settings = dict(_SETTING.findall(tool("pmset", "-g")))
    return MacFacts(
        wired_limit=tool("sysctl", "-n", "iogpu.wired_limit_mb"),
        sleep=settings.get("sleep", ""),
        version=platform.mac_ver()[0],
        machine=platform.machine(),
        # Portable Macs have powermode, others only lowpowermode.
        power_mode=settings.get("powermode") or settings.get("lowpowermode", ""),
        has_firewall="enabled" in tool(_FIREWALL, "--getglobalstate"),
        wired_bytes=wired_bytes() or 0,
        has_ranks=any(_ranks()),
    )


def wired_bytes() -> int | None:
    """Returns the memory that is wired on this machine, or None where the system does not say."""
    return getattr(psutil.virtual_memory(), "wired", None)


def tool(*command: str) -> str:
    """Returns what a tool of the system prints, or nothing if it is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS)
        return run.stdout.strip()
    return ""


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())
