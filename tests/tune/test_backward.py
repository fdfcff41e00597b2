"""One lazy graph for each micro-batch: what is computed when, and what comes too late or never."""

import io
from collections.abc import Iterable

import mlx.core as mx
import pytest

from serve.model.stage import Stage
from serve.tune.backward import Pass, TrainedStage
from serve.tune.schedule import PipelineOp, Shape
from serve.tune.transport import LocalLinks
from tests.tune.ranks import batches_of, config_of, run_ranks, trainer, tuned

(BATCH,) = batches_of([(9, 5)])


def num_ops(arrays: Iterable[mx.array]) -> int:
    """How many operations it takes to evaluate them."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    return dot.getvalue().count("shape=rectangle")


def middle(*, checkpointing: bool = False) -> Pass:
    """Of two layers, whose outputs are evaluated, and whose gradient has come."""
    stage = TrainedStage(Stage(tuned(config_of()), 1, 3), checkpointing)
    received = mx.random.normal((*BATCH.inputs.shape, 32), key=mx.random.key(0))
    return stage.forward_backward(BATCH, [received], 1.0, needs_dx=True)


def all_of(made: Pass) -> list[mx.array]:
    return [*made.dx, *made.gradients.values()]


def test_no_operation_is_computed_twice_without_checkpointing() -> None:
    made = middle()
    whole, forward = num_ops([*made.outputs, *all_of(made)]), num_ops(made.outputs)
    mx.eval(made.outputs)
    backward = num_ops(all_of(made))
    assert forward + backward == whole
    mx.eval(made.dx)
    assert 0 < num_ops(made.gradients.values()) < backward
    again = middle(checkpointing=True)
    mx.eval(again.outputs)
    assert num_ops(all_of(again)) > backward + forward / 2, "layers are computed again"


def test_the_gradient_of_the_inputs_is_sent_before_those_of_weights_are_computed() -> None:
    left: list[int] = []

    def rank(links: LocalLinks) -> None:
        own, batches = trainer(config_of(), links), batches_of([(9, 5), (3,), (4, 4)])
        send = own.pipeline._send

        def noting(op: PipelineOp, shape: Shape, arrays: list[mx.array]) -> None:
            if op.kind == "B":
                made = own.pipeline._passes[op.micro_batch, op.stage]
                left.append(num_ops(made.gradients.values()))
            send(op, shape, arrays)

        own.pipeline._send = noting
        own.update(0, batches, own.schedule(len(batches)))

    run_ranks(2, rank)
    assert len(left) == 3
    assert min(left) > 0


def test_an_update_with_a_missing_gradient_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pass, "set_output_gradients", lambda *_: None)

    def rank(links: LocalLinks) -> bool:
        own = trainer(config_of(), links)
        return own.update(0, [BATCH], own.schedule(1)).is_skipped

    assert run_ranks(2, rank) == [True, True]


def test_a_gradient_of_another_shape_or_type_is_refused() -> None:
    for wrong in (mx.zeros((2, 8, 31)), mx.zeros((2, 8, 32), mx.bfloat16)):
        with pytest.raises(ValueError, match=r"A gradient of .* came where .* was due"):
            middle().set_output_gradients([wrong])
