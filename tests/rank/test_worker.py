"""What an engine tells its parent."""

import os
import socket
from pathlib import Path

import msgspec
import pytest

from serve.core.errors import EngineError, ModelError
from serve.core.messages import Activity, Fault, FromEngine, Leave, Left, Order, Status, ToEngine
from serve.core.ops import Guess
from serve.core.outputs import Guesses
from serve.core.plan import DraftSource
from serve.core.types import Row, Sampling, Step
from serve.core.wire import FrameReader, frame
from serve.model.stage import Stage
from serve.rank.parent import Parent, fail
from serve.rank.step_loop import StepLoop
from serve.rank.worker import Worker
from serve.ring.transport import LocalTransport
from tests.models import build, save
from tests.rank.test_pipeline import whole_model

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


def test_engine_that_is_to_leave_reports_the_step_that_it_still_computes() -> None:
    """Its parent waits for that, and for nothing else."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(Parent(theirs), ORDER)
        transport = LocalTransport()
        loop = StepLoop(Stage(build("llama"), 0, 4), transport, batchable=True)
        worker.loop = loop
        loop.step = 7
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


def test_an_engine_reports_the_code_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rank_0_loads_its_draft_model_and_reports_its_guesses(tmp_path: Path) -> None:
    """From the order to the result, as another process would see it."""
    draft = DraftSource(str(save(tmp_path / "draft", "llama")), None, None)
    planned_bytes = 10_000_000
    sent = msgspec.structs.replace(
        ORDER,
        model=str(save(tmp_path / "model", "llama")),
        copies=str(tmp_path),
        draft=draft,
        draft_bytes=planned_bytes,
    )
    (order,) = FrameReader(ToEngine).feed(frame(sent))
    assert isinstance(order, Order)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(Parent(theirs), order)
        loop = worker._start()
        loaded = worker.status.loaded
        assert loaded
        assert planned_bytes > loaded.draft_bytes > 0
        assert loaded.draft_seconds > 0
        prompt = [5, 6, 7]
        loop.chooser.admit(5, Sampling(temperature=0), 3, prompt)
        loop.transport.send(Step(1, 7, (Row(5, 0, 2),), (5, 6), False), [])
        asking = Step(2, 0, (Row(5, 2, 1),), (7,), True, after=(Guess((3,)),))
        loop.transport.send(asking, [])
        results = loop.run()
        assert next(results).outputs == ()
        result = next(results)
        expected = tuple(whole_model(prompt, 4))
        assert (result.tokens, result.outputs) == (expected[:1], (Guesses((expected[1:],)),))
        worker._report()
        (status,) = FrameReader(Status).feed(ours.recv(1 << 16))
        assert status.activity
        kinds = [span.kind for span in status.activity.spans]
        assert kinds == ["prefill", "decode", "draft"]
