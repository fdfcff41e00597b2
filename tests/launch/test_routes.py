"""The addresses that are chosen for each pair of ranks, and what each rank is told of them."""

from collections.abc import Callable

import pytest

from launcher.hostfile import Host
from launcher.remote import control_addresses
from launcher.routes import (
    HostRoute,
    Network,
    Pair,
    addresses_of,
    choose,
    listening_ips,
    needed_pairs,
)
from serve.core.agent_messages import NetworkAddress

Reaches = Callable[[Pair, str], bool]

# Ports of a Mac: interface and kind.
LAN = ("en0", "Ethernet")
WIFI = ("en1", "Wi-Fi")
CABLE_1 = ("en2", "Thunderbolt 1")
CABLE_2 = ("en3", "Thunderbolt 2")
CABLE_3 = ("en4", "Thunderbolt 3")
BRIDGE = ("bridge0", "Thunderbolt Bridge")
ADAPTER = ("en9", "Thunderbolt Ethernet Slot 1")


def has(*addresses: tuple[str, tuple[str, str]]) -> Network:
    """The network of a host with these addresses, such as 10.0.0.1/24, on these ports."""
    found = [NetworkAddress("127.0.0.1", 8, "lo0", "lo0")]
    for text, port in addresses:
        ip, _, length = text.partition("/")
        found.append(NetworkAddress(ip, int(length), *port))
    return found


def hosts(*ips: tuple[str, ...]) -> list[Host]:
    """Hosts whose entries in the hostfile have these addresses."""
    return [Host(rank, f"mac-{rank}", own) for rank, own in enumerate(ips)]


def never(pair: Pair, ip: str) -> bool:
    raise AssertionError(f"{ip} needs no trial")


def chosen(entries: list[Host], *networks: Network, reaches: Reaches = never) -> dict[str, str]:
    """The hop of each pair: "caller-called" and the addresses."""
    routes = choose(entries, networks, reaches)
    return {f"{one}-{other}": " ".join(route.ips) for (one, other), route in routes.items()}


def kinds(entries: list[Host], *networks: Network, reaches: Reaches = never) -> set[str]:
    return {route.kind for route in choose(entries, networks, reaches).values()}


# As mlx.distributed_config sets up a cable for each pair.
TRIANGLE = (
    has(("192.168.0.1/30", CABLE_1), ("192.168.0.5/30", CABLE_2)),
    has(("192.168.0.2/30", CABLE_2), ("192.168.0.9/30", CABLE_1)),
    has(("192.168.0.6/30", CABLE_1), ("192.168.0.10/30", CABLE_2)),
)
# The file of mlx.distributed_config has the address on the cable to the rank before.
WRITTEN = (("192.168.0.5",), ("192.168.0.2",), ("192.168.0.10",))
ON_TRIANGLE = {
    "0-1": "192.168.0.2",
    "1-0": "192.168.0.1",
    "0-2": "192.168.0.6",
    "2-0": "192.168.0.5",
    "1-2": "192.168.0.10",
    "2-1": "192.168.0.9",
}


@pytest.mark.parametrize("ips", [WRITTEN, ((), (), ())])
def test_each_pair_of_three_hosts_uses_its_own_cable(ips: tuple[tuple[str, ...], ...]) -> None:
    assert chosen(hosts(*ips), *TRIANGLE) == ON_TRIANGLE
    assert kinds(hosts(*ips), *TRIANGLE) == {"Thunderbolt 1", "Thunderbolt 2"}


def test_each_pair_of_four_hosts_uses_its_own_cable() -> None:
    ports = (CABLE_1, CABLE_2, CABLE_3)
    cables = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    ends: list[list[str]] = [[], [], [], []]
    expected = {}
    for number, (one, other) in enumerate(cables):
        ends[one].append(f"192.168.0.{4 * number + 1}/30")
        ends[other].append(f"192.168.0.{4 * number + 2}/30")
        expected[f"{other}-{one}"] = f"192.168.0.{4 * number + 1}"
        expected[f"{one}-{other}"] = f"192.168.0.{4 * number + 2}"
    networks = [has(*zip(own, ports, strict=True)) for own in ends]
    assert chosen(hosts((), (), (), ()), *networks) == expected


def test_thunderbolt_is_preferred_to_ethernet_and_ethernet_to_wifi() -> None:
    one = [("10.0.0.1/24", WIFI), ("10.0.1.1/24", LAN), ("10.0.2.1/24", CABLE_1)]
    other = [("10.0.0.2/24", WIFI), ("10.0.1.2/24", LAN), ("10.0.2.2/24", CABLE_1)]
    pair = hosts((), ())
    for num_ports, subnet in ((3, 2), (2, 1), (1, 0)):
        networks = has(*one[:num_ports]), has(*other[:num_ports])
        assert chosen(pair, *networks) == {"0-1": f"10.0.{subnet}.2", "1-0": f"10.0.{subnet}.1"}


