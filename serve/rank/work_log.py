"""Counts the work of a stage in its ring, for the reports to its parent."""

import time
from collections import deque
from collections.abc import Iterable

from serve.core.messages import Span
from serve.core.types import FIRST_WARM_UP_STEP, Step

_NUM_SPANS = 4096


class WorkLog:
    """Work that a stage has done since it joined its ring, without warm-ups, whose times do not
    predict later steps. step is the number of the step that is being computed, or None. The methods
    are called in one thread, except take_spans; the counts may be read in any."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=_NUM_SPANS)
        self.clear()

    def clear(self) -> None:
        """Begins again, in another ring. Spans that nobody has taken stay."""
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.step: int | None = None
        self._started = 0.0

    @property
    def idle_seconds(self) -> float:
        """The time since the latest step began; 0 while a step is being computed."""
        return time.monotonic() - self._started if self.step is None else 0.0

    def begin(self, step: Step) -> None:
        self.step = step.number
        self._started = time.monotonic()

    def end(self, step: Step) -> float:
        """Ends the step. Returns the time at which it ended."""
        ended = time.monotonic()
        self.step = None
        if step.number < FIRST_WARM_UP_STEP:
            self.busy_seconds += ended - self._started
        return ended

    def end_rows(self, step: Step, sum_seconds: float | None) -> None:
        """Ends the rows of a step, whose sums between shards took sum_seconds, as in Span."""
        ended = self.end(step)
        if step.number >= FIRST_WARM_UP_STEP:
            return
        self.num_steps += 1
        span = Span(
            step.number,
            step.group,
            len(step.rows),
            len(step.tokens),
            self._started,
            ended,
            step.num_drafts,
            sum_seconds,
            context=0.0 if step.sample else _context(step),
        )
        self._spans.append(span)

    def add(self, spans: Iterable[Span]) -> None:
        """Adds runs of models other than the stage's."""
        for span in spans:
            self.busy_seconds += span.end - span.start
            self._spans.append(span)

    def take_spans(self) -> list[Span]:
        """Returns the spans since the last call."""
        return [self._spans.popleft() for _ in range(len(self._spans))]


def _context(step: Step) -> float:
    """Returns the number of tokens before a token of a step, on average."""
    sums = [row.num_tokens * (row.position + row.num_tokens / 2) for row in step.rows]
    return sum(sums) / max(1, len(step.tokens))
