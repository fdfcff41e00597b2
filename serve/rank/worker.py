"""The engine child of a rank: receives, runs its stage, sends. MLX and no HTTP.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx

from serve.core import wire
from serve.core.errors import BrigadeError, ClusterError, EngineError
from serve.core.types import FIRST_WARM_UP_STEP, Sampling, Step
from serve.hub.partial import PartialModel, open_partial
from serve.rank.adapters import Adapters
from serve.rank.cache import GroupCaches, Part
from serve.rank.chooser import Chooser, scoring_bytes
from serve.rank.memory import free_bytes
from serve.rank.outbox import Outbox
from serve.rank.planning import PlanRequest, make_plan
from serve.rank.slots import quantized
from serve.rank.stage import Stage
from serve.rank.transport import LocalTransport, Ring, RingTransport, Transport, among
from serve.rank.weights import load_stage

_logger = logging.getLogger(__name__)

_STATUS_SECONDS = 0.25
_NUM_SPANS = 4096
_PARENT_FIRST_SECONDS = 5.0  # it says better what is wrong


@dataclass(frozen=True, slots=True)
class Order:
    """What the parent says at the start. ring are the ranks of the launch that take part, each
    with one of hosts, and rank is this one's place among them; addresses are those of the whole
    launch. commit makes model one of the hub, `org/name`; cache_dir is where parts of it are kept,
    None for under HF_HOME; copies is a folder that the parent keeps from one engine to the next."""

    rank: int
    ring: tuple[int, ...]
    hosts: tuple[str, ...]
    addresses: list[list[str]]
    nonce: int
    model: Path
    commit: str | None
    cache_dir: Path | None
    copies: Path
    layers: tuple[int, int]
    kv_bits: int | None
    join_timeout: float

    @property
    def name(self) -> str:
        return f"Rank {self.ring[self.rank]}"

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Order":
        fields = {name: value for name, value in fields.items() if name != "type"}
        typed = {
            "ring": tuple(fields["ring"]),
            "hosts": tuple(fields["hosts"]),
            "model": Path(fields["model"]),
            "cache_dir": Path(fields["cache_dir"]) if fields["cache_dir"] else None,
            "copies": Path(fields["copies"]),
            "layers": tuple(fields["layers"]),
        }
        return cls(**{**fields, **typed})


class Parent:
    """The socket to the parent. Frames may be sent from every thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = wire.FrameReader()
        self._frames: deque[tuple[wire.Kind, bytes]] = deque()
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        with self._lock:
            self._connection.sendall(data)

    def receive(self) -> tuple[wire.Kind, bytes] | None:
        """The next frame; None when the parent is gone."""
        while not self._frames:
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            self._frames.extend(self._reader.feed(data))
        return self._frames.popleft()


