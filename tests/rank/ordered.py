"""An engine that gets one order after the other."""

from typing import Any

import msgspec

from serve.core.messages import Loaded
from serve.model.stage import Stage
from serve.rank.worker import Worker

SIZES = {"hidden_size": 128, "intermediate_size": 512}


class Ordered:
    """A worker that gets one order after the other, without its threads."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def load(self, **changes: Any) -> Loaded:
        self.worker.order = msgspec.structs.replace(self.worker.order, **changes)
        self.worker._start()
        assert self.worker.status.loaded
        return self.worker.status.loaded

    @property
    def stage(self) -> Stage:
        assert self.worker.loop
        return self.worker.loop.stage
