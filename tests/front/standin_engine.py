"""An engine child without MLX, which starts in no time: for lives that end by the hundred.

Speaks as serve.rank.worker does. What its model says at a position is tests' next_token. Run as
a program; argv[1] is the descriptor of the socket to the parent. BREAK_AT_ORDER makes a rank
end with an exit code when it gets its order, POISON is a token that ends rank 0's, READ_SECONDS
is how long it reads an adapter, LEAST_RANKS are what the model needs.
"""

import os
import socket
import sys
import threading
import time
from typing import Any

from serve.core import wire
from serve.core.errors import PlanError
from serve.core.plan import StagePlan, even_split
from serve.core.types import Step
from serve.rank.outbox import Outbox
from tests.front.simulation import StageModel, next_token

STATUS_SECONDS = 0.1


class Standin:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        self.status: dict[str, Any] = {}
        self.model = StageModel()
        self.outbox = Outbox(self.run)
        self.step_seconds = float(os.environ.get("STEP_SECONDS", "0.002"))
        self.todo: list[Step] = []

    def send(self, data: bytes) -> None:
        with self.lock:
            self.connection.sendall(data)

    def report(self) -> None:
        while True:
            if self.status:
                self.send(wire.json_frame({"type": "status", **self.status}))
            time.sleep(STATUS_SECONDS)

    def serve(self) -> None:
        threading.Thread(target=self.report, daemon=True).start()
        reader = wire.FrameReader()
        while data := self.connection.recv(1 << 16):
            for kind, body in reader.feed(data):
                if kind == wire.Kind.STEP:
                    self.outbox.put(wire.decode_step(body))
                    self.work()
                else:
                    self.obey(wire.parse_json(body))

    def run(self, step: Step) -> None:
        self.todo.append(step)

    def work(self) -> None:
        while self.todo:
            step = self.todo.pop(0)
            time.sleep(self.step_seconds)
            if os.environ.get("POISON") in map(str, step.tokens):
                os.abort()
            self.model.run(step)
            tokens: tuple[int, ...] = ()
            if step.sample:
                ends = [(row.sequence, row.position + row.num_tokens) for row in step.rows]
                tokens = tuple(next_token(*end) for end in ends)
                self.outbox.sampled(step, tokens)
            self.send(
                wire.frame(wire.Kind.RESULT, wire.encode_result(wire.Result(step.number, tokens)))
            )

    def obey(self, message: dict[str, Any]) -> None:
        if message["type"] == "plan":
            self.plan(message["num_ranks"])
        elif message["type"] == "order":
            self.join(message)
        elif message["type"] == "load_adapter":
            self.load_adapter(message)

    def plan(self, num_ranks: int) -> None:
        if num_ranks < int(os.environ.get("LEAST_RANKS", "1")):
            error = {"type": "error", "exit_code": PlanError.exit_code, "message": "Too large."}
            self.send(wire.json_frame(error))
            os._exit(PlanError.exit_code)
        layers = even_split(12, num_ranks)
        stages = [StagePlan(n, layers[n], 0, 0, 10, 0, 0, 0.5, None) for n in range(num_ranks)]
        plan = [stage.to_json() for stage in stages]
        self.send(wire.json_frame({"type": "plan", "stages": plan}))

    def join(self, order: dict[str, Any]) -> None:
        rank, exit_code = map(int, os.environ.get("BREAK_AT_ORDER", "-1,0").split(","))
        if rank == order["rank"]:
            error = {"type": "error", "exit_code": exit_code, "message": f"Rank {rank} cannot."}
            self.send(wire.json_frame(error))
            os._exit(exit_code)
        self.status = {
            "rank": order["rank"],
            "state": "ready",
            "reuse": "any",
            "free_bytes": 1 << 30,
            "nonce": order["nonce"],
        }

    def load_adapter(self, message: dict[str, Any]) -> None:
        time.sleep(float(os.environ.get("READ_SECONDS", "0")))
        answer = {
            "type": "adapter",
            "rank": self.status["rank"],
            "version": message["version"],
            "error": None,
            "digest": "d",
            "checksum": "c",
            "targets": ["a"],
            "own": ["a"],
            "kinds": ["q_proj"],
            "lora_rank": 8,
            "scale": 1.0,
            "num_bytes": 100,
        }
        self.send(wire.json_frame(answer))


if __name__ == "__main__":
    try:
        Standin(socket.socket(fileno=int(sys.argv[1]))).serve()
    except OSError:
        os._exit(6)  # the parent is gone