def test_the_kind_of_a_route_is_that_of_its_slower_end() -> None:
    """One Mac has a cable into the LAN, and the other is in it by Wi-Fi."""
    both = has(("10.0.0.1/24", LAN), ("10.0.0.3/24", WIFI))
    assert kinds(hosts((), ()), both, has(("10.0.0.2/24", WIFI))) == {"Wi-Fi"}
    assert kinds(hosts((), ()), both, has(("10.0.0.2/24", LAN))) == {"Ethernet"}
    assert chosen(hosts((), ()), has(("10.0.0.2/24", LAN)), both)["0-1"] == "10.0.0.1"


def test_an_ethernet_adapter_at_a_thunderbolt_port_counts_as_ethernet() -> None:
    networks = [has((f"10.0.1.{n}/24", ADAPTER), (f"10.0.2.{n}/24", CABLE_1)) for n in (1, 2)]
    assert kinds(hosts((), ()), *networks) == {"Thunderbolt 1"}


def test_both_directions_use_the_first_of_several_cables() -> None:
    one = has(("192.168.0.5/30", CABLE_2), ("192.168.0.1/30", CABLE_1))
    other = has(("192.168.0.2/30", CABLE_2), ("192.168.0.6/30", CABLE_1))
    assert chosen(hosts((), ()), one, other) == {"0-1": "192.168.0.2", "1-0": "192.168.0.1"}


def test_addresses_in_the_hostfile_are_preferred() -> None:
    networks = [has((f"10.0.1.{n}/24", LAN), (f"10.0.2.{n}/24", CABLE_1)) for n in (1, 2)]
    written = hosts(("10.0.1.1",), ("10.0.1.2",))
    assert chosen(written, *networks) == {"0-1": "10.0.1.2", "1-0": "10.0.1.1"}


def test_all_addresses_in_the_hostfile_are_used_if_every_pair_has_equally_many() -> None:
    """MLX opens a connection for each, and needs as many to the left as to the right."""
    networks = [has((f"10.0.1.{n}/24", CABLE_1), (f"10.0.2.{n}/24", CABLE_2)) for n in (1, 2)]
    both = hosts(("10.0.1.1", "10.0.2.1"), ("10.0.1.2", "10.0.2.2"))
    assert chosen(both, *networks) == {"0-1": "10.0.1.2 10.0.2.2", "1-0": "10.0.1.1 10.0.2.1"}
    uneven = hosts(("10.0.1.1", "10.0.2.1"), ("10.0.1.2",))
    assert chosen(uneven, *networks) == {"0-1": "10.0.1.2", "1-0": "10.0.1.1"}


def test_addresses_behind_a_router_are_used_if_they_can_be_reached() -> None:
    networks = has(("10.0.1.1/24", LAN)), has(("10.0.2.2/24", LAN))
    apart = hosts(("10.0.1.1",), ("10.0.2.2",))
    both = {"0-1": "10.0.2.2", "1-0": "10.0.1.1"}
    assert chosen(apart, *networks, reaches=lambda pair, ip: True) == both
    assert chosen(apart, *networks, reaches=lambda pair, ip: False) == {}


LINK_LOCAL = (
    has(("169.254.1.1/16", BRIDGE), ("10.0.0.1/24", WIFI)),
    has(("169.254.2.2/16", BRIDGE), ("10.0.0.2/24", WIFI)),
)


@pytest.mark.parametrize("ips", [((), ()), (("169.254.9.9",), ("169.254.8.8",))])
def test_current_link_local_addresses_are_used_after_a_trial(
    ips: tuple[tuple[str, ...], ...],
) -> None:
    """Those in the hostfile are of an earlier boot."""
    tried: list[tuple[Pair, str]] = []

    def reaches(pair: Pair, ip: str) -> bool:
        tried.append((pair, ip))
        return True

    expected = {"0-1": "169.254.2.2", "1-0": "169.254.1.1"}
    assert chosen(hosts(*ips), *LINK_LOCAL, reaches=reaches) == expected
    assert tried == [((0, 1), "169.254.2.2"), ((1, 0), "169.254.1.1")]


def test_a_link_local_address_of_another_cable_is_not_used() -> None:
    expected = {"0-1": "10.0.0.2", "1-0": "10.0.0.1"}
    assert chosen(hosts((), ()), *LINK_LOCAL, reaches=lambda pair, ip: False) == expected
    two = has(("169.254.2.2/16", CABLE_1), ("169.254.3.3/16", CABLE_2))
    found = chosen(
        hosts((), ()),
        LINK_LOCAL[0],
        two,
        reaches=lambda pair, ip: ip in ("169.254.3.3", "169.254.1.1"),
    )
    assert found == {"0-1": "169.254.3.3", "1-0": "169.254.1.1"}


