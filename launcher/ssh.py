"""Reaches hosts by ssh: builds its command line and explains its error messages."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from launcher.access import agent_command
from launcher.hostfile import Host

CONNECT_SECONDS = 10

# These settings override the user's own: nobody can type a password here, and a shared connection
# or a forwarded port could outlive the ranks, or prevent their start.
_SETTINGS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_SECONDS}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=4",
    "ControlMaster=no",
    "ControlPath=none",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "LogLevel=ERROR",
)


class Meaning(NamedTuple):
    """The explanation of a message from ssh, or from the shell on the host. pattern is the regular
    expression of the message. reason may contain {python}; `fix` may contain {host} and {ssh},
    which is the command that a person types to log in there."""

    pattern: str
    reason: str
    fix: str


_NO_PYTHON = Meaning(
    "not found|No such file|Permission denied",
    "{python} does not exist there",
    "install mlx-brigade in the same place on all hosts, or name its Python with --python",
)
# The first meaning that matches counts.
_MEANINGS = (
    Meaning(
        "Permission denied",
        "it asks for a password",
        "run `ssh-copy-id {host}`, or load the key with `ssh-add`, until `{ssh}` needs no password",
    ),
    Meaning(
        "REMOTE HOST IDENTIFICATION HAS CHANGED|Offending .* key",
        "its host key has changed",
        "if that is right, run `ssh-keygen -R {host}` and `{ssh}` once",
    ),
    Meaning(
        "Host key verification failed",
        "its key is not known",
        "run `{ssh}` once and accept",
    ),
    Meaning(
        "Could not resolve hostname",
        "the name cannot be resolved",
        "correct it in the hostfile, or give it an entry in ~/.ssh/config",
    ),
    Meaning(
        "Connection refused",
        "no ssh server listens there",
        "start it (macOS: System Settings, General, Sharing, Remote Login)",
    ),
    Meaning(
        "timed out|No route to host|Network is unreachable|Host is down",
        "it cannot be reached",
        "is it on, and in this network? On macOS, allow the terminal under Privacy & Security, "
        "Local Network",
    ),
    Meaning(
        "No module named",
        "{python} there has no mlx-brigade",
        "install it there, or name another Python with --python",
    ),
    _NO_PYTHON,
)


@dataclass(frozen=True, slots=True)
class SshAccess:
    """ssh with its flags, the Python on the hosts, and the working folder. A host with the address
    127.0.0.1 is this machine, which needs no ssh."""

    ssh: tuple[str, ...] = ("ssh",)
    python: str = sys.executable
    folder: Path | None = None
    reached: str = "ssh can log in, and the shell prints nothing"

    def command(self, host: Host, token: str) -> list[str]:
        command = agent_command(self.python, token)
        return command if host.is_local else ssh_command(self.ssh, host.ssh, command)

    def missing(self, host: Host) -> str:
        if host.is_local:
            return "name another Python with --python"
        return "install ssh, or name it with --ssh"

    def silent(self, host: Host) -> str:
        command = shlex.join([*self.ssh, host.ssh, "true"])
        return f"`{command}` must return; does its shell profile wait?"

    def meaning(self, host: Host, said: str) -> tuple[str, str]:
        return meaning(said, self.ssh, host.ssh, self.python)


def ssh_command(ssh: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs command on a host, whatever the login shell is."""
    settings = [word for setting in _SETTINGS for word in ("-o", setting)]
    return [*ssh, "-T", "-a", "-x", *settings, host, "exec " + shlex.join(command)]


def meaning(said: str, ssh: Sequence[str], host: str, python: str) -> tuple[str, str]:
    """Explains what a host printed before its command ended: the reason, and how to fix it."""
    login = shlex.join([*ssh, host])
    meanings = list(_MEANINGS)
    # The shell reports an interpreter that is missing or cannot be run in the same words as ssh.
    if re.search(re.escape(python) + ".*(denied|No such)", said):
        meanings.insert(0, _NO_PYTHON)
    for pattern, reason, fix in meanings:
        if re.search(pattern, said, re.IGNORECASE):
            return reason.format(python=python), fix.format(host=host, ssh=login)
    last = said.strip().rpartition("\n")[2][:200]
    reason = f"ssh reported {last!r}" if last else "it hung up"
    return reason, f"try `{login}`"
