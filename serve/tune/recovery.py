"""Lets a rank of a training run outlive the loss of other ranks: it closes its links, keeps the
inputs and weights that it has loaded, and joins again when all ranks are there."""

import gc
import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from serve.core.config import Cluster
from serve.core.errors import ClusterError
from serve.ring.regroup import forget_groups, objection
from serve.tune.config import FineTuneConfig
from serve.tune.inputs import Inputs
from serve.tune.mesh import Groups, StuckLimit, join
from serve.tune.session import Progress, Weights
from serve.tune.transport import ProcessLinks

_logger = logging.getLogger(__name__)
_MAX_LOSSES = 3  # without a new checkpoint in between
_RETRY_SECONDS = 1.0
# A rank that only computes for longer is also started again, which costs the time to load.
_STUCK_SECONDS = 15.0
_STUCK_SECONDS_UNLAUNCHED = 60.0  # where nobody starts it again
# Between two groups, the modules of shards have this in the place of MLX's group.
NO_GROUP = object()


@dataclass(slots=True)
class Kept:
    """Holds what a rank keeps when it loses others. Each field is None until it is loaded.
    num_returns is how often this rank was started before, in other processes."""

    num_returns: int = 0
    inputs: Inputs | None = None
    weights: Weights | None = None
    progress: Progress | None = None
    _num_losses: int = 0
    _saved_at_loss: int | None = None

    @property
    def is_rejoining(self) -> bool:
        return self.weights is not None

    @property
    def saved(self) -> int | None:
        """The number of batches of the last checkpoint, or None if there is none."""
        return self.progress.saved if self.progress else None

    def may_stay(self, config: FineTuneConfig) -> bool:
        """Whether this rank can join again after a loss, which this counts."""
        if self.saved != self._saved_at_loss:
            self._num_losses = 0
        self._saved_at_loss = self.saved
        self._num_losses += 1
        is_able = self.is_rejoining and objection() is None
        return is_able and config.return_timeout > 0 and self._num_losses <= _MAX_LOSSES

    def may_return(self, config: FineTuneConfig) -> bool:
        """Whether another process of this rank can join again after a loss, instead of this one.
        It is counted only if the process returns."""
        has_saved = self.progress is not None and self.progress.has_saved
        num_losses = self.num_returns + self._num_losses
        is_able = self.is_rejoining and config.return_timeout > 0
        return is_able and (has_saved or num_losses < _MAX_LOSSES)

    @property
    def advice(self) -> str:
        """A sentence that says how to continue the run after it has ended."""
        if self.progress is None:
            return "Start the run again, with --resume if it has a checkpoint."
        if self.saved is None:
            return "There is no checkpoint yet: start the run again."
        return f"Start the run again with --resume: it continues after batch {self.saved}."


def limit_of(cluster: Cluster, config: FineTuneConfig, kept: Kept) -> StuckLimit:
    """Returns the limit for sums with lost ranks. Only `brigade launch` starts ranks again."""
    if cluster.leash is None:
        return StuckLimit(_STUCK_SECONDS_UNLAUNCHED, lambda: False)
    return StuckLimit(_STUCK_SECONDS, partial(kept.may_return, config))


def leave(
    groups: Groups,
    config: FineTuneConfig,
    kept: Kept,
    limit: StuckLimit,
    reason: str,
) -> None:
    """Closes the links of a rank that stays, for the given reason. Raises ClusterError."""
    _logger.warning(
        "event=rank_lost timeout=%g reason=%s",
        config.return_timeout,
        json.dumps(reason),
    )
    if isinstance(groups.everybody, ProcessLinks):
        groups.everybody.leave(config.return_timeout)
    if groups.ring is not None and kept.weights is not None:
        # MLX frees a group without checking whether a stream still uses it.
        with limit.ending(), suppress(RuntimeError):
            mx.synchronize(mx.default_stream(mx.cpu))
        kept.weights.set_group(groups.ring, NO_GROUP)


def join_again(
    cluster: Cluster,
    config: FineTuneConfig,
    kept: Kept,
    limit: StuckLimit,
) -> Groups:
    """Waits until all ranks are there again, and returns the new links. Raises ClusterError if a
    rank is still missing after --return-timeout."""
    # Tracebacks of the loss have kept the arrays of the interrupted update alive.
    gc.collect()
    mx.clear_cache()
    layout = config.layout(cluster.num_ranks)
    deadline = time.monotonic() + config.return_timeout
    while True:
        forget_groups()
        seconds_left = max(0.0, deadline - time.monotonic())
        try:
            return join(cluster, layout, config.stall_timeout, limit, seconds_left)
        except ClusterError as error:
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"Not all ranks returned within --return-timeout {config.return_timeout:g} s: "
                    f"{error} {kept.advice}"
                ) from error
        time.sleep(_RETRY_SECONDS)
