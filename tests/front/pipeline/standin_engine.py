"""An engine child without MLX, which starts in no time: for lives that end by the hundred.

Speaks as serve.rank.worker does. What its model says at a position is tests' next_token. Run as
a program; argv[1] is the descriptor of the socket to the parent. BREAK_AT_ORDER makes a rank
end with an exit code when it gets its order, POISON is a token that ends rank 0's, READ_SECONDS
is how long it reads an adapter, MIN_RANKS are what the model needs, LEAVE_AFTER is a folder:
until a file there has its pid as its name, it computes and cannot leave its ring.
"""

import os
import socket
import sys
import threading
import time

from serve.core.messages import (
    Activity,
    AdapterRead,
    Admit,
    Fault,
    FromEngine,
    Leave,
    Left,
    LoadAdapter,
    Loaded,
    MakePlan,
    Order,
    Planned,
    Status,
    ToEngine,
)
from serve.core.plan import StagePlan, even_split
from serve.core.types import StageState, Step
from serve.core.wire import FrameReader, frame
from serve.rank.outbox import Outbox
from tests.front.pipeline.stage_model import StageModel, next_token, result_of

STATUS_SECONDS = 0.1
COMPUTING = Activity(0.0, 0, 0, 0.0, None, 1, None, [], 0.0)


class Standin:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        self.status: Status | None = None
        self.model = StageModel()
        self.outbox = Outbox(self.run)
        self.step_seconds = float(os.environ.get("STEP_SECONDS", "0.002"))
        self.todo: list[Step] = []

    def send(self, message: FromEngine) -> None:
        with self.lock:
            self.connection.sendall(frame(message))

    def report(self) -> None:
        while True:
            with self.lock:
                if self.status:
                    self.connection.sendall(frame(self.status))
            time.sleep(STATUS_SECONDS)

    def serve(self) -> None:
        threading.Thread(target=self.report, daemon=True).start()
        reader: FrameReader[ToEngine] = FrameReader(ToEngine)
        while data := self.connection.recv(1 << 16):
            for message in reader.feed(data):
                self.obey(message)

    def run(self, step: Step) -> None:
        self.todo.append(step)

    def work(self) -> None:
        while self.todo:
            step = self.todo.pop(0)
            time.sleep(self.step_seconds)
            if os.environ.get("POISON") in map(str, step.tokens):
                os.abort()
            self.model.run(step)
            result = result_of(step, next_token)
            if step.sample:
                self.outbox.sampled(step, result.tokens, result.num_accepted)
            self.send(result)

    def obey(self, message: ToEngine) -> None:
        match message:
            case Step():
                self.outbox.put(message)
                self.work()
            case MakePlan(_, request):
                self.plan(request.num_ranks)
            case Order():
                self.join(message)
            case LoadAdapter():
                self.load_adapter(message)
            case Leave(life):
                self.leave(life)
            case Admit():
                """Its model needs to know nothing of a sequence."""

    def plan(self, num_ranks: int) -> None:
        if num_ranks < int(os.environ.get("MIN_RANKS", "1")):
            self.send(Planned([], refusal="Too large."))
            return
        layers = even_split(12, num_ranks)
        stages = [StagePlan(n, layers[n], 0, 0, 10, 0, 0, 0.5, None, n) for n in range(num_ranks)]
        self.send(Planned(stages))

    def leave(self, life: int) -> None:
        self.outbox = Outbox(self.run)
        self.todo.clear()
        with self.lock:
            self.status = Status(StageState.READY, activity=COMPUTING)
        folder = os.environ.get("LEAVE_AFTER")
        while folder and not os.path.exists(os.path.join(folder, str(os.getpid()))):
            time.sleep(0.01)
        positions = {id: len(tokens) for id, tokens in self.model.held.items()}
        with self.lock:
            self.status = None
            self.connection.sendall(frame(Left(life, positions)))

    def join(self, order: Order) -> None:
        held = self.model.held
        kept = {id: held[id][:position] for id, position in order.positions.items()}
        self.model = StageModel(kept)
        rank, exit_code = map(int, os.environ.get("BREAK_AT_ORDER", "-1,0").split(","))
        if rank == order.rank:
            self.send(Fault(exit_code, f"Rank {rank} cannot."))
            os._exit(exit_code)
        loaded = Loaded(0, None, 0, free_bytes=1 << 30, reuse="any")
        self.status = Status(StageState.READY, loaded=loaded)

    def load_adapter(self, message: LoadAdapter) -> None:
        time.sleep(float(os.environ.get("READ_SECONDS", "0")))
        answer = AdapterRead(
            version=message.version,
            digest="d",
            checksum="c",
            targets=["a"],
            own=["a"],
            kinds=["q_proj"],
            lora_rank=8,
            scale=1.0,
            num_bytes=100,
        )
        self.send(answer)


if __name__ == "__main__":
    try:
        Standin(socket.socket(fileno=int(sys.argv[1]))).serve()
    except OSError:
        os._exit(6)  # the parent is gone
