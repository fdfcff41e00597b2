"""Runs the schedule of an update: receives, computes and sends, in this rank's stages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from serve.tune.backward import Arrays, Pass, TrainedStage
from serve.tune.data.examples import MicroBatch
from serve.tune.forecast import OpRecord
from serve.tune.mesh import Groups
from serve.tune.model import DropoutKeys
from serve.tune.schedule import PipelineOp, Schedule, Shape


@dataclass(slots=True)
class ScheduleRun:
    """The result of a schedule on one rank. loss is the sum over all micro-batches, known only on
    the rank of the last stage. The loss and the gradients, in float32, are already divided by the
    scale of the loss."""

    loss_scale: float = 1.0
    loss: float = 0.0
    gradients: Arrays = field(default_factory=dict)
    records: list[OpRecord] = field(default_factory=list)

    @property
    def busy_seconds(self) -> float:
        durations = (record.end - record.start for record in self.records)
        return sum(durations)

    @property
    def seconds(self) -> float:
        return self.records[-1].end


class Pipeline:
    """This rank's stages, by their number in the pipeline. With D replicas, each runs every D-th
    micro-batch of an update."""

    def __init__(
        self,
        stages: dict[int, TrainedStage],
        groups: Groups,
        draw: DropoutKeys,
    ) -> None:
        self.stages = stages
        self.links = groups.pipeline
        self._first_number = groups.replica
        self._num_replicas = groups.layout.num_replicas
        self._draw = draw
        self._passes: dict[tuple[int, int], Pass] = {}

    def run(
        self,
        schedule: Schedule,
        batches: Sequence[MicroBatch],
        scale: float,
        loss_scale: float = 1.0,
    ) -> ScheduleRun:
        """Receives, computes and sends as the schedule says. Losses and gradients are multiplied
        by `scale`. `loss_scale` multiplies them during the backward pass only."""
        ran = ScheduleRun(loss_scale)
        began = time.perf_counter()
        for op in schedule.of_rank(self.links.rank):
            arrays = self._receive(op, schedule.shape)
            before = mx.get_active_memory()
            start = time.perf_counter()
            mx.reset_peak_memory()
            if op.kind == "F":
                batch = batches[op.micro_batch]
                sent = self._forward(op, schedule.shape, batch, arrays, scale * loss_scale, ran)
            elif op.kind == "B":
                sent = self._backward(op, arrays)
            else:
                sent = None
                self._add_gradients(op, ran)
            times = start - began, time.perf_counter() - began
            memory = before, mx.get_active_memory(), mx.get_peak_memory()
            record = OpRecord(op, *times, *memory)
            ran.records.append(record)
            if sent is not None:
                self._send(op, schedule.shape, sent)
        return ran

    def _forward(
        self,
        op: PipelineOp,
        shape: Shape,
        batch: MicroBatch,
        given: list[mx.array],
        scale: float,
        ran: ScheduleRun,
    ) -> list[mx.array] | None:
        stage = self.stages[op.stage]
        # Dropout depends on a micro-batch's number in the whole batch.
        self._draw.micro_batch = op.micro_batch * self._num_replicas + self._first_number
        if op.stage >= shape.first_trained:
            needs_dx = op.stage > shape.first_trained
            made = stage.forward_backward(batch, given, scale, needs_dx)
            self._passes[op.micro_batch, op.stage] = made
        else:
            made = stage.forward(batch, given, scale)
        # Only the forward pass is evaluated. The graph keeps the arrays for the backward pass.
        mx.eval(made.outputs)
        if not stage.stage.is_last:
            return made.outputs
        scaled_loss = number(made.outputs[0])
        ran.loss += scaled_loss / ran.loss_scale
        return None

    def _backward(self, op: PipelineOp, dy: list[mx.array]) -> list[mx.array] | None:
        made = self._passes[op.micro_batch, op.stage]
        made.set_output_gradients(dy)
        # dx is sent before the parameters' gradients are computed. With grad_checkpoint both need
        # the layers computed again, and the results would be held from here to W.
        is_recomputed = self.stages[op.stage].grad_checkpoint
        gradients = made.gradients if is_recomputed else {}
        mx.eval(made.dx, gradients)
        return made.dx or None

    def _add_gradients(self, op: PipelineOp, ran: ScheduleRun) -> None:
        made = self._passes.pop((op.micro_batch, op.stage))
        for name, gradient in made.gradients.items():
            # In bfloat16, a sum over many micro-batches would lose the small gradients.
            wide = gradient.astype(mx.float32)
            if ran.loss_scale != 1:
                wide = wide * (1 / ran.loss_scale)
            before = ran.gradients.get(name)
            if before is None:
                ran.gradients[name] = wide
            else:
                ran.gradients[name] = before + wide
        made.gradients.clear()
        del made
        # After each micro-batch, so that its activations are freed.
        mx.eval(ran.gradients)

    def _receive(self, op: PipelineOp, shape: Shape) -> list[mx.array]:
        first_of_kind = {
            "F": 0,
            "B": shape.num_stages - 1,
            "W": op.stage,
        }
        if op.stage == first_of_kind[op.kind]:
            return []
        message = self.links.receive(_tag(op))
        return message[1]

    def _send(self, op: PipelineOp, shape: Shape, arrays: list[mx.array]) -> None:
        if op.kind == "F":
            receiver = op._replace(stage=op.stage + 1)
        else:
            receiver = op._replace(stage=op.stage - 1)
        rank = shape.rank(receiver.stage)
        self.links.send(rank, _tag(receiver), (), arrays)


def number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]


def _tag(op: PipelineOp) -> str:
    return f"{op.kind} {op.micro_batch} {op.stage}"
