"""Builds ssh's command line and explains ssh's error messages. All functions are pure."""

import re
import shlex
from collections.abc import Sequence

CONNECT_SECONDS = 10

# A person's own settings stand back: nobody can type a password, and a shared connection or a
# forwarded port of theirs would outlive the ranks, or keep them from starting.
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

# What ssh or the shell behind it says -> what is wrong, and what to do.
_MEANINGS = (
    (
        r"Permission denied",
        "it asks for a password",
        "run `ssh-copy-id {host}`, or load the key with `ssh-add`",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Offending .* key",
        "its host key has changed",
        "if that is right, run `ssh-keygen -R {host}` and `ssh {host}` once",
    ),
    (r"Host key verification failed", "its key is not known", "run `ssh {host}` once and accept"),
    (
        r"Could not resolve hostname",
        "the name cannot be resolved",
        "correct it in the hostfile, or give it an entry in ~/.ssh/config",
    ),
    (
        r"Connection refused",
        "no ssh server listens there",
        "start it (macOS: System Settings, General, Sharing, Remote Login)",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "it cannot be reached",
        "is it on, and in this network? On macOS, allow the terminal under Privacy & Security, "
        "Local Network",
    ),
    (
        r"No module named",
        "{python} there has no mlx-brigade",
        "install it there, or name another Python with --python",
    ),
    (
        r"not found|No such file|Permission denied",
        "{python} does not exist there",
        "install mlx-brigade in the same place on all hosts, or name its Python with --python",
    ),
)


def ssh_command(ssh: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Runs command on a host, whatever its login shell. ssh is the program, perhaps with flags."""
    settings = [word for setting in _SETTINGS for word in ("-o", setting)]
    return [*ssh, "-T", "-a", "-x", *settings, host, "exec " + shlex.join(command)]


def meaning(said: str, host: str, python: str) -> tuple[str, str]:
    """Explains what a host printed before its command ended: the reason, and how to fix it."""
    # A missing interpreter is the shell's word, not ssh's, though both say that no file is there.
    if re.search(re.escape(python) + ".*(denied|No such)", said):
        meanings = [_MEANINGS[-1], *_MEANINGS]
    else:
        meanings = list(_MEANINGS)
    for pattern, reason, fix in meanings:
        if re.search(pattern, said, re.IGNORECASE):
            return reason.format(python=python), fix.format(host=host)
    last = said.strip().rpartition("\n")[2][:200]
    return f"ssh reported {last!r}" if last else "it hung up", f"try `ssh {host}`"
