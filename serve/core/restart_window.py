"""Counts restarts within a window of time. Pure: the caller passes the time."""

from collections import deque


class RestartWindow:
    """The times of the last restarts, of which max_restarts are allowed within window_seconds."""

    def __init__(self, max_restarts: int, window_seconds: float) -> None:
        self.max_restarts = max_restarts
        self.window_seconds = window_seconds
        self._times: deque[float] = deque()

    def __len__(self) -> int:
        """The number of restarts in the window, as of the last call."""
        return len(self._times)

    def add(self, now: float) -> None:
        self._expire(now)
        self._times.append(now)

    def forget(self, num_restarts: int) -> None:
        """Forgets the last num_restarts restarts; all of them if there were fewer."""
        for _ in range(min(num_restarts, len(self._times))):
            self._times.pop()

    def num_left(self, now: float) -> int:
        """Returns the number of restarts that are still allowed; negative if there were too
        many."""
        self._expire(now)
        return self.max_restarts - len(self._times)

    def _expire(self, now: float) -> None:
        while self._times and now - self._times[0] >= self.window_seconds:
            self._times.popleft()