class StepLoop:
    """Receive, forward, send. On the last stage, which is rank 0's, tokens are chosen."""

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        kv_bits: int | None = None,
        folder: Path | None = None,
        cache_dir: Path | None = None,
        copies: Path | None = None,
    ) -> None:
        self.stage = stage
        self.transport = transport
        self.caches = GroupCaches(lambda: quantized(stage.make_cache(), kv_bits), stage.can_batch)
        self.adapters = Adapters(stage, cache_dir, copies)
        self.outbox = Outbox(lambda step: transport.send(step, []))
        self.chooser = Chooser(folder)
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.step: int | None = None  # the one that is computed
        self.spans: deque[tuple[int, int, int, int, float, float]] = deque(maxlen=_NUM_SPANS)

    def run(self) -> Iterator[wire.Result]:
        """Yields the result of each step on the last stage."""
        while (message := self.transport.receive()) is not None:
            step, received = message
            started, self.step = time.time(), step.number
            outputs = self.forward(step, received)
            if self.stage.is_last:
                result = self.chooser.result(step, outputs)
                self._note(step, started)
                # The next step of the group goes first: the result is for the clients.
                if step.sample:
                    self.outbox.sampled(step, result.tokens)
                yield result
            else:
                self._note(step, started)
                self.transport.send(step, outputs)

    def forward(self, step: Step, received: list[mx.array]) -> list[mx.array]:
        """What goes on to the next stage; on the last one the tokens (B,) and their scores.

        Stages divide the rows into the same parts, so the arrays of one part follow
        those of the other.
        """
        parts = self.caches.apply(step)
        mx.eval(self.caches.moved(), self.adapters.apply(step))
        if self.stage.is_last:
            for sequence in self.chooser.forget(step.drop):
                self.outbox.forget(sequence)
        outputs: list[mx.array] = []
        for n, part in enumerate(parts):
            size = len(received) // len(parts)
            self.adapters.select(step, part.rows)
            outputs += self.stage(
                part.tokens(step), part.caches, received[n * size : (n + 1) * size]
            )
        if self.stage.is_last and parts:
            outputs = self._chosen(step, parts, outputs)
        mx.eval(outputs, self.caches.states(step))
        return outputs

    def _chosen(self, step: Step, parts: list[Part], logits: list[mx.array]) -> list[mx.array]:
        chosen: list[mx.array] = []
        for arrays in self.chooser.choose(step, parts, logits):
            if not step.sample:
                mx.eval(arrays)  # Before the next slice of scores is made, to save memory.
            chosen += arrays
        return chosen

    def _note(self, step: Step, started: float) -> None:
        ended, self.step = time.time(), None
        if step.number >= FIRST_WARM_UP_STEP:
            return  # It tells nothing of what later ones take.
        self.busy_seconds += ended - started
        self.num_steps += 1
        num_rows, num_tokens = len(step.rows), len(step.tokens)
        self.spans.append((step.number, step.group, num_rows, num_tokens, started, ended))


