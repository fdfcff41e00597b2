"""Announces a node in the local network by mDNS (DNS-SD), and listens to others.

What is announced is name, version, public key, addresses and port. Nothing of it is proved: it only
tells where to look, and SSH then checks the key.
"""

import asyncio
import json
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from launcher.nodes.group import is_name, is_plausible
from launcher.nodes.messages import Machine, SeenNode

SERVICE = "_brigade._tcp.local."
LOOK_SECONDS = 10.0  # how often the addresses of this machine are compared with the announced ones
HELLO_SECONDS = 150.0  # how long a node counts as there after its last NodeHello
_ANSWER_MS = 3000
_NUM_QUESTIONS = 20  # to a node that was announced, while it does not answer
_MAX_SEEN = 256
_MAX_LABEL_BYTES = 54  # of a name, so that there is room for what follows it
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Seen:
    """The nodes that were seen, by public key."""

    _announced: dict[str, SeenNode] = field(default_factory=dict)  # by the name of its service
    _greeted: dict[str, tuple[float, SeenNode]] = field(default_factory=dict)

    def announced(self, service: str, node: SeenNode | None) -> None:
        """Notes an announcement, or that it has ended."""
        if node is None:
            self._announced.pop(service, None)
        elif service in self._announced or len(self._announced) < _MAX_SEEN:
            self._announced[service] = node

    def greeted(self, node: SeenNode) -> None:
        """Notes a node that has said NodeHello itself. Its key is proved."""
        self._forget_old()
        if node.key in self._greeted or len(self._greeted) < _MAX_SEEN:
            self._greeted[node.key] = (time.monotonic(), node)

    def nodes(self) -> list[SeenNode]:
        self._forget_old()
        found: dict[str, SeenNode] = {}
        for node in [*self._announced.values(), *(node for _, node in self._greeted.values())]:
            known = found.get(node.key)
            if known:
                addresses = dict.fromkeys([*known.addresses, *node.addresses])
                node = SeenNode(node.key, node.name, node.version, list(addresses), node.port)
            found[node.key] = node
        return list(found.values())

    def _forget_old(self) -> None:
        oldest = time.monotonic() - HELLO_SECONDS
        self._greeted = {key: seen for key, seen in self._greeted.items() if seen[0] > oldest}


def own_addresses() -> list[str]:
    """Returns the IPv4 addresses of this machine that others may reach."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for address in addresses:
            is_loopback = address.address.startswith("127.")
            if address.family == socket.AF_INET and not is_loopback:
                found.append(address.address)
    return sorted(found)


async def announce(own: SeenNode, seen: Seen) -> None:
    """Announces this node, and notes others, until it is cancelled. Begins anew when the addresses
    of this machine change, because a cable or a network has come or gone."""
    while True:
        addresses = own_addresses()
        try:
            async with _Announcement(own, addresses, seen):
                while own_addresses() == addresses:
                    await asyncio.sleep(LOOK_SECONDS)
        except (OSError, zeroconf.Error) as error:
            # Without a network there is nobody to find; a node with --join does not need mDNS.
            reason = str(error) or type(error).__name__
            _logger.warning("event=not_announced reason=%s", json.dumps(reason))
            await asyncio.sleep(LOOK_SECONDS)


class _Announcement:
    """One announcement with fixed addresses. Raises OSError, zeroconf.Error."""

    def __init__(self, own: SeenNode, addresses: list[str], seen: Seen) -> None:
        self._seen = seen
        self._key = own.key
        self._tasks: set[asyncio.Task[None]] = set()
        self._zeroconf = AsyncZeroconf(ip_version=zeroconf.IPVersion.V4Only)
        self._info = AsyncServiceInfo(
            SERVICE,
            # Two machines may have one name, and a label has at most 63 bytes.
            f"{_cut(own.name)}-{secrets.token_hex(4)}.{SERVICE}",
            port=own.port,
            properties={"name": own.name, "version": own.version, "key": own.key},
            parsed_addresses=addresses,
        )

    async def __aenter__(self) -> None:
        try:
            await (await self._zeroconf.async_register_service(self._info))
        except BaseException:
            await self._zeroconf.async_close()  # Otherwise each try would leave its sockets open.
            raise
        self._browser = AsyncServiceBrowser(
            self._zeroconf.zeroconf, SERVICE, handlers=[self._changed]
        )

    async def __aexit__(self, *error: object) -> None:
        await self._browser.async_cancel()
        for task in self._tasks:
            task.cancel()
        with suppress(OSError, zeroconf.Error):
            await (await self._zeroconf.async_unregister_service(self._info))
        await self._zeroconf.async_close()

    def _changed(self, *, name: str, state_change: zeroconf.ServiceStateChange, **_: Any) -> None:
        if state_change.name == "Removed":
            self._seen.announced(name, None)
            return
        task = asyncio.get_running_loop().create_task(self._look(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, service: str) -> None:
        info = AsyncServiceInfo(SERVICE, service)
        # It is announced once: if it were busy just then, it would not be seen for an hour.
        for _ in range(_NUM_QUESTIONS):
            if await info.async_request(self._zeroconf.zeroconf, _ANSWER_MS):
                break
        else:
            return
        node = _read(info.decoded_properties, info.parsed_addresses(), info.port or 0)
        if node and node.key != self._key:
            self._seen.announced(service, node)


def _cut(name: str) -> str:
    return name.encode()[:_MAX_LABEL_BYTES].decode(errors="ignore")


def _read(
    properties: Mapping[str, str | None],
    addresses: list[str],
    port: int,
) -> SeenNode | None:
    """Returns the node that an announcement describes, or None if it cannot be one."""
    name, version, key = (properties.get(field) or "" for field in ("name", "version", "key"))
    if not is_plausible(Machine(key, name, 0.0)) or not is_name(version) or not port:
        return None
    return SeenNode(key, name, version, addresses, port)
