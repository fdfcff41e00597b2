"""The engine child of a rank: it receives steps, runs its stage, and sends the results. It uses MLX
and no HTTP.

The main thread talks to the parent, because a process whose main thread is inside MLX cannot
answer. One other thread runs MLX: it makes the streams, loads the stage and runs the step loop.
When the parent goes, this process ends at once. When a neighbour is lost, the rank leaves the ring,
keeps its layers, and waits until its parent sends an order for another ring, perhaps with other
layers, or kills it.
"""

from serve.model.models_only import import_models_only

if __name__ == "__main__":
    import_models_only()  # This must come before anything imports mlx-lm.

import faulthandler
import os
import shutil
import signal
import socket
import sys
import threading
import time
from queue import SimpleQueue

import mlx.core as mx
import msgspec

from serve.core.errors import ClusterError, EngineError
from serve.core.messages import (
    Admit,
    FromEngine,
    Leave,
    Left,
    Loaded,
    MakePlan,
    Order,
    RingLost,
    Status,
    ToEngine,
)
from serve.core.open_files import allow_files
from serve.core.types import StageState, Step
from serve.rank import memory
from serve.rank.joining import join
from serve.rank.loading import LoadedEngine, load, why_it_cannot_stay
from serve.rank.parent import Parent, fail, planned, wait_for_order
from serve.rank.step_loop import StepLoop
from serve.ring.peers import RingLostError
from serve.ring.transport import Streams, Transport

_STATUS_SECONDS = 0.25


