"""The step loop of a rank: receive, forward, send. It owns the caches of the sequences, and keeps
them from one ring to the next. Features are parts (`serve.rank.parts`): the loop knows none of them
by name.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from serve.core.messages import Activity, Order, Result
from serve.core.ops import AnyOp, Copy, Drop, Forget, Op, Save, ShareHead
from serve.core.types import LAST_TOKEN, Step
from serve.model.head import SharedHead
from serve.model.stage import AtSeam, Stage
from serve.rank.cache import ForwardPass, GroupCaches
from serve.rank.chooser import Chooser
from serve.rank.drawing import Drawing
from serve.rank.memory import StepMemory
from serve.rank.outbox import Outbox
from serve.rank.parts.dispatch import Parts
from serve.rank.shards import ShardSums
from serve.rank.speeds import on_gpu
from serve.rank.work_log import WorkLog
from serve.ring.transport import LocalTransport, Transport

_WAITING_SHARE = 0.25  # how long to wait for the next step, as a share of a step


@dataclass(frozen=True, slots=True)
class _Graph:
    """The arrays of a step, not evaluated: outputs for the next stage or from the chooser, and
    others to evaluate with them."""

    outputs: list[mx.array]
    others: list[mx.array]

    def begin(self) -> list[mx.array]:
        """Begins to compute the arrays. Returns the outputs."""
        mx.async_eval(self.outputs, self.others)
        return self.outputs


class _FirstPart:
    """Begins to compute only the first arrays that it gets, for two reasons. MLX waits while many
    operations are under way, and the tokens of the step before must not wait for that. And while
    the step before reads keys and values, MLX copies them instead of writing in place."""

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self, arrays: list[mx.array]) -> None:
        if not self._has_begun:
            self._has_begun = True
            mx.async_eval(arrays)


class StepLoop:
    """Receive, forward, send. Rank 0, the first shard of the last stage, chooses tokens."""

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        caches: GroupCaches,
        chooser: Chooser,
        parts: Parts,
        shared_head: SharedHead | None = None,
    ) -> None:
        self.stage = stage
        self.caches = caches
        self.chooser = chooser
        self.parts = parts
        self.sums = ShardSums(shared_head, is_last=stage.is_last)
        self.has_head = has_head(stage, transport)
        self.work = WorkLog()
        self.memory = StepMemory()
        self._at_seam: AtSeam | None = mx.async_eval if on_gpu() else None
        self._performers: dict[type[Op], Callable[[Any], None]] = {
            Copy: caches.copy,
            Drop: self._drop,
            Forget: self._forget,
            Save: self._save,
            ShareHead: self._share_head,
        }
        if stage.is_last:
            stage.record_hidden()
        self._begin(transport)

    def _begin(self, transport: Transport) -> None:
        """Begins to run steps in a ring."""
        self.transport = transport
        self._local: LocalTransport | None = None  # only on a rank that has all layers
        has_all_layers = self.stage.start == 0 and self.stage.is_last
        if has_all_layers and isinstance(transport, LocalTransport):
            self._local = transport
        self.outbox = Outbox(lambda step: transport.send(step, []))
        self.work.clear()

    def rejoin(self, transport: Transport, order: Order) -> None:
        """Begins again in another ring, with the sequences that the order names. Raises EngineError
        if fewer tokens of a sequence are held."""
        self._begin(transport)
        self.caches.keep_only(order.positions)
        self._evaluate_moved()
        self.chooser.clear()
        mx.eval(self.parts.rejoin(order))

    def put(self, step: Step) -> None:
        """Takes a step on rank 0, even while others run, and sends it once its tokens are known."""
        self.outbox.put(self.sums.with_op(self.chooser.cut_drafts(step)))

    def run(self) -> Iterator[Result]:
        """Yields the result of each step on rank 0."""
        while (message := self.transport.receive()) is not None:
            step, received = message
            self.work.begin(step)
            if self._local:
                step = self.outbox.filled(step)
            if self._can_be_followed(step):
                yield from self._run_without_pause(step)
                continue
            with self.transport.sums.of_step(step):
                outputs = self._forward(step, received)
            if self.has_head:
                yield self._result(step, outputs)
            else:
                self._send(step, outputs)
            self._finish(step)

    def _forward(self, step: Step, received: list[mx.array]) -> list[mx.array]:
        """Performs the operations before a step's rows, then runs the rows. Returns arrays for the
        next stage, one forward pass after the other; on rank 0 the tokens (B,) and their scores."""
        self.memory.begin()
        graph = self._graph(step, received, self._at_seam)
        mx.eval(graph.outputs, graph.others)
        if not step.sample:
            self.memory.end(len(step.tokens))
        return graph.outputs

    # --- without a pause between steps

    def _can_be_followed(self, step: Step) -> bool:
        """Whether the next step can begin before the tokens of this one are read. The rank has to
        have all layers, and no row may need its token."""
        if self._local is None or not step.sample or step.num_drafts or step.after:
            return False
        return not self.chooser.needs_tokens(step)

    def _run_without_pause(self, step: Step) -> Iterator[Result]:
        """Runs steps, each begun before the tokens of the step before are read, as long as such
        steps come: the device then computes while this thread builds and reports."""
        outputs = self._graph(step, [], self._at_seam).begin()
        seconds = 0.0
        can_be_followed = True
        while can_be_followed and (following := self._following(step, seconds)):
            started = time.monotonic()
            first = _FirstPart()
            graph = self._graph(following, [], first.begin, Drawing(step, outputs[0]))
            first.begin(graph.outputs)
            yield self._result(step, outputs)
            self.work.begin(following)
            step, outputs = following, graph.begin()
            can_be_followed = self._can_be_followed(step)
            seconds = _WAITING_SHARE * (time.monotonic() - started)
        yield self._result(step, outputs)
        self._finish(step)

    def _following(self, step: Step, seconds: float) -> Step | None:
        """Returns the next step, if it comes in time and feeds tokens that this step draws."""
        assert self._local is not None
        self.outbox.drawing(step)
        following = self._local.peek(seconds)
        if following is None or following.before:
            return None
        following = self.outbox.filled(following)
        if LAST_TOKEN not in following.tokens:
            return None
        self._local.receive()
        return following

    # --- the graph of a step

    def _graph(
        self,
        step: Step,
        received: list[mx.array],
        at_seam: AtSeam | None,
        before: Drawing | None = None,
    ) -> _Graph:
        """Performs the operations before a step's rows, and returns the graph of the rows. `before`
        draws the tokens for which the step has LAST_TOKEN."""
        self.sums.begin_step()
        for op in step.before:
            self._perform(op, step)
        passes = self.caches.arrange(step)
        self._evaluate_moved()
        mx.eval(self.parts.prepare(step))
        outputs, hidden = self._run_stage(step, passes, received, at_seam, before)
        outputs = self._chosen(step, passes, outputs)
        others = self.parts.after_rows(step, passes, hidden)
        return _Graph(outputs, [*others, *self.caches.states(step)])

    def _run_stage(
        self,
        step: Step,
        passes: list[ForwardPass],
        received: list[mx.array],
        at_seam: AtSeam | None,
        before: Drawing | None,
    ) -> tuple[list[mx.array], list[mx.array | None]]:
        """Runs the layers lazily. Returns the arrays of all passes, and their hidden states."""
        outputs: list[mx.array] = []
        hidden: list[mx.array | None] = []
        for n, each in enumerate(passes):
            size = len(received) // len(passes)
            self.parts.select(step, each.rows)
            own_received = received[n * size : (n + 1) * size]
            with self.sums.head():
                tokens = each.tokens(step, before)
                own_outputs = self.stage(tokens, each.caches, own_received, at_seam)
            own_hidden = self.stage.pop_hidden()
            self.sums.evaluate(self.transport, own_outputs, own_hidden)
            outputs += own_outputs
            hidden.append(own_hidden)
        return outputs, hidden

    def _chosen(
        self,
        step: Step,
        passes: list[ForwardPass],
        outputs: list[mx.array],
    ) -> list[mx.array]:
        """Returns the arrays that leave this stage, lazily: on rank 0 those of the chooser. The
        other shards of the last stage have nothing to send."""
        if not self.stage.is_last:
            return outputs
        if not self.has_head or not passes:
            return []
        chosen: list[mx.array] = []
        for arrays in self.chooser.choose(step, passes, outputs):
            if not step.sample:
                mx.eval(arrays)  # before the next slice of scores is made, to save memory
            chosen += arrays
        return chosen

    def _send(self, step: Step, outputs: list[mx.array]) -> None:
        self.work.end_rows(step, self.transport.sums.latest_seconds)
        if not self.stage.is_last:
            self.transport.send(step, outputs)

    def _result(self, step: Step, outputs: list[mx.array]) -> Result:
        result = self.chooser.result(step, outputs)
        self.work.end_rows(step, self.transport.sums.latest_seconds)
        # The next step of the group goes first, because the stages wait for it.
        if step.sample:
            self.outbox.sampled(step, result.tokens, result.num_accepted)
        for op in step.after:
            if op.is_answered:
                self._perform(op, step)
        self.work.add(self.parts.take_spans())
        return self.parts.add_to(step, result)

    def _finish(self, step: Step) -> None:
        """Performs the operations that come after the rows of a step. The outputs have left, so no
        stage waits. The next step must be received later, because it writes to the same buffers."""
        if not step.after:
            return
        self.work.begin(step)
        for op in step.after:
            if not op.is_answered:
                self._perform(op, step)
        self.work.end(step)

    # --- operations

    def _perform(self, op: AnyOp, step: Step) -> None:
        perform = self._performers.get(type(op))
        if perform:
            perform(op)
        else:
            self.parts.perform(op, step)

    def _drop(self, drop: Drop) -> None:
        self.caches.drop(drop.sequence)
        self.parts.dropped(drop.sequence)
        if self.chooser.forget(drop.sequence):
            self.outbox.forget(drop.sequence)

    def _forget(self, forget: Forget) -> None:
        self.caches.forget(forget.checkpoint)

    def _save(self, save: Save) -> None:
        mx.eval(self.caches.save(save))

    def _share_head(self, _: ShareHead) -> None:
        self.sums.share_head()

    def _evaluate_moved(self) -> None:
        """Evaluates rows that were copied, layer by layer: otherwise the old and new arrays of all
        layers would be in memory at the same time."""
        for arrays in self.caches.moved():
            mx.eval(arrays)

    # --- reports

    def activity(self) -> Activity:
        """Returns the counts of the work so far, and the spans since the last call."""
        spans = self.work.take_spans()
        transport = self.transport
        kv_bytes = self.caches.num_bytes if spans else None
        return Activity(
            busy_seconds=self.work.busy_seconds,
            num_steps=self.work.num_steps,
            num_hops=transport.num_hops,
            hop_seconds=transport.hop_seconds,
            waits_on=transport.waits_on,
            step=self.work.step,
            # kv_bytes changes only with steps, and counting looks at every cache.
            kv_bytes=kv_bytes,
            spans=spans,
            sent_at=time.monotonic(),
            sums=transport.sums.counts,
            sections=(self.memory.usage(), *self.parts.activity()),
        )


def has_head(stage: Stage, transport: Transport) -> bool:
    """Whether a rank chooses tokens: rank 0 does, the first shard of the last stage."""
    return stage.is_last and transport.shard == 0
