"""Joins the ring, or the grid, that an order describes."""

import faulthandler
from pathlib import Path

from serve.core.messages import Order
from serve.ring.grid import GridTransport
from serve.ring.peers import grid_of, meet
from serve.ring.transport import RingTransport, Streams, Transport, among, local_ring

_PARENT_FIRST_SECONDS = 5.0  # The parent gives up this much earlier, because its reason is clearer.


def join(order: Order, streams: Streams | None = None) -> Transport:
    """Joins a ring when all its ranks do so. Raises ClusterError."""
    if len(order.hosts) == 1:
        (only,) = local_ring(1)
        return only
    # MLX holds the interpreter's lock while it waits for neighbours, so no other thread would see
    # that the parent was killed. This timer needs no lock, and ends the process.
    faulthandler.dump_traceback_later(order.join_timeout + _PARENT_FIRST_SECONDS, exit=True)
    try:
        # A ring is a grid of one row.
        num_shards = order.num_shards if order.num_shards > 1 else len(order.ring)
        grid = grid_of(order.ring, order.addresses, num_shards, order.nonce, order.join_timeout)
        neighbours = meet(grid)
        row = [order.ring[place] for place in grid.row]
        with among(row, order.addresses, Path(order.copies)):
            if order.num_shards > 1:
                return GridTransport(grid, neighbours)
            return RingTransport(grid, neighbours, streams)
    finally:
        faulthandler.cancel_dump_traceback_later()
