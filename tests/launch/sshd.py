"""Real ssh on one machine: a server on loopback addresses with keys of its own."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports

ADDRESSES = ("127.0.0.2", "127.0.0.3")
SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def why_not() -> str | None:
    """Why there can be no ssh server here."""
    if SSHD is None or shutil.which("ssh") is None:
        return "needs sshd and ssh: apt-get install openssh-server openssh-client"
    for address in ADDRESSES:
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                return f"needs the address {address} (macOS: sudo ifconfig lo0 alias {address})"
    return None


@dataclass(frozen=True)
class Sshd:
    """folder holds all that it needs; `ssh -F config` gets in."""

    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder / 'config'}"

    @property
    def profile(self) -> Path:
        """What every login runs first."""
        return self.folder / "profile"

    @property
    def temporary(self) -> Path:
        """TMPDIR of all that is started over ssh."""
        return self.folder / "tmp"


CONFIG = """
ListenAddress 127.0.0.2:{port}
ListenAddress 127.0.0.3:{port}
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
ForceCommand {folder}/login
LogLevel ERROR
"""

# What sshd would run itself, after something that any profile may print.
LOGIN = """#!/bin/bash
export TMPDIR={folder}/tmp
. {folder}/profile
eval "$SSH_ORIGINAL_COMMAND"
"""

CLIENT = """
Host *
    Port {port}
    User {user}
    IdentityFile {folder}/user
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
"""


@contextmanager
def running_sshd(folder: Path) -> Iterator[Sshd]:
    assert SSHD is not None
    (port,) = free_ports(1, ADDRESSES[0])
    for name in ("host", "user"):
        key = ["-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(["ssh-keygen", *key], check=True)
    settings = {"folder": folder, "port": port, "user": getpass.getuser()}
    for name, text in (("sshd", CONFIG), ("login", LOGIN), ("config", CLIENT)):
        (folder / name).write_text(text.format(**settings))
    (folder / "login").chmod(0o700)
    (folder / "profile").touch()
    (folder / "tmp").mkdir()
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where a server that root starts locks itself up
    process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd")])
    try:
        wait_for(port, process)
        yield Sshd(folder, process)
    finally:
        process.terminate()
        process.wait(10)


def wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    for address in ADDRESSES:
        while True:
            assert process.poll() is None, "sshd ended; its words are above"
            assert time.monotonic() < deadline
            with socket.socket() as probe:
                if probe.connect_ex((address, port)) == 0:
                    break
            time.sleep(0.02)
