"""Reads MLX's hostfile strictly: the hosts, how to reach them, and where each listens.

    [{"ssh": "studio-1", "ips": ["10.0.0.1"]}, {"ssh": "studio-2", "ips": ["10.0.0.2"]}]

or the same list as "hosts" of an object with "backend" and "envs", which is what
mlx.distributed_config writes. Each error says file, entry, reason and what to write instead.
"""

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from launcher.command import HOST, check_variable
from serve.core.errors import UsageError

_SSH = re.compile(r"[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]*")  # A name with a dash would be a flag.


@dataclass(frozen=True, slots=True)
class Host:
    """The host of one rank. ips are the addresses on which it listens for its neighbours.
    is_shared says that other ranks are on the same host, so its name does not identify the rank."""

    rank: int
    ssh: str
    ips: tuple[str, ...]
    is_shared: bool = False

    @property
    def is_local(self) -> bool:
        """Whether this host is reached without ssh. As in mlx.launch, only a loopback name in the
        file is."""
        return self.ssh == HOST

    @property
    def label(self) -> str:
        """The rank and its host, because several ranks may be on one host."""
        return f"rank {self.rank} on {self._name}"

    @property
    def _name(self) -> str:
        return "this machine" if self.is_local else self.ssh

    def __str__(self) -> str:
        return self.label if self.is_shared else self._name


@dataclass(frozen=True, slots=True)
class Hostfile:
    hosts: tuple[Host, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


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
    except (ValueError, RecursionError) as error:
        _wrong(path, "the file", f"is not JSON ({error})", 'write [{"ssh": …, "ips": […]}, …]')
    if isinstance(content, list):
        content = {"hosts": content}
    if not isinstance(content, dict):
        _wrong(path, "the file", "is not a list", 'write [{"ssh": …, "ips": […]}, …]')
    _check_names(path, "the file", content, {"hosts", "backend", "envs"})
    entries = content.get("hosts")
    if not isinstance(entries, list) or not entries:
        _wrong(path, "hosts", "is not a list of hosts", 'write [{"ssh": …, "ips": […]}, …]')
    if content.get("backend", "ring") not in ("", "ring"):
        fix = 'write "backend": "ring", or leave it out'
        _wrong(path, "backend", f"is {content['backend']!r}, and only a ring is supported", fix)
    hosts = tuple(_host(path, rank, entry) for rank, entry in enumerate(entries))
    _check_together(path, hosts)
    names = [host.ssh for host in hosts]
    hosts = tuple(replace(host, is_shared=names.count(host.ssh) > 1) for host in hosts)
    return Hostfile(hosts, _environment(path, content.get("envs", [])))


def _host(path: str, rank: int, entry: Any) -> Host:
    where = f"rank {rank}"
    if not isinstance(entry, dict):
        _wrong(path, where, "is not an object", 'write {"ssh": "name", "ips": ["10.0.0.1"]}')
    ssh = entry.get("ssh")
    ips = entry.get("ips")
    rdma = entry.get("rdma", [])
    if not isinstance(ssh, str) or not _SSH.fullmatch(ssh):
        _wrong(path, where, f"has ssh {ssh!r}", "write the name that `ssh NAME` takes")
    where = f"rank {rank} ({ssh})"
    _check_names(path, where, entry, {"ssh", "ips", "rdma"})
    if not isinstance(ips, list) or not ips:
        _wrong(path, where, f"has ips {ips!r}", 'write a list of addresses: "ips": ["10.0.0.1"]')
    for ip in ips:
        reason = _not_an_address(ip)
        if reason:
            _wrong(
                path,
                where,
                f"has {ip!r} among its ips, {reason}",
                "write it in the form 10.0.0.1",
            )
    if not isinstance(rdma, list):
        _wrong(path, where, f"has rdma {rdma!r}", 'write a list, or leave "rdma" out')
    return Host(rank, ssh, tuple(dict.fromkeys(ips)))


def _not_an_address(ip: Any) -> str | None:
    try:
        if isinstance(ip, str):
            address = ipaddress.IPv4Address(ip)
        else:
            address = None
    except ValueError:
        address = None
    if address is None:
        return "which is not an IPv4 address"
    if address.is_unspecified or address.is_multicast or ip == "255.255.255.255":
        return "which is not the address of one host"
    return None


def _check_together(path: str, hosts: tuple[Host, ...]) -> None:
    names: dict[str, Host] = {}
    for host in hosts:
        for ip in host.ips:
            other = names.setdefault(ip, host)
            if other.ssh != host.ssh:
                what = f"has {ip}, and so does rank {other.rank} ({other.ssh})"
                _wrong(
                    path,
                    f"rank {host.rank} ({host.ssh})",
                    what,
                    "give each host its own address",
                )
    loopback = [host for host in hosts for ip in host.ips if _is_loopback(ip)]
    if loopback and not all(_is_loopback(ip) for host in hosts for ip in host.ips):
        host = loopback[0]
        what = "has a loopback address, which other hosts cannot reach"
        _wrong(path, f"rank {host.rank} ({host.ssh})", what, "give its address in the network")


def _is_loopback(ip: str) -> bool:
    return ipaddress.IPv4Address(ip).is_loopback


def _environment(path: str, words: Any) -> dict[str, str]:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        _wrong(path, "envs", "is not a list of strings", 'write "envs": ["NAME=VALUE", …]')
    return dict(check_variable(word, f"{path}: envs") for word in words)


def _check_names(
    path: str,
    where: str,
    entry: Mapping[str, Any],
    known: set[str],
) -> None:
    unknown = sorted(entry.keys() - known)
    if unknown:
        fix = "the names are " + ", ".join(sorted(known))
        _wrong(path, where, f"has {unknown[0]!r}, which is not a known field", fix)


def _wrong(path: str, where: str, what: str, fix: str) -> NoReturn:
    raise UsageError(f"{path}: {where} {what}: {fix}.")
