"""What an engine tells its parent."""

import socket

from serve.core.messages import Activity, Order, Status
from serve.core.types import Row, Sampling, Step
from serve.core.wire import FrameReader
from serve.model.stage import Stage
from serve.rank.parent import Parent
from serve.rank.worker import StepLoop, Worker
from serve.ring.transport import LocalTransport
from tests.models import build

ORDER = Order(
    **{"rank": 0, "ring": (0,), "hosts": ("127.0.0.1",), "addresses": [[]], "nonce": 1},
    **{"model": ".", "commit": None, "cache_dir": None, "copies": "."},
    **{"layers": (0, 4), "kv_bits": None, "join_timeout": 1.0},
)


def test_caches_are_looked_at_after_steps_alone() -> None:
    """There may be many of them, and an idle engine reports four times a second."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(Parent(theirs), ORDER)
        worker.loop = loop = StepLoop(Stage(build("llama"), 0, 4), LocalTransport(), batchable=True)

        def activity() -> Activity:
            worker._report()
            (status,) = FrameReader(Status).feed(ours.recv(1 << 16))
            assert status.activity
            return status.activity

        loop.chooser.admit(5, Sampling(), 3, [])
        assert activity().kv_bytes is None
        loop.transport.send(Step(1, 7, (Row(5, 0, 2),), (1, 2), False), [])
        assert next(loop.run()).number == 1
        assert (activity().kv_bytes or 0) > 0
        idle = activity()
        assert (idle.num_steps, idle.spans, idle.kv_bytes) == (1, [], None)
