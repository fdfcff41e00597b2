"""Reaches the machines of a group through their nodes."""

import sys
from pathlib import Path

from launcher.hostfile import Host


class NodeAccess:
    """A host's name is that of its node. Its node starts the agent, with its own Python."""

    folder: Path | None = None
    reached: str = "its node answers"

    def command(self, host: Host, token: str) -> list[str]:
        return [sys.executable, "-m", "launcher.nodes.connect", host.ssh, "agent", token]

    def missing(self, host: Host) -> str:
        return f"install Brigade again on this machine, which has to reach {host.ssh}"

    def silent(self, host: Host) -> str:
        return f"is it busy, or going to sleep? Run `brigade node` there again: {host.ssh}"

    def meaning(self, host: Host, said: str) -> tuple[str, str]:
        """Takes apart the one line in which `launcher.nodes.connect` says what failed."""
        last = said.strip().rpartition("\n")[2][:300]
        what, _, fix = last.removeprefix(host.ssh).lstrip(": ").rstrip(".").partition(": ")
        return what or "it hung up", fix or "run `brigade node` there again"
