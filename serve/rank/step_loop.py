"""The step loop of a rank: receive, forward, send. It owns what the engine holds of sequences, and
keeps it from one ring to the next.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import mlx.core as mx
import msgspec

from serve.core.errors import EngineError
from serve.core.messages import Activity, Order, Result, Span
from serve.core.ops import AnyOp, Copy, Drop, Forget, Guess, Load, Save, ShareHead, Unload, Write
from serve.core.types import FIRST_WARM_UP_STEP, Step
from serve.lora.table import Adapters
from serve.model.caches import quantized
from serve.model.head import SharedHead
from serve.model.sharding import Divisions
from serve.model.stage import Stage
from serve.rank.cache import ForwardPass, GroupCaches
from serve.rank.chooser import Chooser
from serve.rank.drafts.draft_model import Drafter
from serve.rank.embedder import Embedder
from serve.rank.outbox import Outbox
from serve.rank.prefixes.contents import MakeCaches
from serve.rank.prefixes.store import PrefixStore
from serve.ring.transport import Transport

OpenStore = Callable[[MakeCaches], PrefixStore | None]
"""Opens a stage's prefix cache on disk, if it has one."""

_NUM_SPANS = 4096


class StepLoop:
    """Receive, forward, send. Rank 0, the first shard of the last stage, chooses tokens."""

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        kv_bits: int | None = None,
        folder: Path | None = None,
        cache_dir: Path | None = None,
        copies: Path | None = None,
        *,
        batchable: bool,
        open_store: OpenStore | None = None,
        divisions: Divisions | None = None,
        draft_model: Drafter | None = None,
        shared_head: SharedHead | None = None,
    ) -> None:
        self.stage = stage
        self.shared_head = shared_head
        self.draft_model = draft_model
        self.has_head = stage.is_last and transport.shard == 0
        self._make_cache = lambda: quantized(stage.make_cache(), kv_bits)
        self._batchable = batchable
        self.prefix_store = open_store(self._make_cache) if open_store else None
        self.adapters = Adapters(stage, cache_dir, copies, divisions)
        self.chooser = Chooser(folder)
        if stage.is_last:
            stage.record_hidden()
        self.spans: deque[Span] = deque(maxlen=_NUM_SPANS)
        self._begin(transport)

    def _begin(self, transport: Transport) -> None:
        """Begins to run steps in a ring, with nothing of any sequence."""
        self.transport = transport
        self.caches = GroupCaches(self._make_cache, self._batchable)
        self.outbox = Outbox(lambda step: transport.send(step, []))
        self.embedder = Embedder()
        self._shares_head = False  # in the step that is being computed
        self.pooled: list[mx.array] = []  # the embedder's arrays of the latest step
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.step: int | None = None  # the number of the step that is being computed

    def rejoin(self, transport: Transport, order: Order) -> None:
        """Begins again in another ring, with the adapters and sequences of the order. Raises
        EngineError if fewer tokens of a sequence are held."""
        caches = self.caches
        self._begin(transport)
        if order.positions:
            caches.keep_only(order.positions)
            self.caches = caches
            self._evaluate_moved()
        self.chooser.clear()
        if self.draft_model:
            self.draft_model.clear()
        mx.eval(self.adapters.free_all_but(order.adapters))
        if self.prefix_store:
            self.prefix_store.forget_loaded()

    def put(self, step: Step) -> None:
        """Takes a step on rank 0, even while others run, and sends it once its tokens are known."""
        step = self.chooser.cut_drafts(step)
        if self.shared_head and step.sample and len(step.tokens) <= self.shared_head.max_tokens:
            step = msgspec.structs.replace(step, before=(*step.before, ShareHead()))
        self.outbox.put(step)

    def run(self) -> Iterator[Result]:
        """Yields the result of each step on rank 0."""
        while (message := self.transport.receive()) is not None:
            step, received = message
            started = time.monotonic()
            self.step = step.number
            with self.transport.sums.of_step(step):
                outputs = self.forward(step, received)
            if self.has_head:
                result = self._result(step, outputs)
                self._note(step, started)
                # The next step of the group goes first, because the stages wait for it.
                if step.sample:
                    self.outbox.sampled(step, result.tokens, result.num_accepted)
                if self.draft_model:
                    result, spans = self.draft_model.guess_after(step, result, self.chooser)
                    self.busy_seconds += sum(span.end - span.start for span in spans)
                    self.spans.extend(spans)
                yield result
            else:
                self._note(step, started)
                if not self.stage.is_last:
                    self.transport.send(step, outputs)
            self._finish(step)

    def forward(self, step: Step, received: list[mx.array]) -> list[mx.array]:
        """Runs a step and returns arrays for the next stage, part by part; on rank 0 the tokens
        (B,) and their scores. The other shards of the last stage return nothing."""
        self._shares_head = False
        for op in step.before:
            self._perform(op)
        passes = self.caches.arrange(step)
        self._evaluate_moved()
        mx.eval(self.adapters.install(step.rows))
        outputs: list[mx.array] = []
        hidden: list[mx.array | None] = []
        for n, part in enumerate(passes):
            size = len(received) // len(passes)
            self.adapters.select(step, part.rows)
            own_received = received[n * size : (n + 1) * size]
            with self._head():
                own_outputs = self.stage(part.tokens(step), part.caches, own_received)
            own_hidden = self.stage.pop_hidden()
            self._sum_up(own_outputs, own_hidden)
            outputs += own_outputs
            hidden.append(own_hidden)
        if self.has_head and passes:
            outputs = self._chosen(step, passes, outputs)
        elif self.stage.is_last:
            outputs = []
        self.pooled = self.embedder.pool(step, passes, hidden)
        hidden.clear()
        kept = self.draft_model.keep(step, passes, self.chooser) if self.draft_model else []
        mx.eval(outputs, self.pooled, kept, self.caches.states(step))
        return outputs

    def _perform(self, op: AnyOp) -> None:
        """Performs an operation that comes before the rows of its step."""
        match op:
            case Load(sequence, num_tokens):
                self.caches.begin(sequence, self._store().take(sequence), num_tokens)
            case Copy():
                self.caches.copy(op)
            case Drop(sequence):
                self._drop(sequence)
            case Forget(checkpoint):
                self.caches.forget(checkpoint)
            case Unload(version):
                self.adapters.unload(version)
            case ShareHead():
                self._shares_head = True
            case Save() | Write() | Guess():
                raise EngineError(f"{type(op).__name__} cannot come before the rows of a step.")

    def _drop(self, sequence: int) -> None:
        self.caches.drop(sequence)
        if not self.has_head:
            return
        self.embedder.forget(sequence)
        if self.chooser.forget(sequence):
            self.outbox.forget(sequence)
            if self.draft_model:
                self.draft_model.forget([sequence])

    def _head(self) -> AbstractContextManager[None]:
        """Makes the model compute its logits as the step says, inside of a with block."""
        if self.shared_head and self._shares_head:
            return self.shared_head.shared()
        return nullcontext()

    def _sum_up(self, outputs: list[mx.array], hidden: mx.array | None) -> None:
        """Evaluates what the shards of this stage compute together. Shards match their sums only by
        the order of evaluation, and only rank 0 knows whether the head is needed. So all shards
        evaluate one part after the other, each up to the head, or with a head that they share up to
        the logits."""
        if self.transport.num_shards == 1:
            return
        if self.shared_head and self._shares_head:
            outputs = [self.shared_head.pop_logits()]
        elif self.stage.is_last:
            assert hidden is not None, "make_plan refuses models without hidden states"
            outputs = [hidden]
        self.transport.evaluate(outputs)

    def _evaluate_moved(self) -> None:
        """Evaluates rows that were copied, layer by layer: together, the old and the new arrays of
        all layers would be in memory at the same time."""
        for arrays in self.caches.moved():
            mx.eval(arrays)

    def _finish(self, step: Step) -> None:
        """Performs the operations that come after the rows of a step. Its outputs have left, so no
        stage waits; the next step must not be received before, because it writes to the same
        buffers."""
        if not step.after:
            return
        started = time.monotonic()
        self.step = step.number
        for op in step.after:
            if isinstance(op, Save):
                mx.eval(self.caches.save(op))
            elif isinstance(op, Write):
                self._write(op)
        self.step = None
        if step.number < FIRST_WARM_UP_STEP:
            self.busy_seconds += time.monotonic() - started

    def _write(self, write: Write) -> None:
        """Hands a file to the store. One that cannot be made costs only speed."""
        try:
            content = self.caches.content(write)
        except EngineError as error:
            self._store().refuse(write, error)
            return
        self._evaluate_moved()
        mx.eval(content.arrays)
        self._store().write(write, content)

    def _store(self) -> PrefixStore:
        if self.prefix_store is None:
            raise EngineError("A step uses the prefix cache on disk, and this stage has none.")
        return self.prefix_store

    def _result(self, step: Step, outputs: list[mx.array]) -> Result:
        result = self.chooser.result(step, outputs)
        if not self.pooled:
            return result
        embeddings = self.embedder.result(self.pooled)
        return msgspec.structs.replace(result, outputs=(*result.outputs, *embeddings))

    def _chosen(
        self, step: Step, passes: list[ForwardPass], logits: list[mx.array]
    ) -> list[mx.array]:
        chosen: list[mx.array] = []
        for arrays in self.chooser.choose(step, passes, logits):
            if not step.sample:
                mx.eval(arrays)  # Before the next slice of scores is made, to save memory.
            chosen += arrays
        return chosen

    def _note(self, step: Step, started: float) -> None:
        ended = time.monotonic()
        self.step = None
        if step.number >= FIRST_WARM_UP_STEP:
            return  # The times of warm-up steps say nothing about later ones.
        self.busy_seconds += ended - started
        self.num_steps += 1
        sums = self.transport.sums
        span = Span(
            step.number,
            step.group,
            len(step.rows),
            len(step.tokens),
            started,
            ended,
            step.num_drafts,
            sums.latest_seconds,
        )
        self.spans.append(span)

    def activity(self) -> Activity:
        """Returns what the loop has done so far, with the spans since the last call."""
        spans = [self.spans.popleft() for _ in range(len(self.spans))]
        transport = self.transport
        kv_bytes = self.caches.num_bytes if spans else None
        return Activity(
            busy_seconds=self.busy_seconds,
            num_steps=self.num_steps,
            adapter_bytes=self.adapters.num_bytes,
            num_hops=transport.num_hops,
            hop_seconds=transport.hop_seconds,
            waits_on=transport.waits_on,
            step=self.step,
            # It changes only with steps, and counting looks at every cache.
            kv_bytes=kv_bytes,
            spans=spans,
            sent_at=time.monotonic(),
            sums=transport.sums.counts,
        )
