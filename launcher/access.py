"""How a launcher reaches the hosts of its ranks. `launcher.ssh` does it with ssh."""

from pathlib import Path
from typing import Protocol

from launcher.hostfile import Host


class HostAccess(Protocol):
    """A way to start agents. folder is the working folder of the ranks. Without one, ranks work in
    the launcher's current folder, if it exists on their host. `reached` is what doctor says of a
    host that was reached and printed nothing else."""

    @property
    def reached(self) -> str: ...

    @property
    def folder(self) -> Path | None: ...

    def command(self, host: Host, token: str) -> list[str]:
        """Returns the command line whose standard input and output are those of an agent."""

    def missing(self, host: Host) -> str:
        """Returns how to fix that the program of `command` cannot be run."""

    def silent(self, host: Host) -> str:
        """Returns what to do if no answer comes."""

    def meaning(self, host: Host, said: str) -> tuple[str, str]:
        """Explains what `command` printed before it ended: the reason, and how to fix it."""


def agent_command(python: str, token: str) -> list[str]:
    """Returns the command line of an agent, on its own host."""
    return [python, "-m", "launcher.agent", token]
