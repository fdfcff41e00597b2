"""The engine child of a rank: it receives steps, runs its stage, and sends the results. It uses MLX
and no HTTP.

The main thread talks to the parent, because a process whose main thread is inside
MLX cannot answer. One other thread has all of MLX: it makes the streams, loads the
stage and runs the step loop. When the parent goes, this process ends at once. When
a neighbour goes, it leaves the ring, keeps what it has loaded, and waits until its
parent sends an order for another ring, or kills it.
"""

import faulthandler
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import mlx.nn as nn
import msgspec

from serve.core.errors import ClusterError, EngineError, PlanError
from serve.core.facts import stamp
from serve.core.messages import (
    AdapterRead,
    AdapterRefused,
    Admit,
    Embed,
    ForgetPrefixFiles,
    Leave,
    Left,
    LoadAdapter,
    Loaded,
    MakePlan,
    Order,
    ReadPrefix,
    RingLost,
    Status,
    ToEngine,
)
from serve.core.types import Step
from serve.lora.table import Adapters
from serve.model.sharding import Sharding, shard
from serve.model.weights import LoadedStage, load_stage, open_model
from serve.rank.batching import can_batch, is_causal
from serve.rank.chooser import scoring_bytes
from serve.rank.drafts.mtp import load_drafter
from serve.rank.joining import join
from serve.rank.memory import free_bytes
from serve.rank.parent import Parent, fail, wait_for_order
from serve.rank.prefix_parts import StageCaches
from serve.rank.prefix_store import PrefixStore, open_store
from serve.rank.step_loop import StepLoop
from serve.ring.grid import GridTransport
from serve.ring.regroup import objection
from serve.ring.transport import RingLostError, RingTransport, Streams, Transport

_logger = logging.getLogger(__name__)

_STATUS_SECONDS = 0.25


