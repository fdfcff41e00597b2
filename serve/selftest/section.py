"""A section of the self-test, which runs as a process: `python -m serve.selftest.section JOB`.

A section is a module of this folder with a list MEASUREMENTS of functions. Each function yields
lines. This process writes every line as JSON to its standard output, and before each measurement
its name, so that a hang or an abort can be told from others.
"""

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from launcher.access import HostAccess
from launcher.command import HOST
from launcher.hostfile import Host, read_hostfile
from launcher.nodes.access import NodeAccess
from launcher.ssh import SshAccess
from serve.selftest.report import Line, failed


class Context(msgspec.Struct, frozen=True):
    """The settings of a self-test, for its processes. model is None for the embedded model.
    Without a hostfile and nodes, one machine is tested. nodes are names of the group's machines,
    this one first; ssh, python and folder are as in SshAccess."""

    model: str | None = None
    hostfile: str | None = None
    nodes: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ("ssh",)
    python: str = sys.executable
    folder: str | None = None
    minutes: float = 15.0

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The group's machines, the hosts of the hostfile, or two ranks on this machine."""
        if self.nodes:
            return tuple(Host(rank, name, ()) for rank, name in enumerate(self.nodes))
        if self.hostfile:
            return read_hostfile(Path(self.hostfile)).hosts
        return Host(0, HOST, (HOST,), is_shared=True), Host(1, HOST, (HOST,), is_shared=True)

    @property
    def has_hosts(self) -> bool:
        """Whether there may be other machines."""
        return bool(self.nodes or self.hostfile)

    @property
    def starts_here(self) -> bool:
        """Whether rank 0 is on this machine."""
        return bool(self.nodes) or self.hosts[0].is_local

    @property
    def access(self) -> HostAccess:
        if self.nodes:
            return NodeAccess()
        folder = Path(self.folder) if self.folder else None
        return SshAccess(self.ssh, self.python, folder)


class SectionRun(msgspec.Struct, frozen=True):
    """One process of a section. It begins with measurement number `first`."""

    section: str
    context: Context
    first: int = 0


class Began(msgspec.Struct, frozen=True, tag=True):
    """A measurement begins."""

    index: int
    name: str


class Told(msgspec.Struct, frozen=True, tag=True):
    """Words for the user, who may have to do something at once."""

    text: str


class AllMeasured(msgspec.Struct, frozen=True, tag=True):
    """All measurements are done."""


Message: TypeAlias = Began | Line | Told | AllMeasured
Measure: TypeAlias = Callable[[Context], Iterator[Line | Told]]


@dataclass(frozen=True, slots=True)
class SelftestSection:
    """The title of a section, and how long it may take from one line to the next. A section on each
    host measures a machine alone; others run on the machine of the user, and reach the hosts."""

    title: str
    seconds: float
    on_each_host: bool = False


# The sections, by the names of their modules.
SECTIONS = {
    "machine": SelftestSection("Machines, as `brigade doctor` sees them", 60.0),
    "system": SelftestSection("Python on this system", 30.0, on_each_host=True),
    "compute": SelftestSection("MLX and the GPU", 60.0, on_each_host=True),
    "memory": SelftestSection("Memory of the GPU", 90.0, on_each_host=True),
    "equality": SelftestSection("Equal results", 60.0, on_each_host=True),
    "links": SelftestSection("Links between ranks", 120.0),
    "serving": SelftestSection("Brigade, serving in layouts of stages x shards", 400.0),
    "endings": SelftestSection("How servers end", 400.0),
    "faults": SelftestSection("Faults", 150.0),
}


def main() -> int:
    job = msgspec.json.decode(sys.argv[1], type=SectionRun)
    channel = os.dup(1)
    os.dup2(2, 1)  # What libraries print is not a message.
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(message: Message) -> None:
        os.write(channel, msgspec.json.encode(message) + b"\n")

    module = importlib.import_module(f"serve.selftest.{job.section}")
    measurements: Sequence[Measure] = module.MEASUREMENTS
    for index in range(job.first, len(measurements)):
        measure = measurements[index]
        name = measure.__name__
        say(Began(index, name))
        try:
            for found in measure(job.context):
                # JSON has no numbers that are not finite.
                say(found.judged() if isinstance(found, Line) else found)
        except Exception as error:  # The top of the process. The next measurement may succeed.
            traceback.print_exc()
            say(failed(f"{job.section}.{name}", f"{type(error).__name__}: {error}"))
    say(AllMeasured())
    return 0


def _end_with_parent() -> None:
    """Ends this process, and what it has started, when its standard input is closed."""
    while os.read(0, 1):
        continue
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    code = main()
    os._exit(code)  # A normal exit might wait for a GPU that hangs.
