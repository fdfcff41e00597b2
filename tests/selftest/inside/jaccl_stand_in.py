"""Stands in for MLX's JACCL, where there is no RDMA. Its group adds up over MLX's ring, and fails
as JACCL has failed on Macs: see FAULT."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

# Set before a group is formed: "" or the name of a fault in `init` or `all_sum`.
FAULT = ""
_LOST_AT = 20  # the sum at which a peer is lost, within those of 64 KB

_init = mx.distributed.init
_all_sum = mx.distributed.all_sum
_num_sums = 0

Exchange = Callable[[bytes, int], bytes]


def is_available(backend: str = "any") -> bool:
    return True


def init(
    strict: bool, backend: str, all_gather_factory: Callable[[int, int], Exchange]
) -> mx.distributed.Group:
    assert (strict, backend) == (True, "jaccl")
    rank = int(os.environ["JACCL_RANK"])
    devices = json.loads(Path(os.environ["JACCL_IBV_DEVICES"]).read_text())
    exchange = all_gather_factory(rank, len(devices))
    assert [bool(name) for name in devices[rank]] == [bool(rank), not rank]
    if FAULT == "no_domain":  # a port without a cable, or too many groups since the last boot
        raise RuntimeError("[jaccl] Couldn't allocate protection domain")
    if FAULT == "no_address":
        raise ValueError("[jaccl] Changing queue pair to RTR failed with errno 22")
    assert exchange(bytes([rank] * 3), 3) == bytes([0, 0, 0, 1, 1, 1])
    return _init(strict=True, backend="ring")


def all_sum(x: mx.array, **options: Any) -> mx.array:
    global _num_sums
    _num_sums += 1
    is_last = os.environ["JACCL_RANK"] == "1"
    if FAULT == "slow":
        time.sleep(0.01)
    elif FAULT and _num_sums == _LOST_AT:
        if FAULT == "crashed":  # A cable was pulled: both crash.
            os.kill(os.getpid(), signal.SIGSEGV)
        elif is_last:
            os.kill(os.getpid(), signal.SIGSTOP if FAULT == "stopped" else signal.SIGKILL)
        while True:  # A lost peer is never noticed.
            pass
    return _all_sum(x, **options)


mx.distributed.is_available = is_available
mx.distributed.init = init  # type: ignore[assignment]
mx.distributed.all_sum = all_sum  # type: ignore[assignment]