class Worker:
    """Owns the threads of the process and the status that the parent gets."""

    def __init__(self, parent: Parent, order: Order) -> None:
        self.parent = parent
        self.order = order
        self.transport: Transport | None = None
        self.loop: StepLoop | None = None  # while steps may come
        self.status = Status("joining")
        # A thread of its own, so that no stream waits while an adapter is read.
        self.reader = ThreadPoolExecutor(1, "adapters")
        self._kept: tuple[Order, StepLoop, Loaded] | None = None
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._leaves: SimpleQueue[Leave] = SimpleQueue()
        self._has_left = False
        self._streams: Streams | None = None  # made by the thread that has all of MLX
        self._reports = threading.Lock()

    def run(self) -> None:
        threading.Thread(target=self._run_engine, name="mlx", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        while (message := self.parent.receive()) is not None:
            self._obey(message)
        # The parent was killed: otherwise it would have ended this process first.
        shutil.rmtree(self.order.copies, ignore_errors=True)

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Step():
                self._take_step(message)
            case Admit():
                self._running_loop().chooser.admit(
                    message.sequence, message.sampling, message.num_prompt, message.tokens
                )
            case Embed(sequence, pooling, num_tokens):
                self._running_loop().embedder.admit(sequence, pooling, num_tokens)
            case LoadAdapter():
                self.reader.submit(self._read_adapter, message, self._running_loop().adapters)
            case ReadPrefix() | ForgetPrefixFiles():
                store = self._running_loop().prefix_store
                if store is not None:
                    store.obey(message)
            case Leave():
                self._leave(message)
            case Order() if self._has_left:
                self._has_left = False
                self._orders.put(message)
            case Order() | MakePlan():
                raise EngineError(f"The parent sent a second {type(message).__name__}.")

    def _take_step(self, step: Step) -> None:
        loop = self._running_loop()
        try:
            loop.outbox.put(loop.chooser.cut_drafts(step))
        except RingLostError:
            loop.transport.close()  # The other thread notices it, and reports it.

    def _leave(self, message: Leave) -> None:
        """Makes the other thread leave the ring, as soon as the step that it computes is done."""
        self.loop = None
        self._has_left = True
        self._leaves.put(message)
        if self.transport:
            self.transport.close()

    def _read_adapter(self, message: LoadAdapter, adapters: Adapters) -> None:
        """Reads an adapter and answers rank 0. No step uses the adapter yet, so an error here ends
        nothing else."""
        answer: AdapterRead | AdapterRefused
        try:
            answer = adapters.answer(message)
        except Exception as error:  # The top of this thread's work: nobody sees what it raises.
            _logger.exception("event=adapter_failed version=%d", message.version)
            reason = f"reading failed ({type(error).__name__})"
            answer = AdapterRefused(message.version, reason, 500)
        try:
            self.parent.send(answer)
        except OSError as error:
            fail(self.parent, error, self.order.name)
        adapters.copy()

    def _running_loop(self) -> StepLoop:
        if self.loop is None:
            raise EngineError("The parent sent a step before this rank was ready.")
        return self.loop

    def _run_engine(self) -> None:
        try:
            self._streams = Streams()
            while True:
                loop = self._start()
                reason = self._run_steps(loop)
                if objection() or not isinstance(loop.transport, RingTransport):
                    raise ClusterError(reason)
                self._leave_ring(loop, loop.transport, reason)
                self.order = self._orders.get()
                self.status = Status("joining")
        except Exception as error:  # The top of the thread: the process ends with it.
            fail(self.parent, error, self.order.name)

    def _run_steps(self, loop: StepLoop) -> str:
        """Runs steps until the ring is lost, and returns the reason."""
        try:
            for result in loop.run():
                self.parent.send(result)
        except RingLostError as error:
            return str(error)
        return f"{self.order.name}: its right neighbour is gone."

    def _leave_ring(self, loop: StepLoop, transport: RingTransport, reason: str) -> None:
        """Leaves a lost ring, and answers the parent when it sends Leave. If this blocks or fails,
        the parent ends this process."""
        if self._leaves.empty():
            self.parent.send(RingLost(reason))
        transport.leave()
        leave = self._leaves.get()
        # No answer of an earlier life may come after Left.
        self.reader.submit(lambda: None).result()
        if loop.prefix_store:
            loop.prefix_store.wait()
        with self._reports:
            self.status = Status("starting")
            self.parent.send(Left(leave.life, loop.caches.positions))

    def _start(self) -> StepLoop:
        order = self.order
        self.transport = join(order, self._streams)
        self.status = Status("loading")
        if self._kept is not None:
            return self._rejoin(*self._kept)
        model = open_model(order.model, order.commit, order.cache_dir)
        folder = model if isinstance(model, Path) else model.folder
        batchable = True
        causal = True

        def try_and_shard(whole: nn.Module) -> Sharding | None:
            nonlocal batchable, causal
            batchable = can_batch(whole)
            causal = is_causal(whole)
            if isinstance(self.transport, GridTransport):
                return shard(whole, self.transport.group)
            return None

        draft = load_drafter(order.draft, self._loading) if order.draft else None
        loaded = load_stage(model, *order.layers, self._loading, try_and_shard)
        draft_model = draft.for_logits_of(loaded.stage) if draft else None
        loop = StepLoop(
            loaded.stage,
            self.transport,
            order.kv_bits,
            folder,
            Path(order.cache_dir) if order.cache_dir else None,
            Path(order.copies),
            batchable=batchable,
            open_store=partial(self._open_store, loaded, folder),
            divisions=loaded.divisions,
            draft_model=draft_model,
        )
        what_is_loaded = self._what_is_loaded(loaded, loop, causal)
        if draft_model:
            what_is_loaded = draft_model.noted(what_is_loaded, order.draft_bytes)
        if order.num_shards > 1 and loaded.stage.is_last and not what_is_loaded.hidden_size:
            raise PlanError("--tensor-parallel: this model does not show its hidden states.")
        self._kept = order, loop, what_is_loaded
        self._be_ready(loop, what_is_loaded)
        return loop

    def _rejoin(self, earlier: Order, loop: StepLoop, loaded: Loaded) -> StepLoop:
        """Continues in another ring with what is loaded. Raises EngineError if this is not what the
        order says."""
        assert self.transport is not None
        order = self.order
        if not order.loads_the_same(earlier):
            raise EngineError(f"{order.name} holds something else than what its order says.")
        loop.rejoin(self.transport, order)
        self._be_ready(loop, loaded)
        return loop

    def _be_ready(self, loop: StepLoop, loaded: Loaded) -> None:
        if loop.prefix_store:
            self.parent.send(loop.prefix_store.files())
        self.loop = loop
        self.status = Status("ready", loaded=loaded)

    def _open_store(
        self, loaded: LoadedStage, folder: Path, caches: StageCaches
    ) -> PrefixStore | None:
        """Opens the prefix cache on disk, if there is a folder for it."""
        config = (folder / "config.json").read_text("utf-8")
        weights = loaded.stage.weights()
        return open_store(self.order, config, weights, caches, self.parent.send)

    def _what_is_loaded(self, loaded: LoadedStage, loop: StepLoop, is_causal: bool) -> Loaded:
        hosts = self.order.hosts
        num_ranks_here = hosts.count(hosts[self.order.rank])
        logits_bytes_per_token = 0
        bytes_to_score = 0
        hidden_size = 0
        if loaded.stage.is_last:
            logits = loaded.stage.logits()
            logits_bytes_per_token = logits.nbytes // logits[..., 0].size
            bytes_to_score = scoring_bytes(logits.shape)
            hidden = loaded.stage.take_hidden()
            hidden_size = hidden.shape[-1] if hidden is not None else 0
        return Loaded(
            bytes_owned=loaded.bytes_owned,
            bytes_read=loaded.bytes_read,
            bytes_fetched=loaded.bytes_fetched,
            free_bytes=free_bytes() // num_ranks_here,
            reuse=loop.caches.reuse,
            can_rewind=loop.caches.can_rewind,
            logits_bytes_per_token=logits_bytes_per_token,
            scoring_bytes=bytes_to_score,
            hidden_size=hidden_size,
            is_causal=is_causal,
            objection=objection(),
            files=self.order.commit or stamp(Path(self.order.model)),
            sharding=loaded.sharding_digest,
        )

    def _loading(self, state: str, done: int, total: int) -> None:
        self.status = Status(state, done, total)

    # --- reports to the parent

    def _watch(self) -> None:
        """Sends reports while the other threads are busy: they show rank 0 which rank is behind."""
        try:
            while True:
                self._report()
                time.sleep(_STATUS_SECONDS)
        except Exception as error:  # The top of the thread: the process ends with it.
            fail(self.parent, error, self.order.name)

    def _report(self) -> None:
        with self._reports:  # A report of the time before Left would be taken for a later one.
            loop = self.loop
            activity = loop.activity() if loop else None
            self.parent.send(msgspec.structs.replace(self.status, activity=activity))


def main(argv: list[str]) -> None:
    """argv[1] is the descriptor of the socket to the parent."""
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        # They reach the whole group from a terminal; the parent decides when this ends.
        signal.signal(interrupt, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks, after a stall
    parent = Parent(socket.socket(fileno=int(argv[1])))
    try:
        order = wait_for_order(parent)
        if order is not None:
            Worker(parent, order).run()
    except Exception as error:  # The top of the process.
        fail(parent, error)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv)
