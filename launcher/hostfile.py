"""Reads MLX's hostfile strictly: the hosts, how to reach them, and where each listens. Also writes
the hostfile of a ring on one host.

    [{"ssh": "studio-1", "ips": ["10.0.0.1"]}, {"ssh": "studio-2", "ips": ["10.0.0.2"]}]

or the same list as "hosts" of an object with "backend" and "envs", which is what
mlx.distributed_config writes. Without "ips", the launcher chooses addresses. Each error names file,
entry and reason, and says what to write.
"""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from launcher.command import HOST, check_variable
from serve.core.errors import UsageError

_SSH = re.compile(r"[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]*")  # A name with a dash would be a flag.
_FORM = 'write [{"ssh": "studio-1", "ips": ["10.0.0.1"]}, …]'
# An error's words after the name of a wrong value, by the pattern of msgspec's message.
_WORDS = {
    r"Object missing required field `(.*)`": r"has no \1",
    r"Object contains unknown field `(.*)`": r"has an unknown field \1",
    r"Expected `array` of length >= 1": "is empty",
    r"Expected `array`, .*": "must be a list",
    r"Expected `object`, .*": "must be an object",
    r"Expected `str`, .*": "must be a string",
}


class _HostEntry(msgspec.Struct, forbid_unknown_fields=True):
    ssh: str
    ips: list[str] = []
    rdma: list[Any] = []


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    hosts: Annotated[list[_HostEntry], msgspec.Meta(min_length=1)]
    backend: str = "ring"
    envs: list[str] = []


@dataclass(frozen=True, slots=True)
class Host:
    """The host of one rank. ips are the addresses that other ranks should use if possible, best
    first. is_shared: other ranks are on the same host, so its name does not identify the rank.
    has_rank is false until it is decided which rank runs there."""

    rank: int
    ssh: str
    ips: tuple[str, ...]
    is_shared: bool = False
    has_rank: bool = True

    @property
    def is_local(self) -> bool:
        """Whether this host is reached without ssh, by the same name as in mlx.launch."""
        return self.ssh == HOST

    @property
    def label(self) -> str:
        """The rank and its host, because several ranks may be on one host."""
        return f"rank {self.rank} on {self._name}" if self.has_rank else self._name

    @property
    def _name(self) -> str:
        return "this machine" if self.is_local else self.ssh

    def __str__(self) -> str:
        return self.label if self.is_shared else self._name


@dataclass(frozen=True, slots=True)
class Hostfile:
    """The content of a hostfile. is_for_rdma says that it was written for MLX's jaccl."""

    hosts: tuple[Host, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_for_rdma: bool = False


def read_hostfile(path: Path) -> Hostfile:
    """Reads the hosts of a hostfile. Raises UsageError if it is wrong."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(
            f"--hostfile {path} cannot be read: {reason}.", code="unreadable"
        ) from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, path: str) -> Hostfile:
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            content = {"hosts": content}
        read = msgspec.convert(content, _Content)
    except msgspec.ValidationError as error:
        problem = _in_words(str(error))
        raise UsageError(f"{path}: {problem}: {_FORM}.", code="wrong_format") from error
    except (ValueError, RecursionError) as error:
        problem = f"the file is not JSON ({error}): {_FORM}"
        raise UsageError(f"{path}: {problem}.", code="wrong_format") from error
    is_for_rdma = read.backend in ("jaccl", "jaccl-ring")
    if read.backend not in ("", "ring") and not is_for_rdma:
        fix = 'write "backend": "ring", or leave it out'
        _wrong(path, "backend", f"is {read.backend!r}, and only a ring is supported", fix)
    names = [entry.ssh for entry in read.hosts]
    hosts = []
    for rank, entry in enumerate(read.hosts):
        _check_entry(path, rank, entry)
        # In a hostfile for RDMA, the ips belong to the LAN or Wi-Fi, not to the cables.
        ips = () if is_for_rdma else tuple(dict.fromkeys(entry.ips))
        hosts.append(Host(rank, entry.ssh, ips, names.count(entry.ssh) > 1))
    _check_together(path, hosts)
    environment = dict(check_variable(word, f"{path}: envs") for word in read.envs)
    return Hostfile(tuple(hosts), environment, is_for_rdma)


def _in_words(problem: str) -> str:
    """Rewrites msgspec's "Expected `str`, got `int` - at `$.hosts[0].ssh`"."""
    what, _, place = problem.partition(" - at ")
    for pattern, words in _WORDS.items():
        what = re.sub(pattern, words, what)
    where = place.strip("`$.") or "the file"
    where = re.sub(r"^hosts\[(\d+)\]\.(.*)", r"\2 of rank \1", where)
    where = re.sub(r"^hosts\[(\d+)\]", r"rank \1", where)
    return f"{where} {what}"


def _check_entry(path: str, rank: int, entry: _HostEntry) -> None:
    if not _SSH.fullmatch(entry.ssh):
        fix = "write the name that `ssh NAME` takes"
        _wrong(path, f"rank {rank}", f"has ssh {entry.ssh!r}", fix)
    for ip in entry.ips:
        try:
            address = ipaddress.IPv4Address(ip)
            is_one_host = not (address.is_unspecified or address.is_multicast)
            reason = "not the address of one host"
        except ValueError:
            is_one_host = False
            reason = "not an IPv4 address"
        if not is_one_host or ip == "255.255.255.255":
            what = f"has {ip!r} among its ips, which is {reason}"
            _wrong(path, f"rank {rank} ({entry.ssh})", what, "write it in the form 10.0.0.1")


def _check_together(path: str, hosts: Sequence[Host]) -> None:
    names: dict[str, Host] = {}
    for host in hosts:
        for ip in host.ips:
            other = names.setdefault(ip, host)
            if other.ssh != host.ssh:
                what = f"has {ip}, and so does rank {other.rank} ({other.ssh})"
                fix = "give each host its own address"
                _wrong(path, f"rank {host.rank} ({host.ssh})", what, fix)
    loopback = [host for host in hosts for ip in host.ips if _is_loopback(ip)]
    if loopback and not all(_is_loopback(ip) for host in hosts for ip in host.ips):
        host = loopback[0]
        what = "has a loopback address, which other hosts cannot reach"
        _wrong(path, f"rank {host.rank} ({host.ssh})", what, "give its address in the network")


def _is_loopback(ip: str) -> bool:
    return ipaddress.IPv4Address(ip).is_loopback


def _wrong(path: str, where: str, what: str, fix: str) -> NoReturn:
    raise UsageError(f"{path}: {where} {what}: {fix}.", code="wrong_format")


def write_hostfile(path: str, addresses: Sequence[Sequence[str]]) -> None:
    """Writes MLX's ring hostfile: for each rank the addresses `ip:port` on which it listens."""
    Path(path).parent.mkdir(0o700, exist_ok=True)
    Path(path).write_bytes(msgspec.json.encode(addresses))
