"""Whether engines may start anew after a fault, and when. Pure: the caller has the clock."""

from collections import deque

from serve.core.errors import BrigadeError, ClusterError, DisagreementError, EngineError

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 15.0


class Restarts:
    """At most so many within a window, and in a row without having worked. The first one is at
    once: waits are for engines that end again and again before they could work."""

    def __init__(self, most: int, window_seconds: float) -> None:
        self._most, self._window_seconds = most, window_seconds
        self._times: deque[float] = deque()
        self._num_vain = 0

    def wait_seconds(
        self, fault: BrigadeError, was_ready: bool, now: float, num_explained: int = 0
    ) -> float:
        """How long the next engines have to wait. was_ready says whether those with the fault
        could work. num_explained faults, this one included, were the doing of a request that is
        given up: they do not count. Raises the error for which the cluster has to end."""
        if not may_pass(fault):
            raise fault
        if num_explained:
            self._forget(num_explained - 1)
            self._num_vain = 0
            return 0.0
        if not self.num_left(now):
            raise _given_up(fault, len(self._times), f"in {self._window_seconds:g} s")
        # Such as a disk that hangs: each of these may take longer than the window.
        if not was_ready and self._num_vain >= self._most:
            raise _given_up(fault, self._num_vain, "without having worked")
        self._times.append(now)
        self._num_vain = 0 if was_ready else self._num_vain + 1
        if not self._num_vain:
            return 0.0
        return min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** (self._num_vain - 1))

    def _forget(self, num_faults: int) -> None:
        for _ in range(min(num_faults, len(self._times))):
            self._times.pop()

    def num_left(self, now: float) -> int:
        while self._times and self._times[0] <= now - self._window_seconds:
            self._times.popleft()
        return self._most - len(self._times)


def may_pass(fault: BrigadeError) -> bool:
    """Whether new engines may do better. A broken model, a split that does not fit or a wrong
    flag stay what they are."""
    is_of_engines = isinstance(fault, (ClusterError, EngineError))
    return is_of_engines and not isinstance(fault, DisagreementError)


def _given_up(fault: BrigadeError, num_restarts: int, when: str) -> BrigadeError:
    if not num_restarts:
        return fault
    return type(fault)(
        f"{fault} The engines started anew {num_restarts} times {when}: given up (--max-restarts)."
    )
