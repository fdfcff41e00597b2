"""The step loop of a rank: receive, forward, send. It owns the caches of the sequences, and keeps
them from one ring to the next. Features are parts (`serve.rank.parts`): the loop knows none of them
by name.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from serve.core.messages import Activity, Order, Result
from serve.core.ops import AnyOp, Copy, Drop, Forget, Op, Save, ShareHead
from serve.core.types import Step
from serve.model.head import SharedHead
from serve.model.stage import Stage
from serve.rank import memory
from serve.rank.cache import ForwardPass, GroupCaches
from serve.rank.chooser import Chooser
from serve.rank.outbox import Outbox
from serve.rank.parts.dispatch import Parts
from serve.rank.shards import ShardSums
from serve.rank.work_log import WorkLog
from serve.ring.transport import Transport


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
            with self.transport.sums.of_step(step):
                outputs = self.forward(step, received)
            if self.has_head:
                yield self._result(step, outputs)
            else:
                self._send(step, outputs)
            self._finish(step)

    def forward(self, step: Step, received: list[mx.array]) -> list[mx.array]:
        """Performs the operations before a step's rows, then runs the rows. Returns arrays for the
        next stage, one forward pass after the other; on rank 0 the tokens (B,) and their scores."""
        self.sums.begin_step()
        for op in step.before:
            self._perform(op, step)
        passes = self.caches.arrange(step)
        self._evaluate_moved()
        mx.eval(self.parts.prepare(step))
        outputs, hidden = self._run_stage(step, passes, received)
        outputs = self._chosen(step, passes, outputs)
        others = self.parts.after_rows(step, passes, hidden)
        del hidden
        mx.eval(outputs, others, self.caches.states(step))
        if not step.sample:
            memory.tidy()  # Chunks of prompts have many sizes.
        return outputs

    def _run_stage(
        self,
        step: Step,
        passes: list[ForwardPass],
        received: list[mx.array],
    ) -> tuple[list[mx.array], list[mx.array | None]]:
        """Runs the layers lazily. Returns the arrays of all passes, and their hidden states."""
        outputs: list[mx.array] = []
        hidden: list[mx.array | None] = []
        for n, each in enumerate(passes):
            size = len(received) // len(passes)
            self.parts.select(step, each.rows)
            own_received = received[n * size : (n + 1) * size]
            with self.sums.head():
                own_outputs = self.stage(each.tokens(step), each.caches, own_received)
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
                mx.eval(arrays)  # Before the next slice of scores is made, to save memory.
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
        """Performs the operations that come after the rows of a step. Its outputs have left, so no
        stage waits; the next step must not be received before, because it writes to the same
        buffers."""
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
        """Evaluates rows that were copied, layer by layer: together, the old and the new arrays of
        all layers would be in memory at the same time."""
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
            # It changes only with steps, and counting looks at every cache.
            kv_bytes=kv_bytes,
            spans=spans,
            sent_at=time.monotonic(),
            sums=transport.sums.counts,
            sections=tuple(self.parts.activity()),
        )


def has_head(stage: Stage, transport: Transport) -> bool:
    """Whether a rank chooses tokens: rank 0 does, the first shard of the last stage."""
    return stage.is_last and transport.shard == 0
