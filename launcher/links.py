"""Measures the links between hosts, takes the fastest address of each pair, and orders the ring."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import permutations

from launcher.remote import AgentConnection, HostError, LostHostError, hop_speed, list_networks
from launcher.routes import HostRoute, Network, Pair, common_routes, needed_pairs
from serve.core.agent_messages import HopSpeed

MEASURE_SECONDS = 0.2
MOST_TRIED_HOSTS = 8  # With more hosts, trying all orders would take minutes.
_STEP_BYTES = 16 << 10  # about what a decode step of a few rows sends to the next rank


@dataclass(frozen=True, slots=True)
class MeasuredHop:
    """The way from one host to another, as measured."""

    route: HostRoute
    speed: HopSpeed

    @property
    def seconds(self) -> float:
        """The time that a decode step takes from one host to the other, as a model."""
        return self.speed.round_trip_seconds + _STEP_BYTES / self.speed.bytes_per_second


@dataclass(slots=True)
class Measured:
    """The fastest link of each pair of hosts that reach each other, their networks, the addresses
    at which others have seen them, and why other pairs do not reach each other."""

    networks: list[Network]
    seen: Sequence[Sequence[str]]
    links: dict[Pair, MeasuredHop] = field(default_factory=dict)
    failures: dict[Pair, str] = field(default_factory=dict)

    def routes(self, order: Sequence[int]) -> dict[Pair, HostRoute]:
        """Returns the routes between ranks, of which order names the hosts."""
        ranks = {host: rank for rank, host in enumerate(order)}
        return {(ranks[a], ranks[b]): link.route for (a, b), link in self.links.items()}


def not_measured(
    connections: Sequence[AgentConnection],
    seen: Mapping[str, Sequence[str]],
) -> Measured:
    """Asks all hosts for their addresses. `seen` are those at which others have seen each host, by
    its name. Raises HostsError."""
    networks = list_networks(connections)
    return Measured(networks, [seen[connection.host.ssh] for connection in connections])


def measure(
    connections: Sequence[AgentConnection],
    seen: Mapping[str, Sequence[str]],
) -> Measured:
    """Measures all pairs of hosts over all addresses that they have in common, several pairs at
    once where they share no host. Raises HostError, HostsError."""
    measured = not_measured(connections, seen)

    def measure_pair(pair: Pair) -> None:
        for caller, called in (pair, pair[::-1]):
            measure_hops(measured, connections, caller, called)

    for pairs in filter(None, rounds(len(connections))):
        with ThreadPoolExecutor(len(pairs)) as pool:
            list(pool.map(measure_pair, pairs))
    return measured


def measure_hops(
    measured: Measured,
    connections: Sequence[AgentConnection],
    caller: int,
    called: int,
) -> None:
    """Measures the hop between two hosts over each of its addresses, and keeps the fastest. Raises
    LostHostError."""
    networks = measured.networks
    found = []
    for route in common_routes(networks[caller], networks[called], measured.seen[called]):
        (ip,) = route.ips
        try:
            speed = hop_speed(connections[caller], connections[called], ip, MEASURE_SECONDS)
            found.append(MeasuredHop(route, speed))
        except LostHostError:
            raise
        except HostError as error:
            name = connections[caller].host
            measured.failures[caller, called] = f"; {name} tried {ip}: {error.what}"
    if found:
        measured.links[caller, called] = min(found, key=lambda link: link.seconds)


def rounds(num_hosts: int) -> list[list[Pair]]:
    """Returns all pairs of hosts, in rounds in which no host is in two pairs."""
    # As in a tournament: the first one stays, and the others move on by one seat each round.
    seats = list(range(num_hosts + num_hosts % 2))
    found = []
    for _ in seats[1:]:
        opposite = zip(seats, reversed(seats), strict=True)
        pairs = [(min(pair), max(pair)) for pair in list(opposite)[: len(seats) // 2]]
        found.append([pair for pair in pairs if pair[1] < num_hosts])  # An odd one out rests.
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def ring_order(seconds: Mapping[Pair, float], num_hosts: int, num_shards: int = 1) -> list[int]:
    """Returns the hosts in the order of their ranks that makes the sum of all hops between
    neighbours least. Host 0 stays first. A pair of hosts that do not reach each other has no
    seconds. With many hosts, each is followed by the one that is nearest to it."""
    others = range(1, num_hosts)
    if num_hosts > MOST_TRIED_HOSTS:
        return _chain(seconds, list(others))
    hops = needed_pairs(num_hosts, num_shards, serves=False)
    infinite = float("inf")

    def total(order: list[int]) -> float:
        return sum(seconds.get((order[a], order[b]), infinite) for a, b in hops)

    return min(([0, *rest] for rest in permutations(others)), key=total)


def _chain(seconds: Mapping[Pair, float], left: list[int]) -> list[int]:
    order = [0]
    while left:
        last = order[-1]
        order.append(min(left, key=lambda host: seconds.get((last, host), float("inf"))))
        left.remove(order[-1])
    return order


def place(connections: list[AgentConnection], measured: Measured, num_shards: int) -> list[int]:
    """Gives each host its rank, and brings the connections into that order, which is returned.
    Raises HostsError for neighbours that do not reach each other."""
    seconds = {pair: link.seconds for pair, link in measured.links.items()}
    order = ring_order(seconds, len(connections), num_shards)
    connections[:] = [connections[host] for host in order]
    for rank, connection in enumerate(connections):
        connection.host = replace(connection.host, rank=rank, has_rank=True)
    return order
