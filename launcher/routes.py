"""Chooses the addresses at which the ranks of a launch find each other. Pure, but for a function
that tries an address.

Each pair of hosts may have a cable with its own network, so a host may have a different address for
each other host. The addresses in the hostfile come first, then those in a network that both hosts
have: Thunderbolt before Ethernet before Wi-Fi.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from launcher.command import HOST
from launcher.hostfile import Host
from serve.core.addresses import Addresses
from serve.core.agent_messages import NetworkAddress

WIFI = "Wi-Fi"
BRIDGE = "Thunderbolt Bridge"
_THUNDERBOLT = re.compile(r"Thunderbolt( Bridge| \d+)")  # not a Thunderbolt Ethernet adapter


@dataclass(frozen=True, slots=True)
class HostRoute:
    """The addresses at which a host finds another one, and the kind of network. is_sure is false
    if only a trial tells whether they can be reached."""

    ips: tuple[str, ...]
    kind: str
    is_sure: bool = True


Pair: TypeAlias = tuple[int, int]
"""A rank that calls another one, and the rank that it calls."""

Routes: TypeAlias = Mapping[Pair, HostRoute]

Network: TypeAlias = Sequence[NetworkAddress]
"""The addresses of a host."""

Ports: TypeAlias = Mapping[str, int]
"""The port that a rank has reserved at each of its addresses."""


def choose(
    hosts: Sequence[Host],
    networks: Sequence[Network],
    reaches: Callable[[Pair, str], bool],
) -> dict[Pair, HostRoute]:
    """Chooses the route for each pair of ranks, and leaves out pairs that have none. networks are
    those of the hosts. `reaches` says whether a caller reaches an address."""
    chosen: dict[Pair, HostRoute] = {}
    for caller in hosts:
        for called in hosts:
            pair = caller.rank, called.rank
            if called is caller:
                continue
            for route in _candidates(caller, networks[caller.rank], called, networks[called.rank]):
                if route.is_sure or all(reaches(pair, ip) for ip in route.ips):
                    chosen[pair] = route
                    break
    # MLX needs as many connections to the left as to the right.
    fewest = min((len(route.ips) for route in chosen.values()), default=0)
    return {pair: replace(route, ips=route.ips[:fewest]) for pair, route in chosen.items()}


def _candidates(
    caller: Host,
    near_caller: Network,
    called: Host,
    near_called: Network,
) -> Iterator[HostRoute]:
    """Yields the routes that may lead from one host to another, best first."""
    written = tuple(ip for ip in called.ips if not _is_outdated(ip, near_called))
    if caller.ssh == called.ssh:
        yield HostRoute(written or (HOST,), "this host")
        return
    direct = tuple(ip for ip in written if _in_any(ip, near_caller))
    if direct:
        kinds = [_kind(ip, near_caller, near_called) for ip in direct]
        is_sure = not any(map(is_link_local, direct))
        yield HostRoute(direct, max(kinds, key=_slowness), is_sure)
    yield from _shared(near_caller, near_called)
    if written and not direct:
        yield HostRoute(written, "a router", is_sure=False)


def _shared(near_caller: Network, near_called: Network) -> list[HostRoute]:
    """Returns the routes over networks that both hosts have, best first. The link-local addresses
    of all cables look like one network, so a trial has to tell which lead to the other host."""
    own = {address.ip for address in near_caller}  # Both may have the same, such as Docker's.
    routes = []
    for address in near_called:
        ip = ipaddress.IPv4Address(address.ip)
        is_shared = any(
            _contains(each, address.ip) and _contains(address, each.ip) for each in near_caller
        )
        if is_shared and not ip.is_loopback and address.ip not in own:
            kind = _kind(address.ip, near_caller, near_called)
            route = HostRoute((address.ip,), kind, is_sure=not ip.is_link_local)
            routes.append((_slowness(kind), ip.is_link_local, ip, route))
    # The order of addresses is that of their networks, so both ends choose the same cable.
    routes.sort(key=lambda each: each[:3])
    return [route for *_, route in routes]


def common_routes(
    near_caller: Network,
    near_called: Network,
    seen: Sequence[str],
) -> list[HostRoute]:
    """Returns the routes of one address each by which a host may reach another one. `seen` are the
    addresses at which the other one was seen, for hosts that have no network in common."""
    own = {address.ip for address in near_caller}
    if own == {address.ip for address in near_called}:
        return [HostRoute((HOST,), "this host")]
    routes = _shared(near_caller, near_called)
    if not routes:
        there = {address.ip for address in near_called} - own
        routes = [HostRoute((ip,), "a router") for ip in seen if ip in there]
    return routes


def _is_outdated(ip: str, near: Network) -> bool:
    """Whether the host does not have this link-local address any more: it changes at each boot."""
    return is_link_local(ip) and all(address.ip != ip for address in near)


def is_link_local(ip: str) -> bool:
    return ipaddress.IPv4Address(ip).is_link_local


def _contains(address: NetworkAddress, ip: str) -> bool:
    network = ipaddress.IPv4Interface(f"{address.ip}/{address.prefix_length}").network
    return ipaddress.IPv4Address(ip) in network


def _in_any(ip: str, near: Network) -> bool:
    return any(_contains(address, ip) for address in near)


def _kind(ip: str, near_caller: Network, near_called: Network) -> str:
    """Returns the kind of the slower end of a hop to this address. The caller uses the fastest of
    its interfaces in that network."""
    kinds = [min((each.kind for each in near_caller if _contains(each, ip)), key=_slowness)]
    kinds += [address.kind for address in near_called if address.ip == ip]
    return max(kinds, key=_slowness)


def _slowness(kind: str) -> int:
    if _THUNDERBOLT.fullmatch(kind):
        return 0
    return 2 if kind == WIFI else 1


def needed_pairs(num_ranks: int, num_shards: int = 1, *, serves: bool = True) -> list[Pair]:
    """Returns the pairs of ranks that exchange messages: neighbours in the rows and columns of the
    grid of stages and shards and, in a server, rank 0 and every other rank."""
    pairs: dict[Pair, None] = {}
    for rank in range(num_ranks):
        shard = rank % num_shards
        others = [
            rank - shard + (shard + 1) % num_shards,  # the next one in the row
            (rank + num_shards) % num_ranks,  # the next one in the column
        ]
        if serves:
            others.append(0)
        for other in others:
            if other != rank:
                pairs[min(rank, other), max(rank, other)] = None
    return [pair for one, other in pairs for pair in ((one, other), (other, one))]


def listening_ips(routes: Routes, rank: int) -> list[str]:
    """Returns the addresses at which other ranks find this one."""
    called = [route.ips for (_, called), route in routes.items() if called == rank]
    return list(dict.fromkeys(ip for ips in called for ip in ips))


def addresses_of(rank: int, routes: Routes, ports: Sequence[Ports]) -> Addresses:
    """Returns the addresses that one rank is started with. ports are those of all ranks."""
    num_ranks = len(ports)
    own = [_with_ports((other, rank), routes, ports) for other in range(num_ranks)]
    theirs = [_with_ports((rank, other), routes, ports) for other in range(num_ranks)]
    # A plain ring of MLX reads this rank's own entry: the addresses that the rank before it calls.
    own[rank] = theirs[rank] = own[rank - 1]
    return Addresses(rank, tuple(theirs), tuple(own))


def _with_ports(pair: Pair, routes: Routes, ports: Sequence[Ports]) -> tuple[str, ...]:
    """Returns where a rank finds another one: without a route, at any address of that rank, because
    an error that names an address tells more."""
    called_ports = ports[pair[1]]
    route = routes.get(pair)
    ips = route.ips if route else tuple(called_ports)[:1]
    return tuple(f"{ip}:{called_ports[ip]}" for ip in ips)
