"""Joins the ring, or the grid, that an order describes."""

import faulthandler
from pathlib import Path

from serve.core.config import Address, parse_address
from serve.core.messages import Order
from serve.ring.grid import GridTransport
from serve.ring.peers import Grid, await_row, meet
from serve.ring.transport import Ring, RingTransport, Streams, Transport, among, local_ring

_PARENT_FIRST_SECONDS = 5.0  # The parent gives up first, because its reason is clearer.


def join(order: Order, streams: Streams | None = None) -> Transport:
    """Joins a ring when all its ranks do so. streams are as for RingTransport. Raises
    ClusterError."""
    if len(order.hosts) == 1:
        (only,) = local_ring(1)
        return only
    # MLX holds the interpreter's lock while it waits for neighbours, so no other thread would see
    # that the parent was killed. This one needs no lock, and ends the process.
    faulthandler.dump_traceback_later(order.join_timeout + _PARENT_FIRST_SECONDS, exit=True)
    try:
        if order.num_shards > 1:
            return _join_grid(order)
        return _join_ring(order, streams)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _join_ring(order: Order, streams: Streams | None) -> Transport:
    await_row(_grid(order, len(order.ring)))
    with among(order.ring, order.addresses, Path(order.copies)):
        ring = Ring(order.rank, order.hosts, order.nonce, order.join_timeout)
        return RingTransport(ring, streams)


def _join_grid(order: Order) -> Transport:
    grid = _grid(order, order.num_shards)
    neighbours = meet(grid)
    row = [order.ring[place] for place in grid.row]
    with among(row, order.addresses, Path(order.copies)):
        return GridTransport(grid, neighbours)


def _grid(order: Order, num_shards: int) -> Grid:
    addresses: list[Address] = []
    for rank in order.ring:
        first_address, *_ = order.addresses[rank]
        addresses.append(parse_address(first_address, "MLX_HOSTFILE"))
    return Grid(
        order.rank,
        num_shards,
        tuple(addresses),
        order.nonce,
        order.join_timeout,
    )
