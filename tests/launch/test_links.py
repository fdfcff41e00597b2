"""The fastest link of each pair of hosts, and the order of the ring. Nothing is measured here."""

from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.links import Measured, MeasuredHop, ring_order, rounds
from launcher.routes import HostRoute, Network, Pair, common_routes, needed_pairs
from serve.core.agent_messages import HopSpeed, NetworkAddress

CABLE = HopSpeed(0.0001, 2e9)
WIFI = HopSpeed(0.004, 40e6)


def link(speed: HopSpeed, ip: str = "10.0.0.1") -> MeasuredHop:
    return MeasuredHop(HostRoute((ip,), "Ethernet"), speed)


def network(*ips: str) -> Network:
    return [NetworkAddress(ip, 24, "en0", "Ethernet") for ip in ("127.0.0.1", *ips)]


def symmetric(seconds: dict[Pair, float]) -> dict[Pair, float]:
    return {pair: cost for (a, b), cost in seconds.items() for pair in ((a, b), (b, a))}


@pytest.mark.parametrize("num_hosts", range(1, 10))
def test_each_pair_is_measured_once_and_no_host_twice_at_a_time(num_hosts: int) -> None:
    found = [pair for pairs in rounds(num_hosts) for pair in pairs]
    assert sorted(found) == list(combinations(range(num_hosts), 2))
    for pairs in rounds(num_hosts):
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))


def test_a_cable_is_faster_than_wifi_for_a_decode_step() -> None:
    assert link(CABLE).seconds < link(WIFI).seconds


def test_with_small_steps_the_round_trip_counts_more_than_the_bandwidth() -> None:
    assert link(HopSpeed(0.0002, 1e8)).seconds < link(HopSpeed(0.001, 1e10)).seconds


def test_neighbours_in_the_ring_use_the_fast_links() -> None:
    """Four hosts in a row of cables, whose names are in another order."""
    slow = dict.fromkeys(combinations(range(4), 2), 0.01)
    fast = {(0, 2): 0.001, (1, 2): 0.001, (1, 3): 0.001}
    order = ring_order(symmetric(slow | fast), 4)
    assert order in ([0, 2, 1, 3], [0, 3, 1, 2])


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_no_other_order_has_a_smaller_sum_of_hops(num_shards: int) -> None:
    seconds = {(a, b): ((a * 7 + b * 13) % 11 + 1) / 1e3 for a, b in permutations(range(6), 2)}

    def total(order: tuple[int, ...]) -> float:
        hops = needed_pairs(6, num_shards, serves=False)
        return sum(seconds[order[a], order[b]] for a, b in hops)

    least = min(total((0, *rest)) for rest in permutations(range(1, 6)))
    assert total(tuple(ring_order(seconds, 6, num_shards))) == pytest.approx(least)


def test_hosts_that_do_not_reach_each_other_are_not_neighbours() -> None:
    seconds = symmetric(dict.fromkeys(combinations(range(5), 2), 0.001))
    for pair in ((0, 1), (1, 2), (3, 4)):
        del seconds[pair], seconds[pair[::-1]]
    order = ring_order(seconds, 5)
    assert all((order[at - 1], order[at]) in seconds for at in range(5))


@given(st.integers(1, 12), st.randoms())
def test_every_host_gets_one_rank_and_this_machine_rank_0(num_hosts: int, random) -> None:  # type: ignore[no-untyped-def]
    seconds = {pair: random.random() for pair in permutations(range(num_hosts), 2)}
    if num_hosts in (6, 7, 8):  # Trying all orders takes longer than this test should.
        num_hosts = 5
    order = ring_order(seconds, num_hosts)
    assert order[0] == 0
    assert sorted(order) == list(range(num_hosts))


def test_routes_are_those_of_the_ranks_in_their_new_order() -> None:
    links = {(0, 1): link(CABLE, "10.0.0.2"), (2, 0): link(WIFI, "10.0.0.1")}
    measured = Measured([network()] * 3, [()] * 3, links)
    routes = measured.routes([0, 2, 1])
    assert {pair: route.ips for pair, route in routes.items()} == {
        (0, 2): ("10.0.0.2",),
        (1, 0): ("10.0.0.1",),
    }


def test_hosts_are_tried_at_each_address_in_a_network_that_both_have() -> None:
    found = common_routes(network("10.0.1.1", "10.0.2.1"), network("10.0.2.2", "10.0.1.2"), ())
    assert [route.ips for route in found] == [("10.0.1.2",), ("10.0.2.2",)]


def test_without_a_common_network_hosts_are_tried_where_their_nodes_were_seen() -> None:
    here, there = network("10.0.1.1", "172.17.0.1"), network("10.0.2.2", "172.17.0.1")
    found = common_routes(here, there[:2], ("10.0.9.9", "10.0.2.2"))
    assert [route.ips for route in found] == [("10.0.2.2",)]


def test_two_nodes_of_one_machine_use_loopback() -> None:
    own = network("10.0.1.1")
    assert [route.ips for route in common_routes(own, own, ("10.0.1.1",))] == [("127.0.0.1",)]
