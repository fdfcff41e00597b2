"""An engine's end of the connection to its parent."""

import os
import socket
import sys
import threading
from collections import deque
from pathlib import Path
from typing import NoReturn

from serve.core.errors import BrigadeError, ClusterError, EngineError, PlanError
from serve.core.layouts import Speeds
from serve.core.messages import (
    Fault,
    FromEngine,
    MakePlan,
    Order,
    Planned,
    ToEngine,
)
from serve.core.mlx_errors import explained
from serve.core.wire import FrameReader, frame
from serve.model.layouts import compare, plan_with_fewer_shards
from serve.model.planning import make_plan
from serve.rank.speeds import fence_seconds, memory_speed


class Parent:
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
        """Returns the next message; None when the parent is gone."""
        while not self._ready:
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            self._ready.extend(self._reader.feed(data))
        return self._ready.popleft()


def wait_for_order(parent: Parent) -> Order | None:
    """Waits for the order, and makes plans until it comes. Returns None if the parent ends."""
    while message := parent.receive():
        match message:
            case Order():
                return message
            case MakePlan():
                parent.send(planned(message))
            case _:
                raise EngineError(f"The parent sent {type(message).__name__} before an order.")
    return None


def planned(message: MakePlan) -> Planned:
    """Makes the plan that a message asks for. Raises ModelError or UsageError."""
    try:
        return _plan(message)
    except PlanError as error:
        return Planned([], refusal=str(error))


def _plan(message: MakePlan) -> Planned:
    folder = Path(message.model)
    request = message.request
    choice = ""
    if message.link is not None:
        speeds = Speeds(memory_speed(), message.link, fence_seconds())
        compared = compare(folder, request, speeds)
        plan = compared.plan
        choice = compared.choice
    elif message.shard_counts:
        plan, choice = plan_with_fewer_shards(folder, request, message.shard_counts)
    else:
        plan = make_plan(folder, request)
    return Planned(plan.stages, choice, plan.warning)


def fail(parent: Parent, error: BaseException, name: str = "The engine") -> NoReturn:
    """Reports an error to the parent, and ends the process without waiting for any thread."""
    if not isinstance(error, BrigadeError):
        sys.excepthook(type(error), error, error.__traceback__)
        unknown = EngineError(f"{name}: {type(error).__name__}: {error}")
        error = explained(error, name) or unknown
    exit_code = error.exit_code
    try:
        parent.send(Fault(exit_code, str(error), error.code))
    except OSError:
        exit_code = ClusterError.exit_code  # The parent is gone.
    os._exit(exit_code)
