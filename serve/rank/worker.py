"""The engine child of a rank: it receives steps, runs its stage, and sends the results. It uses MLX
and no HTTP.

The main thread talks to the parent, because a process whose main thread is inside
MLX cannot answer. One other thread has all of MLX: it makes the streams, loads the
stage and runs the step loop. When the parent goes, or a neighbour, this process
ends at once: there is nothing in it that is worth saving.
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
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import msgspec

from serve.core.config import Address, parse_address
from serve.core.errors import BrigadeError, ClusterError, EngineError, PlanError
from serve.core.facts import versions
from serve.core.messages import (
    Activity,
    AdapterRead,
    AdapterRefused,
    Admit,
    Embed,
    Fault,
    ForgetPrefixFiles,
    FromEngine,
    LoadAdapter,
    Loaded,
    MakePlan,
    Order,
    Planned,
    ReadPrefix,
    Result,
    Span,
    Status,
    ToEngine,
)
from serve.core.types import FIRST_WARM_UP_STEP, Step
from serve.core.wire import FrameReader, frame
from serve.hub.partial import PartialModel, open_partial
from serve.lora.table import Adapters
from serve.model.caches import quantized
from serve.model.planning import make_plan
from serve.model.sharding import Divisions, Sharding, shard
from serve.model.stage import Stage
from serve.model.weights import LoadedStage, load_stage
from serve.rank.batching import can_batch, is_causal
from serve.rank.cache import GroupCaches, Part
from serve.rank.chooser import Chooser, scoring_bytes
from serve.rank.embedder import Embedder
from serve.rank.memory import free_bytes
from serve.rank.outbox import Outbox
from serve.rank.prefix_store import PrefixStore, open_store, stage_digest
from serve.ring.doorbells import Grid, meet
from serve.ring.grid import GridTransport
from serve.ring.transport import LocalTransport, Ring, RingTransport, Transport, among

_logger = logging.getLogger(__name__)

OpenStore = Callable[[Callable[[], list[Any]]], PrefixStore | None]
"""Opens a stage's prefix cache on disk. The argument makes the plain caches of one new row."""

_STATUS_SECONDS = 0.25
_NUM_SPANS = 4096
_PARENT_FIRST_SECONDS = 5.0  # The parent gives up first, because its reason is clearer.


