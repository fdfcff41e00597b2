"""Decides whether and when engines start again after a fault. Pure: the caller passes the time."""

from serve.core.errors import BrigadeError, ClusterError, DisagreementError, EngineError
from serve.core.restart_window import RestartWindow

_FIRST_WAIT_SECONDS = 0.5
_MAX_WAIT_SECONDS = 15.0
# How long to wait for a better reason for a fault, without and with clients that wait.
_REASON_SECONDS = 0.5
_HURRIED_REASON_SECONDS = 0.1
# The shortest work after which a restart does not count if every engine has outlived the fault.
_MIN_WORK_SECONDS = 10.0


class Restarts:
    """The restarts so far, of which max_restarts are allowed within a window, and also in a row if
    the engines never become ready in between. The first restart is immediate. Further restarts wait
    if the engines did not become ready."""

    def __init__(self, max_restarts: int, window_seconds: float) -> None:
        self._window = RestartWindow(max_restarts, window_seconds)
        self._num_not_ready = 0  # restarts in a row without ready engines in between
        self._ready_since = 0.0
        self._ready_seconds = 0.0  # work before the latest fault; 0 if it does not count

    def wait_seconds(
        self,
        fault: BrigadeError,
        was_ready: bool,
        now: float,
        num_explained: int = 0,
    ) -> float:
        """Returns the seconds that the next engines have to wait. was_ready says whether the
        engines with the fault had become ready. num_explained faults, including this one, were
        caused by a request that is given up, or by a rank without which the others go on, and do
        not count. Raises the error for which the cluster has to end."""
        if not may_pass(fault):
            raise fault
        self._ready_seconds = 0.0
        if num_explained:
            self._window.forget(num_explained - 1)
            self._num_not_ready = 0
            return 0.0
        if not self.num_left(now):
            raise _given_up(fault, len(self._window), f"in {self._window.window_seconds:g} s")
        # A start may take longer than the window, for example when a disk hangs.
        if not was_ready and self._num_not_ready >= self._window.max_restarts:
            raise _given_up(fault, self._num_not_ready, "without having worked")
        self._window.add(now)
        if was_ready:
            self._ready_seconds = now - self._ready_since
            self._num_not_ready = 0
            return 0.0
        self._num_not_ready += 1
        backoff = _FIRST_WAIT_SECONDS * 2.0 ** (self._num_not_ready - 1)
        return min(_MAX_WAIT_SECONDS, backoff)

    def on_ready(self, now: float, have_all_stayed: bool) -> None:
        """Begins to count the time in which the engines work. If all of them have outlived the
        latest fault, after they had worked for 10 s, then only a link broke, and the restart does
        not count: a bad cable would end a cluster that works well most of the time."""
        if have_all_stayed and self._ready_seconds >= _MIN_WORK_SECONDS:
            self._window.forget(1)
        self._ready_seconds = 0.0
        self._ready_since = now

    def num_left(self, now: float) -> int:
        return self._window.num_left(now)


def better_reason(known: BrigadeError | None, new: BrigadeError) -> BrigadeError:
    """Returns the fault that explains more, or that no restart can fix."""
    if known is None or not may_pass(new):
        return new
    only_says_gone = type(known) is ClusterError and type(new) is not ClusterError
    return new if only_says_gone else known


def reason_seconds(reason: BrigadeError | None, has_clients: bool) -> float:
    """Returns the time in seconds to wait for a better reason. The first report is often that a
    neighbour is gone, which explains little, so a short wait is worth it even if clients wait."""
    if not has_clients:
        return _REASON_SECONDS
    return _HURRIED_REASON_SECONDS if type(reason) is ClusterError else 0.0


def may_pass(fault: BrigadeError) -> bool:
    """Whether new engines may succeed: not with a broken model, a bad split or a wrong flag."""
    is_of_engines = isinstance(fault, (ClusterError, EngineError))
    return is_of_engines and not isinstance(fault, DisagreementError)


def _given_up(fault: BrigadeError, num_restarts: int, when: str) -> BrigadeError:
    if not num_restarts:
        return fault
    return type(fault)(f"{fault} The engines were restarted {num_restarts} times {when}: given up.")