class Worker:
    def __init__(self, parent: Parent, order: Order) -> None:
        self.parent = parent
        self.order = order
        self.transport: Transport | None = None
        self.loop: StepLoop | None = None  # set while the engine is READY in a ring
        self.status = Status(StageState.JOINING)
        self._engine: LoadedEngine | None = None
        self._orders: SimpleQueue[Order | MakePlan | None] = SimpleQueue()
        self._leaves: SimpleQueue[Leave | None] = SimpleQueue()
        self._is_leaving = False  # True from Leave to the next order: no step comes
        self._streams: Streams | None = None  # made by the thread that runs MLX
        self._reports = threading.Lock()
        self._mlx = threading.Thread(target=self._run_engine, name="mlx", daemon=True)
        self._is_ending = threading.Event()

    def run(self) -> None:
        """Obeys the parent until it closes the connection, or is gone."""
        self._mlx.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        if mx.metal.is_available():
            beat = (self._idle_seconds, self._is_ending)
            threading.Thread(target=memory.keep_wired, args=beat, name="beat", daemon=True).start()
        while (message := self.parent.receive()) is not None:
            self._obey(message)
        self._end()

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Step():
                self._take_step(message)
            case Admit():
                self._running_loop().chooser.admit(
                    message.sequence, message.sampling, message.num_prompt, message.tokens
                )
            case Leave():
                self._leave(message)
            case MakePlan() if self._is_leaving:
                self._orders.put(message)
            case Order() if self._is_leaving:
                self._is_leaving = False
                self._orders.put(message)
            case Order() | MakePlan():
                raise EngineError(f"The parent sent a second {type(message).__name__}.")
            case _:
                self._running_loop().parts.obey(message)

    def _take_step(self, step: Step) -> None:
        loop = self._running_loop()
        try:
            loop.put(step)
        except RingLostError:
            loop.transport.close()  # The other thread notices and reports the closed ring.

    def _leave(self, message: Leave) -> None:
        """Makes the other thread leave the ring, as soon as the step that it computes is done."""
        self._is_leaving = True
        self._leaves.put(message)
        if self.transport:
            self.transport.close()

    def _end(self) -> None:
        """Ends the work of this process, and gives its memory back. The other thread ends with its
        step, if it has one, unless it is stuck in a ring that it was asked to leave."""
        is_stuck = self._is_leaving and self.loop is not None
        self._is_ending.set()
        self._leaves.put(None)
        self._orders.put(None)
        if self.transport:
            self.transport.close()
        self._mlx.join(0.0 if is_stuck else memory.seconds_for_last_step())
        memory.give_back()
        try:
            self._report()
        except OSError:  # The parent was killed, so nobody else removes copies.
            shutil.rmtree(self.order.copies, ignore_errors=True)

    def _running_loop(self) -> StepLoop:
        if self.loop is None or self._is_leaving:
            raise EngineError("The parent sent a step before this rank was ready.")
        return self.loop

    def _run_engine(self) -> None:
        try:
            memory.limit_cache()
            self._streams = Streams()
            order: Order | None = self.order
            while order:
                self.order = order
                order = self._live()
        except Exception as error:  # The top of the thread: the process ends with it.
            if not self._is_ending.is_set():
                fail(self.parent, error, self.order.name)

    def _live(self) -> Order | None:
        """Runs steps in the ring of the order until that is lost. Returns the next order, or None
        if this process is to end."""
        loop = self._start()
        reason = self._run_steps(loop)
        if self._is_ending.is_set():
            return None
        if why_it_cannot_stay(self.order):
            raise ClusterError(reason)
        if not self._leave_ring(loop, reason):
            return None
        del loop  # The next order may name other layers, and then the loop's stage has to go.
        return self._next_order()

    def _run_steps(self, loop: StepLoop) -> str:
        """Runs steps until the ring is lost, and returns the reason."""
        order = self.order
        try:
            for result in loop.run():
                self.parent.send(result)
        except RingLostError as error:
            return f"{order.name}: {error}"
        right = order.ring[(order.rank + 1) % len(order.ring)]
        return f"{order.name}: its right neighbour is gone, rank {right}."

    def _leave_ring(self, loop: StepLoop, reason: str) -> bool:
        """Leaves a lost ring, and answers Leave. If this blocks, the parent ends this process.
        Returns False if the process is to end."""
        if self._leaves.empty():
            self.parent.send(RingLost(reason))
        loop.transport.leave()
        leave = self._leaves.get()
        if leave is None:
            return False
        loop.parts.wait()  # No answer of an earlier life may come after Left.
        with self._reports:
            self.status = Status(StageState.STARTING)
            self.loop = None
            self.parent.send(Left(leave.life, loop.caches.positions))
        return True

    def _start(self) -> StepLoop:
        """Joins the order's ring, and loads everything that is not loaded yet."""
        order = self.order
        transport = self.transport = join(order, self._streams)
        self.status = Status(StageState.LOADING)
        engine, self._engine = self._engine, None
        if engine is None:
            engine = load(order, transport, self._loading, self._send)
        elif order.loads_the_same(engine.order):
            engine.loop.rejoin(transport, order)
        else:
            leftovers = engine.take_apart(order)
            # Nothing may refer to the old stage while the other layers are read.
            engine = None
            engine = load(order, transport, self._loading, self._send, leftovers)
        memory.wire(order.num_ranks_here)
        self._engine = engine
        self._be_ready(engine.loop, engine.loaded)
        return engine.loop

    def _next_order(self) -> Order | None:
        """Waits for the order after Leave, while rank 0's engine makes plans. Returns None if this
        process is to end."""
        while isinstance(message := self._orders.get(), MakePlan):
            self.parent.send(planned(message))
        self.status = Status(StageState.JOINING)
        return message

    def _be_ready(self, loop: StepLoop, loaded: Loaded) -> None:
        loop.parts.announce()
        self.loop = loop
        self.status = Status(StageState.READY, loaded=loaded)

    def _loading(self, state: str, done: int, total: int) -> None:
        self.status = Status(StageState(state), done, total)

    # --- reports to the parent

    def _send(self, message: FromEngine) -> None:
        """Sends a message, from any thread. Ends the process if the parent is gone."""
        try:
            self.parent.send(message)
        except OSError as error:
            fail(self.parent, error, self.order.name)

    def _idle_seconds(self) -> float:
        return self.loop.work.idle_seconds if self.loop else 0.0

    def _watch(self) -> None:
        """Sends reports while the other threads are busy: they show rank 0 which rank is behind."""
        try:
            while True:
                self._report()
                time.sleep(_STATUS_SECONDS)
        except Exception as error:  # The top of the thread: the process ends with it.
            fail(self.parent, error, self.order.name)

    def _report(self) -> None:
        with self._reports:  # A report from before Left would be taken for a later one.
            activity = self.loop.activity() if self.loop else None
            self.parent.send(msgspec.structs.replace(self.status, activity=activity))


def main(argv: list[str]) -> None:
    """Runs an engine. argv[1] is the descriptor of the socket to the parent."""
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        # A terminal signals the whole group; the parent decides when this process ends.
        signal.signal(interrupt, signal.SIG_IGN)
    allow_files()
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
