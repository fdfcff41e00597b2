"""What an engine with a draft model reports, and keeps when it gets other layers."""

import socket
from pathlib import Path

import msgspec
import pytest

from serve.core.checkpoint import read_checkpoint
from serve.core.messages import Order, Status, ToEngine
from serve.core.ops import Guess
from serve.core.outputs import Guesses
from serve.core.plan import DraftSource
from serve.core.sections import DraftCosts
from serve.core.types import Row, Sampling, Step
from serve.core.wire import FrameReader, frame
from serve.rank.parent import Parent
from serve.rank.worker import Worker
from tests import heads
from tests.models import save
from tests.rank.loops import ORDER
from tests.rank.ordered import Ordered
from tests.rank.test_loading import step
from tests.rank.test_pipeline import whole_model


def test_rank_0_loads_its_draft_model_and_reports_its_drafts(tmp_path: Path) -> None:
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
        costs = loaded.section(DraftCosts)
        assert costs
        assert planned_bytes > costs.num_bytes > 0
        assert costs.guess_seconds > 0
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


def guesses(ordered: Ordered, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens of the model and of its draft model behind a prompt."""
    loop = ordered.worker.loop
    assert loop
    loop.chooser.admit(5, Sampling(temperature=0), len(prompt), list(prompt))
    results = loop.run()
    loop.transport.send(step(1, 0, prompt[:-1], sample=False), [])
    asking = step(2, len(prompt) - 1, prompt[-1:], sample=True)
    loop.transport.send(msgspec.structs.replace(asking, after=(Guess((4,)),)), [])
    next(results)
    result = next(results)
    (output,) = result.outputs_of(Guesses)
    (guessed,) = output.rows
    assert len(guessed) == 4
    return result.tokens + guessed


@pytest.mark.parametrize("is_head", [False, True])
def test_an_engine_that_gets_other_layers_keeps_its_draft_model(
    ordered: Ordered, tmp_path: Path, is_head: bool
) -> None:
    """Also a prediction head, which reads the hidden states of the new stage."""
    model = heads.make(tmp_path / "model-with-head", "mimo")
    num_layers = read_checkpoint(model).num_layers
    draft = DraftSource(str(model), None, None, is_head)
    order = {"model": str(model), "draft": draft, "draft_bytes": 1_000_000}
    first = ordered.load(layers=(0, num_layers), **order)
    expected = guesses(ordered, (5, 6, 7, 8))
    fewer = ordered.load(layers=(1, num_layers), draft_bytes=1_100_000)
    costs = [loaded.section(DraftCosts) for loaded in (first, fewer)]
    num_bytes = [each.num_bytes for each in costs if each]
    assert num_bytes == [num_bytes[0]] * 2 != [0, 0]
    assert fewer.bytes_kept == fewer.bytes_owned
    again = ordered.load(layers=(0, num_layers))
    assert 0 < again.bytes_kept < again.bytes_owned == first.bytes_owned
    assert guesses(ordered, (5, 6, 7, 8)) == expected