class Parent:
    """The socket to the parent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)
        self._ready: deque[ToEngine] = deque()
        self._lock = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """Sends a message. May be called from every thread. Raises OSError."""
        with self._lock:
            self._connection.sendall(frame(message))

    def receive(self) -> ToEngine | None:
        """The next message; None when the parent is gone."""
        while not self._ready:
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            self._ready.extend(self._reader.feed(data))
        return self._ready.popleft()


def _new_caches(stage: Stage, kv_bits: int | None) -> list[Any]:
    """Makes the plain caches of one new row."""
    return quantized(stage.make_cache(), kv_bits)


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
    ) -> None:
        self.stage = stage
        self.transport = transport
        self.has_head = stage.is_last and transport.shard == 0
        make_cache = partial(_new_caches, stage, kv_bits)
        self.caches = GroupCaches(make_cache, batchable)
        self.prefix_store = open_store(make_cache) if open_store else None
        self.adapters = Adapters(stage, cache_dir, copies, divisions)
        self.outbox = Outbox(lambda step: transport.send(step, []))
        self.chooser = Chooser(folder)
        self.embedder = Embedder()
        if stage.is_last:
            stage.keep_hidden()
        self.pooled: list[mx.array] = []  # the embedder's arrays of the latest step
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.step: int | None = None  # the number of the step that is being computed
        self.spans: deque[Span] = deque(maxlen=_NUM_SPANS)

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
                yield result
            else:
                self._note(step, started)
                if not self.stage.is_last:
                    self.transport.send(step, outputs)

    def forward(self, step: Step, received: list[mx.array]) -> list[mx.array]:
        """Runs a step and returns the arrays for the next stage, or on rank 0 the tokens (B,) and
        their scores.

        Stages divide the rows into the same parts, so the arrays of one part follow those of the
        other. The other shards of the last stage return nothing.
        """
        for load in step.load:
            self.caches.begin(load.sequence, self._store().take(load.sequence), load.num_tokens)
        parts = self.caches.apply(step)
        self._evaluate_moved()
        mx.eval(self.adapters.apply(step))
        if self.has_head:
            for sequence in self.chooser.forget(step.drop):
                self.outbox.forget(sequence)
            self.embedder.forget(step.drop)
        outputs: list[mx.array] = []
        hidden: list[mx.array | None] = []
        for n, part in enumerate(parts):
            size = len(received) // len(parts)
            self.adapters.select(step, part.rows)
            own_received = received[n * size : (n + 1) * size]
            own_outputs = self.stage(part.tokens(step), part.caches, own_received)
            own_hidden = self.stage.take_hidden()
            self._sum_up(own_outputs, own_hidden)
            outputs += own_outputs
            hidden.append(own_hidden)
        if self.has_head and parts:
            outputs = self._chosen(step, parts, outputs)
        elif self.stage.is_last:
            outputs = []
        self.pooled = self.embedder.pool(step, parts, hidden)
        hidden.clear()
        mx.eval(outputs, self.pooled, self.caches.states(step))
        mx.eval(self.caches.save(step))
        self._write(step)
        return outputs

    def _sum_up(self, outputs: list[mx.array], hidden: mx.array | None) -> None:
        """Evaluates what the shards of this stage compute together. Shards match their sums only by
        the order of evaluation, and only rank 0 knows whether the head is needed. So all shards
        evaluate one part after the other, each up to the head."""
        if self.transport.num_shards == 1:
            return
        if self.stage.is_last:
            assert hidden is not None, "Worker refuses models that show no hidden states"
            outputs = [hidden]
        self.transport.evaluate(outputs)

    def _evaluate_moved(self) -> None:
        """Evaluates rows that were copied, layer by layer: together, the old and the new arrays of
        all layers would be in memory at the same time."""
        for arrays in self.caches.moved():
            mx.eval(arrays)

    def _write(self, step: Step) -> None:
        """Hands the files of a step to the store, which writes them while later steps run."""
        for write in step.write:
            content = self.caches.content(write)
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
        return msgspec.structs.replace(result, embeddings=self.embedder.result(self.pooled))

    def _chosen(self, step: Step, parts: list[Part], logits: list[mx.array]) -> list[mx.array]:
        chosen: list[mx.array] = []
        for arrays in self.chooser.choose(step, parts, logits):
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
        num_rows = len(step.rows)
        num_tokens = len(step.tokens)
        sums = self.transport.sums
        span = Span(
            step.number,
            step.group,
            num_rows,
            num_tokens,
            started,
            ended,
            step.num_drafts,
            sums.latest_seconds,
        )
        self.spans.append(span)


class Worker:
    """Owns the threads of the process and the status that the parent gets."""

    def __init__(self, parent: Parent, order: Order) -> None:
        self.parent = parent
        self.order = order
        self.transport: Transport | None = None
        self.loop: StepLoop | None = None
        self.status = Status("joining")
        # A thread of its own, so that no stream waits while an adapter is read.
        self.reader = ThreadPoolExecutor(1, "adapters")

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
                loop = self._running_loop()
                loop.outbox.put(loop.chooser.cut_drafts(message))
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
            case Order() | MakePlan():
                raise EngineError(f"The parent sent a second {type(message).__name__}.")

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
            for result in self._start().run():
                self.parent.send(result)
            raise ClusterError(f"{self.order.name}: its right neighbour is gone.")
        except Exception as error:  # The top of the thread: the process ends with it.
            fail(self.parent, error, self.order.name)

    def _start(self) -> StepLoop:
        order = self.order
        self.transport = self._join()
        self.status = Status("loading")
        model = self._model()
        if isinstance(model, Path):
            folder = model
        else:
            folder = model.folder
        batchable = True
        causal = True

        def try_and_shard(whole: nn.Module) -> Sharding | None:
            nonlocal batchable, causal
            batchable = can_batch(whole)
            causal = is_causal(whole)
            if isinstance(self.transport, GridTransport):
                return shard(whole, self.transport.group)
            return None

        loaded = load_stage(model, *order.layers, self._loading, try_and_shard)
        cache_dir = Path(order.cache_dir) if order.cache_dir else None
        self.loop = StepLoop(
            loaded.stage,
            self.transport,
            order.kv_bits,
            folder,
            cache_dir,
            Path(order.copies),
            batchable=batchable,
            open_store=partial(self._open_store, loaded, folder),
            divisions=loaded.divisions,
        )
        if self.loop.prefix_store:
            self.parent.send(self.loop.prefix_store.files())
        what_is_loaded = self._what_is_loaded(loaded, self.loop, causal)
        if order.num_shards > 1 and loaded.stage.is_last and not what_is_loaded.hidden_size:
            raise PlanError("--tensor-parallel: this model does not show its hidden states.")
        self.status = Status("ready", loaded=what_is_loaded)
        return self.loop

    def _open_store(
        self, loaded: LoadedStage, folder: Path, make_cache: Callable[[], list[Any]]
    ) -> PrefixStore | None:
        """Opens the prefix cache on disk, if there is a folder for it."""
        order = self.order
        if order.prefix_dir is None:
            return None
        facts = versions() | {
            "layers": str(order.layers),
            "shard": f"{order.rank % order.num_shards} of {order.num_shards}",
            "kv_bits": str(order.kv_bits),
            "config": (folder / "config.json").read_text("utf-8"),
        }
        return open_store(
            Path(order.prefix_dir) / f"rank-{order.ring[order.rank]}",
            stage_digest(loaded.stage.weights(), facts),
            order.prefix_bytes,
            make_cache,
            self.parent.send,
        )

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
        )

    def _model(self) -> Path | PartialModel:
        order = self.order
        if order.commit is None:
            return Path(order.model)
        if order.cache_dir:
            cache_dir = Path(order.cache_dir)
        else:
            cache_dir = None
        return open_partial(order.model, order.commit, cache_dir)

    def _join(self) -> Transport:
        order = self.order
        if len(order.hosts) == 1:
            return LocalTransport()
        # MLX holds the interpreter's lock while it waits for neighbours, so no thread here would
        # see that the parent was killed. This one needs no lock, and ends the process.
        faulthandler.dump_traceback_later(order.join_timeout + _PARENT_FIRST_SECONDS, exit=True)
        try:
            if order.num_shards > 1:
                return self._join_grid()
            with among(order.ring, order.addresses, Path(order.copies)):
                return RingTransport(Ring(order.rank, order.hosts, order.nonce, order.join_timeout))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _join_grid(self) -> Transport:
        order = self.order
        addresses: list[Address] = []
        for rank in order.ring:
            first_address, *_ = order.addresses[rank]
            addresses.append(parse_address(first_address, "MLX_HOSTFILE"))
        grid = Grid(
            order.rank,
            order.num_shards,
            tuple(addresses),
            order.nonce,
            order.join_timeout,
        )
        neighbours = meet(grid)
        row = [order.ring[place] for place in grid.row]
        with among(row, order.addresses, Path(order.copies)):
            return GridTransport(grid, neighbours)

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
        status = self.status
        if self.loop:
            status = msgspec.structs.replace(status, activity=_activity(self.loop))
        self.parent.send(status)


def _activity(loop: StepLoop) -> Activity:
    spans = [loop.spans.popleft() for _ in range(len(loop.spans))]
    transport = loop.transport
    kv_bytes = loop.caches.num_bytes if spans else None
    return Activity(
        busy_seconds=loop.busy_seconds,
        num_steps=loop.num_steps,
        adapter_bytes=loop.adapters.num_bytes,
        num_hops=transport.num_hops,
        hop_seconds=transport.hop_seconds,
        waits_on=transport.waits_on,
        step=loop.step,
        # It changes only with steps, and counting looks at every cache.
        kv_bytes=kv_bytes,
        spans=spans,
        sent_at=time.monotonic(),
        sums=transport.sums.counts,
    )


def main(argv: list[str]) -> None:
    """argv[1] is the descriptor of the socket to the parent."""
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        # They reach the whole group from a terminal; the parent decides when this ends.
        signal.signal(interrupt, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks, after a stall
    parent = Parent(socket.socket(fileno=int(argv[1])))
    try:
        order = _wait_for_order(parent)
        if order is not None:
            Worker(parent, order).run()
    except Exception as error:  # The top of the process.
        fail(parent, error)
    os._exit(0)


def _wait_for_order(parent: Parent) -> Order | None:
    """Waits for the order to load a model, and returns None if the parent ends first. Rank 0's
    engine makes plans before that."""
    while message := parent.receive():
        match message:
            case Order():
                return message
            case MakePlan(model, request):
                plan = make_plan(Path(model), request)
                parent.send(Planned(plan.stages))
            case _:
                raise EngineError(f"The parent sent {type(message).__name__} before an order.")
    return None


def fail(parent: Parent, error: BaseException, name: str = "The engine") -> NoReturn:
    """Reports an error to the parent, and ends the process without waiting for any thread."""
    if isinstance(error, BrigadeError):
        exit_code = error.exit_code
        message = str(error)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
        exit_code = EngineError.exit_code
        message = f"{name}: {type(error).__name__}: {error}"
    try:
        parent.send(Fault(exit_code, message))
    except OSError:
        exit_code = ClusterError.exit_code  # The parent is gone.
    os._exit(exit_code)


if __name__ == "__main__":
    main(sys.argv)
