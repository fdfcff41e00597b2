"""Measures sums between two hosts over MLX's JACCL, that is over RDMA. Each of the two ranks of a
launch runs this. Ranks of Brigade do not use JACCL.

A wrong call ends or hangs a process, so both ranks first look for a reason not to try, and this
runs in processes with a limit of time: without the library, `init` is a null call (mlx#3777); a
port without a cable has no protection domain; after the loss of a peer or a cable, a sum spins for
ever (mlx#3910) or the process crashes (mlx#4192).
"""

import json
import os
import tempfile
from pathlib import Path

import mlx.core as mx

from launcher.facts import interface
from serve.core.config import Cluster, parse_address
from serve.core.errors import ClusterError
from serve.ring.check import grid_of_all, run_on_rank
from serve.ring.peers import Neighbours, meet
from serve.ring.regroup import clear_groups, objection
from serve.ring.sum_speeds import of_all_sizes
from serve.selftest.system import PORT_ACTIVE, port_states

NOT_TRIED = "not tried: "


def measure(cluster: Cluster) -> str | None:
    """Returns the times of all sizes as JSON on rank 0, and on each rank that cannot take part
    the reason. Raises ClusterError."""
    other = 1 - cluster.rank
    address = parse_address(cluster.addresses.own[other][0], "BRIGADE_LISTEN")
    device = f"rdma_{interface(address.host)}"
    neighbours = meet(grid_of_all(cluster))
    reason = _obstacle(device)
    is_refused = _gathered(neighbours, cluster.rank, bytes([bool(reason)])) != bytes(2)
    if is_refused:
        return NOT_TRIED + reason if reason else None
    series = of_all_sizes(_group(cluster.rank, device, neighbours))
    _gathered(neighbours, cluster.rank, b"-")  # Both have their last sum.
    if objection() is None:
        clear_groups()  # Queues of processes that do not give them back may be lost (mlx#3207).
    return None if cluster.rank else json.dumps(series)


def _obstacle(device: str) -> str:
    """Returns why no group can be formed over this device, or ""."""
    if not mx.distributed.is_available("jaccl"):
        return "this MLX has no JACCL: it needs macOS 26.2"
    states = port_states()
    if device not in states:
        return f"there is no device {device}: RDMA needs Thunderbolt 5 without a bridge"
    if states[device] != PORT_ACTIVE:
        return f"the port of {device} is not active ({states[device] or 'unknown'})"
    return ""


def _group(rank: int, device: str, neighbours: Neighbours) -> mx.distributed.Group:
    """Forms the group of both ranks. They tell each other the addresses of their queues over TCP.
    Raises ClusterError."""
    with tempfile.TemporaryDirectory() as folder:
        devices = Path(folder) / "devices.json"
        devices.write_text(json.dumps([[None, device], [device, None]]))  # MLX reads its own row.
        os.environ.update(JACCL_RANK=str(rank), JACCL_IBV_DEVICES=str(devices))
        try:
            return mx.distributed.init(
                strict=True,
                backend="jaccl",
                all_gather_factory=lambda *_: lambda data, _: _gathered(neighbours, rank, data),
            )
        except (RuntimeError, ValueError) as error:
            raise ClusterError(str(error)) from error


def _gathered(neighbours: Neighbours, rank: int, data: bytes) -> bytes:
    """Returns the bytes of rank 0 and as many of rank 1. Raises ClusterError."""
    neighbours.row_left.tcp_socket.sendall(data)
    theirs = neighbours.row_right.read(len(data))
    if theirs is None:
        raise ClusterError("The other rank is gone.")
    return bytes(theirs + data) if rank else data + theirs


if __name__ == "__main__":
    run_on_rank(measure)
