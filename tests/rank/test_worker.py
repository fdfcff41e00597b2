"""What an engine tells its parent."""

import os
import socket

import pytest

from serve.core.errors import EngineError, ModelError
from serve.core.messages import Activity, Fault, FromEngine, Leave, Left, Status
from serve.core.types import Row, Sampling, Step
from serve.core.wire import FrameReader
from serve.model.stage import Stage
from serve.rank.parent import Parent, fail
from serve.rank.worker import Worker
from serve.ring.transport import LocalTransport
from tests.models import build
from tests.rank.loops import ORDER, loop_of, surroundings_of


def test_caches_are_measured_again_only_after_a_step() -> None:
    """There may be many of them, and an idle engine reports four times a second."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(Parent(theirs), ORDER)
        surroundings = surroundings_of(Stage(build("llama"), 0, 4))
        worker.loop = loop = loop_of(surroundings, LocalTransport())

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


def test_an_engine_asked_to_leave_reports_the_step_that_it_still_computes() -> None:
    """Its parent waits for that, and for nothing else."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(Parent(theirs), ORDER)
        transport = LocalTransport()
        loop = loop_of(surroundings_of(Stage(build("llama"), 0, 4)), transport)
        worker.loop = loop
        loop.work.step = 7
        worker._leave(Leave(1))
        worker._report()
        (status,) = FrameReader(Status).feed(ours.recv(1 << 16))
        assert status.activity
        assert (status.activity.step, status.activity.waits_on) == (7, None)
        worker._leave_ring(loop, "its right neighbour is gone")
        worker._report()
        left, status = FrameReader(FromEngine).feed(ours.recv(1 << 16))
        assert isinstance(left, Left)
        assert isinstance(status, Status)
        assert status.activity is None


def test_an_engine_that_fails_reports_the_code_of_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fail(Parent(theirs), ModelError("Too few.", code="missing_tensor"))
        fail(Parent(theirs), ValueError("odd"))
        reported = FrameReader(Fault).feed(ours.recv(1 << 16))
    assert list(reported) == [
        Fault(ModelError.exit_code, "Too few.", "missing_tensor"),
        Fault(EngineError.exit_code, "The engine: ValueError: odd", EngineError.code),
    ]
    assert ended == [ModelError.exit_code, EngineError.exit_code]
