"""What an engine tells its parent."""

import socket
from pathlib import Path
from typing import Any

from serve.core import wire
from serve.core.types import Row, Sampling, Step
from serve.model.stage import Stage
from serve.rank.worker import Order, Parent, StepLoop, Worker
from serve.ring.transport import LocalTransport
from tests.models import build

ORDER = Order(
    **{"rank": 0, "ring": (0,), "hosts": ("127.0.0.1",), "addresses": [[]], "nonce": 1},
    **{"model": Path(), "commit": None, "cache_dir": None, "copies": Path()},
    **{"layers": (0, 4), "kv_bits": None, "join_timeout": 1.0},
)


def test_caches_are_looked_at_after_steps_alone() -> None:
    """There may be many of them, and an idle engine reports four times a second."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker, parent = Worker(Parent(theirs), ORDER), Parent(ours)
        worker.loop = loop = StepLoop(Stage(build("llama"), 0, 4), LocalTransport())

        def told() -> dict[str, Any]:
            worker._report()
            message = parent.receive()
            assert message is not None
            return wire.parse_json(message[1])

        loop.chooser.admit(5, Sampling(), 3, [])
        assert "kv_bytes" not in told()
        loop.transport.send(Step(1, 7, (Row(5, 0, 2),), (1, 2), False), [])
        assert next(loop.run()).number == 1
        assert told()["kv_bytes"] > 0
        idle = told()
        assert (idle["num_steps"], idle["spans"], "kv_bytes" in idle) == (1, [], False)
