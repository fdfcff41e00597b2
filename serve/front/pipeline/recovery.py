"""What follows a fault: its reason, whether there is another life, and the engines that stay. Pure.

The first report of a fault is often that a neighbour is gone, which explains little. So the life
cycle waits for a better reason, and meanwhile finds out which parents answer, and whether a request
is to blame.
"""

from dataclasses import dataclass, field

from serve.core.config import ServeConfig
from serve.core.errors import BrigadeError
from serve.core.mlx_errors import HELPED_BY_SMALLER_STEPS
from serve.parent.restarts import Restarts, better_reason, reason_seconds


@dataclass(frozen=True, slots=True)
class LastFault:
    """The reason of the latest fault, and the monotonic time when it was reported."""

    reason: str
    time: float


@dataclass(frozen=True, slots=True)
class Interruption:
    """The requests that a fault has stopped. If one was given up, it has caused num_explained
    faults, including this one; otherwise num_explained is 0. can_halve_chunks says that a prefill
    step was under way that can be divided into smaller ones."""

    num_explained: int
    can_halve_chunks: bool = False


@dataclass(slots=True)
class Judgement:
    """Facts that have to be known before a fault is judged. After a stall, `stuck` holds the ranks
    whose engines are stuck; after other faults it is None. interruption is None until the requests
    wait. let_go are ranks whose connection ends even if they answer a probe, and have_spoken those
    whose engine has reported its end or the loss of its ring, or that are gone."""

    was_working: bool
    stuck: frozenset[int] | None = None
    interruption: Interruption | None = None
    is_probing: bool = False
    let_go: frozenset[int] = frozenset()
    have_spoken: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return self.interruption is not None and not self.is_probing


class Recovery:
    """The faults of a cluster. reason is the reason of a fault after which no new life has begun.
    seconds is the time of all recoveries so far."""

    def __init__(self, config: ServeConfig) -> None:
        self.reason: BrigadeError | None = None
        self.last_fault: LastFault | None = None
        self.seconds = 0.0
        self.judgement = Judgement(was_working=False)
        self.may_keep_engines = False  # whether the previous life's engines may stay
        self._stuck: frozenset[int] = frozenset()
        self._began_at: float | None = None
        self._restarts = Restarts(config.constants.max_restarts, config.constants.restart_window)

    def add(self, error: BrigadeError, now: float) -> None:
        """Takes a possible reason of a fault."""
        reason = better_reason(self.reason, error)
        if reason is not self.reason:
            self.reason = reason
            self.last_fault = LastFault(str(error), now)

    def begin(self, was_working: bool, stuck: frozenset[int] | None, now: float) -> float:
        """Starts collecting reasons of a fault. Returns the seconds to wait for a better reason."""
        if self._began_at is None:
            self._began_at = now
        self.judgement = Judgement(was_working, stuck)
        has_clients = was_working and self.num_restarts_left(now) > 0
        return reason_seconds(self.reason, has_clients)

    def num_restarts_left(self, now: float) -> int:
        return self._restarts.num_left(now)

    def pause_seconds(self, is_rank_dispensable: bool, now: float) -> float:
        """Returns for how many seconds the next engines have to wait. is_rank_dispensable says that
        the other ranks can do without a lost rank. Raises the error for which the cluster has to
        end."""
        assert self.reason is not None
        interruption = self.judgement.interruption
        num_explained = interruption.num_explained if interruption else 0
        if is_rank_dispensable or self.may_halve_chunks:
            num_explained = max(1, num_explained)
        was_working = self.judgement.was_working
        return self._restarts.wait_seconds(self.reason, was_working, now, num_explained)

    @property
    def may_halve_chunks(self) -> bool:
        """Whether a GPU did not survive a prefill step, and may survive a smaller one."""
        interruption = self.judgement.interruption
        if interruption is None or self.reason is None:
            return False
        return interruption.can_halve_chunks and self.reason.code in HELPED_BY_SMALLER_STEPS

    def renew(self, num_shards: int) -> BrigadeError:
        """Begins the next life, and returns its reason. Engines that worked until the fault may
        stay. After a stall, stuck engines are replaced; if none is stuck, the cause is unknown and
        all are. Layers of shards use MLX's group, so their engines are replaced, too."""
        judgement, reason = self.judgement, self.reason
        assert reason is not None
        is_explained = judgement.stuck is None or bool(judgement.stuck)
        self.may_keep_engines = judgement.was_working and is_explained and num_shards == 1
        self._stuck = judgement.stuck or frozenset()
        self.judgement = Judgement(was_working=False)
        self.reason = None
        return reason

    def may_keep(self, rank: int) -> bool:
        """Whether the engine of a rank may stay for the life that begins."""
        return self.may_keep_engines and rank not in self._stuck

    def end(self, have_all_stayed: bool, now: float) -> float | None:
        """Called when the engines work. Returns the seconds of the recovery; None if there was no
        fault. have_all_stayed says whether all engines have outlived the latest fault."""
        self._restarts.on_ready(now, have_all_stayed)
        if self._began_at is None:
            return None
        seconds = now - self._began_at
        self._began_at = None
        self.seconds += seconds
        return seconds