class Worker:
    """Owns the threads of the process and what the parent is told."""

    def __init__(self, parent: Parent, order: Order) -> None:
        self.parent, self.order = parent, order
        self.transport: Transport | None = None
        self.loop: StepLoop | None = None
        self.status: dict[str, Any] = {"state": "joining"}
        # Beside the steps, so that no stream has to wait for a file.
        self.reader = ThreadPoolExecutor(1, "adapters")

    def run(self) -> None:
        threading.Thread(target=self._run_engine, name="mlx", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        while (message := self.parent.receive()) is not None:
            kind, body = message
            if kind == wire.Kind.STEP:
                self._running_loop().outbox.put(wire.decode_step(body))
            else:
                self._obey(wire.parse_json(body))
        # The parent was killed: else it would have ended this process first.
        shutil.rmtree(self.order.copies, ignore_errors=True)

    def _obey(self, message: dict[str, Any]) -> None:
        if message["type"] == "admit":
            sampling = Sampling.from_json(message["sampling"])
            self._running_loop().chooser.admit(
                message["sequence"], sampling, message["num_prompt"], message["tokens"]
            )
        elif message["type"] == "load_adapter":
            self.reader.submit(self._read_adapter, message, self._running_loop().adapters)
        else:
            raise EngineError(f"The parent sent a message of unknown type {message['type']!r}.")

    def _read_adapter(self, message: dict[str, Any], adapters: Adapters) -> None:
        """No step has seen anything of it, so what goes wrong is this adapter's alone."""
        try:
            answer = adapters.answer(message)
        except Exception as error:  # Nobody looks at what this thread raises.
            _logger.exception("event=adapter_failed version=%d", message["version"])
            told = {"message": f"reading failed ({type(error).__name__})", "status": 500}
            answer = {"version": message["version"], "error": told}
        answer |= {"type": "adapter", "rank": self.order.rank}
        try:
            self.parent.send(wire.json_frame(answer))
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
                for scores in result.scores:
                    self.parent.send(wire.scores_frame(scores))
                self.parent.send(wire.frame(wire.Kind.RESULT, wire.encode_result(result)))
            raise ClusterError(f"{self.order.name}: its right neighbour is gone.")
        except Exception as error:  # The top of the thread: the process ends with it.
            fail(self.parent, error, self.order.name)

    def _start(self) -> StepLoop:
        order = self.order
        self.transport = self._join()
        self.status = {"state": "loading"}
        model = self._model()
        folder = model if isinstance(model, Path) else model.folder
        loaded = load_stage(model, *order.layers, progress=self._loading)
        places = folder, order.cache_dir, order.copies
        self.loop = StepLoop(loaded.stage, self.transport, order.kv_bits, *places)
        self.status = {
            "state": "ready",
            "bytes_owned": loaded.bytes_owned,
            "bytes_read": loaded.bytes_read,
            "bytes_fetched": loaded.bytes_fetched,
            "free_bytes": free_bytes() // order.hosts.count(order.hosts[order.rank]),
            "reuse": self.loop.caches.reuse,
        }
        if loaded.stage.is_last:
            logits = loaded.stage.logits()
            self.status["logits_bytes_per_token"] = logits.nbytes // logits[..., 0].size
            self.status["scoring_bytes"] = scoring_bytes(logits.shape)
        return self.loop

    def _model(self) -> Path | PartialModel:
        order = self.order
        if order.commit is None:
            return order.model
        return open_partial(str(order.model), order.commit, order.cache_dir)

    def _join(self) -> Transport:
        if len(self.order.hosts) == 1:
            return LocalTransport()
        order = self.order
        # MLX holds the interpreter's lock while it waits for neighbours, so no thread here would
        # see that the parent was killed. This one needs no lock, and ends the process.
        faulthandler.dump_traceback_later(order.join_timeout + _PARENT_FIRST_SECONDS, exit=True)
        try:
            with among(order.ring, order.addresses, order.copies):
                return RingTransport(Ring(order.rank, order.hosts, order.nonce, order.join_timeout))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _loading(self, state: str, done: int, total: int) -> None:
        self.status = {"state": state, "done": done, "total": total}

    # --- what the parent is told

    def _watch(self) -> None:
        """Reports, whatever the other threads do: rank 0 tells from it who is behind."""
        try:
            while True:
                self._report()
                time.sleep(_STATUS_SECONDS)
        except Exception as error:  # The top of the thread: the process ends with it.
            fail(self.parent, error, self.order.name)

    def _report(self) -> None:
        status = {"type": "status", "rank": self.order.rank, **self.status}
        if loop := self.loop:
            spans = [loop.spans.popleft() for _ in range(len(loop.spans))]
            status |= {
                "busy_seconds": loop.busy_seconds,
                "num_steps": loop.num_steps,
                "adapter_bytes": loop.adapters.num_bytes,
                "num_hops": loop.transport.num_hops,
                "hop_seconds": loop.transport.hop_seconds,
                "waits_on": loop.transport.waits_on,
                "step": loop.step,
                "spans": spans,
            }
            if spans:  # Else it is what it was, and there may be many caches to look at.
                status["kv_bytes"] = loop.caches.num_bytes
        self.parent.send(wire.json_frame(status))


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
    """What to load, or None if the parent goes first. Rank 0's asks for a plan before."""
    while (message := parent.receive()) is not None:
        fields = wire.parse_json(message[1])
        if fields["type"] == "order":
            return Order.from_json(fields)
        del fields["type"]
        folder = Path(fields.pop("model"))
        plan = make_plan(folder, PlanRequest(**fields))
        stages = [stage.to_json() for stage in plan.stages]
        parent.send(wire.json_frame({"type": "plan", "stages": stages}))
    return None


def fail(parent: Parent, error: BaseException, name: str = "The engine") -> NoReturn:
    """Says why and ends the process without waiting for any thread."""
    if isinstance(error, BrigadeError):
        exit_code, message = error.exit_code, str(error)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
        exit_code = EngineError.exit_code
        message = f"{name}: {type(error).__name__}: {error}"
    try:
        report = {"type": "error", "exit_code": exit_code, "message": message}
        parent.send(wire.json_frame(report))
    except OSError:
        exit_code = ClusterError.exit_code  # The parent is gone: nobody is left to tell.
    os._exit(exit_code)


if __name__ == "__main__":
    main(sys.argv)
