"""This machine's key, and the list of machines that it trusts: the files of one folder. Only the
node writes them.

All paired machines form one group. Each keeps the whole list, and machines merge their lists when
they meet: of two entries with the same key the later one counts, so a revoked machine stays revoked
until it is paired again.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import asyncssh
import msgspec

from launcher.nodes.messages import Machine
from launcher.record import state_folder
from serve.core.errors import ClusterError
from serve.core.folder import full_sync

_DECODER = msgspec.json.Decoder(list[Machine])
MAX_MACHINES = 256  # entries of a list, revoked ones included
MAX_NAME_BYTES = 63
MAX_ADDRESSES = 64  # of one machine
_LATEST = 1e11  # seconds since the epoch; larger numbers would lose their fractions


def node_folder() -> Path:
    """Returns the folder of this user's node, which nobody else may read. Raises ClusterError."""
    folder = state_folder() / "node"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        reason = f"{folder} cannot be created ({error.strerror})"
        raise ClusterError(f"{reason}: set XDG_STATE_HOME to a folder of yours.") from error
    if mode & 0o077:
        raise ClusterError(f"{folder} holds a private key, and others can read it: chmod 700 it.")
    return folder


def public(key: asyncssh.SSHKey) -> str:
    """Returns a public key in OpenSSH's form, without a comment."""
    words = key.export_public_key().decode().split()
    return " ".join(words[:2])


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """The files of this machine's node."""

    folder: Path

    def own_key(self) -> asyncssh.SSHKey:
        """Returns this machine's private key, and makes it the first time. Raises ClusterError."""
        path = self.folder / "key"
        if not path.exists():
            key = asyncssh.generate_private_key("ssh-ed25519")
            _write(path, key.export_private_key())
        if path.stat().st_mode & 0o077:
            raise ClusterError(f"{path} is a private key, and others can read it: chmod 600 it.")
        try:
            return asyncssh.read_private_key(path)
        except (OSError, ValueError) as error:
            what = f"{path} is not a private key that can be read ({error})"
            raise ClusterError(f"{what}: delete it, and pair this machine again.") from error

    def machines(self) -> list[Machine]:
        """Returns all entries, revoked ones too. Raises ClusterError."""
        path = self.folder / "machines.json"
        try:
            return _DECODER.decode(path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError, msgspec.DecodeError) as error:
            what = f"{path} cannot be read ({error})"
            raise ClusterError(f"{what}: delete it, and pair the machines again.") from error

    def members(self) -> list[Machine]:
        return [machine for machine in self.machines() if not machine.is_revoked]

    def merge(self, news: Iterable[Machine]) -> bool:
        """Adds the later entries to the list. Returns whether it has changed. Raises
        ClusterError."""
        before = self.machines()
        after = merged(before, news)
        if after == before:
            return False
        data = msgspec.json.format(msgspec.json.encode(after))
        _write(self.folder / "machines.json", data)
        return True


def _write(path: Path, data: bytes) -> None:
    """Writes a file that others cannot read, whole or not at all. Raises ClusterError."""
    new = path.with_suffix(".new")
    try:
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            full_sync(descriptor)
        new.rename(path)
    except OSError as error:
        what = f"{path} cannot be written ({error.strerror})"
        raise ClusterError(
            f"{what}: make room on the disk, or make the folder writable."
        ) from error


def since_now(known: Iterable[Machine], key: str) -> float:
    """Returns the time of a new entry for a key. It is later than that of the old entry, even if
    that comes from a machine whose clock is ahead."""
    before = max((machine.since for machine in known if machine.key == key), default=0.0)
    return max(time.time(), before + 0.001)


def merged(known: Iterable[Machine], news: Iterable[Machine]) -> list[Machine]:
    """Returns the later entry for each key."""
    by_key = {machine.key: machine for machine in known}
    for machine in news:
        if not is_plausible(machine):
            continue
        before = by_key.get(machine.key)
        if before is None and len(by_key) >= MAX_MACHINES:
            continue
        if before is None or machine.since > before.since:
            by_key[machine.key] = machine
    return list(by_key.values())


def is_plausible(machine: Machine) -> bool:
    """Whether an entry has a time, a name, and a key and places that could be right."""
    try:
        key = asyncssh.import_public_key(machine.key)
        for address in machine.addresses:
            IPv4Address(address)
    except ValueError:
        return False
    is_time = 0 <= machine.since < _LATEST
    is_place = 0 <= machine.port < 65536 and len(machine.addresses) <= MAX_ADDRESSES
    return is_time and is_place and public(key) == machine.key and is_name(machine.name)


def is_name(name: str) -> bool:
    """Whether a name can stand in a table, a log line and an announcement."""
    is_short = 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES
    return is_short and all(letter.isalnum() or letter in "-_." for letter in name)