def test_addresses_that_only_seem_to_share_a_network_are_not_used() -> None:
    docker, tunnel = ("docker0", "docker0"), ("utun3", "utun3")
    one = has(("172.17.0.1/16", docker), ("100.64.0.1/32", tunnel), ("10.1.0.1/8", LAN))
    other = has(("172.17.0.1/16", docker), ("100.64.0.2/32", tunnel), ("10.2.0.1/16", LAN))
    assert chosen(hosts((), ()), one, other) == {}, "10.2.0.1 does not reach 10.1.0.1 directly"


def test_ranks_on_one_host_use_loopback_addresses() -> None:
    entries = [Host(0, "a", ()), Host(1, "a", ()), Host(2, "b", ())]
    a, b = has(("10.0.0.1/24", LAN)), has(("10.0.0.2/24", LAN))
    found = chosen(entries, a, a, b)
    assert found["0-1"] == found["1-0"] == "127.0.0.1"
    assert (found["0-2"], found["2-1"]) == ("10.0.0.2", "10.0.0.1")


def test_loopback_addresses_in_the_hostfile_are_kept() -> None:
    """As tests on one machine have them."""
    entries = hosts(("127.0.0.2",), ("127.0.0.3",))
    assert chosen(entries, has(), has()) == {"0-1": "127.0.0.3", "1-0": "127.0.0.2"}


@pytest.mark.parametrize(
    ("num_ranks", "num_shards", "serves", "expected"),
    [
        (1, 1, True, set()),
        (2, 1, True, {(0, 1)}),
        (4, 1, True, {(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)}),
        (4, 1, False, {(0, 1), (1, 2), (2, 3), (0, 3)}),
        (4, 2, True, {(0, 1), (2, 3), (0, 2), (1, 3), (0, 3)}),
        (3, 3, True, {(0, 1), (1, 2), (0, 2)}),
    ],
)
def test_only_ranks_that_exchange_messages_need_a_route(
    num_ranks: int, num_shards: int, serves: bool, expected: set[Pair]
) -> None:
    pairs = needed_pairs(num_ranks, num_shards, serves=serves)
    assert {tuple(sorted(pair)) for pair in pairs} == expected
    assert len(pairs) == 2 * len(expected)


def test_each_rank_gets_its_own_addresses_and_those_of_other_ranks() -> None:
    routes = choose(hosts(*WRITTEN), TRIANGLE, never)
    ips = [listening_ips(routes, rank) for rank in range(3)]
    assert ips[2] == ["192.168.0.6", "192.168.0.10"]
    ports = [{ip: 10 * rank + at for at, ip in enumerate(own)} for rank, own in enumerate(ips)]
    views = [addresses_of(rank, routes, ports) for rank in range(3)]
    for view in views:
        for other in range(3):
            if other != view.rank:
                assert view.own[other] == views[other].theirs[view.rank]
    assert views[2].theirs[:2] == (("192.168.0.5:1",), ("192.168.0.9:11",))
    assert views[2].own[:2] == (("192.168.0.6:20",), ("192.168.0.10:21",))


@pytest.mark.parametrize("ring", [[0, 1, 2], [0, 2], [1, 2]])
def test_each_rank_of_an_mlx_ring_listens_where_the_rank_before_it_connects(
    ring: list[int],
) -> None:
    routes = choose(hosts(*WRITTEN), TRIANGLE, never)
    ports = [dict.fromkeys(listening_ips(routes, rank), 5000 + rank) for rank in range(3)]
    views = {rank: addresses_of(rank, routes, ports) for rank in ring}
    hostfiles = {rank: views[rank].of_ring(ring) for rank in ring}
    for at, called in enumerate(ring):
        caller = ring[at - 1]
        assert hostfiles[caller][at] == hostfiles[called][at]
    if len(ring) == 3:
        plain = {rank: list(view.theirs) for rank, view in views.items()}
        assert plain == hostfiles, "also for a program that reads the launcher's file"


def test_errors_can_name_an_address_even_of_a_rank_without_a_route() -> None:
    """A ring of four cables: ranks 0 and 2 have none in common."""
    routes = choose(hosts(*WRITTEN), TRIANGLE, never)
    del routes[1, 2], routes[2, 1]
    ports = [dict.fromkeys(listening_ips(routes, rank), 5000 + rank) for rank in range(3)]
    assert addresses_of(1, routes, ports).theirs[2] == ("192.168.0.6:5002",)


def test_in_training_on_a_ring_of_cables_only_neighbours_of_rank_0_get_its_address() -> None:
    routes = {(1, 0): HostRoute(("10.0.1.1",), "cable"), (3, 0): HostRoute(("10.0.4.1",), "cable")}
    ports = {"10.0.1.1": 5001, "10.0.4.1": 5004}
    found = [control_addresses(rank, routes, ports) for rank in range(4)]
    assert found == ["10.0.1.1:5001,10.0.4.1:5004", "10.0.1.1:5001", "", "10.0.4.1:5004"]
