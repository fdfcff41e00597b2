"""What updates add up to: those since the last report, and those of a whole run."""

from serve.core.errors import EngineError
from serve.tune.events import Reported
from serve.tune.forecast import OpRecord, OpSeconds
from serve.tune.loop import Update

_MOST_SKIPPED = 10  # updates in a row that may be not finite


class Window:
    def __init__(self, num_ranks: int) -> None:
        self.peak_bytes = [0] * num_ranks
        self.ops = OpSeconds()
        self.last_records: list[OpRecord] = []
        self._busy = self._seconds = 0.0
        self._skipped_in_row = 0
        self.updates: list[Update] = []
        self._since_report = 0.0

    @property
    def utilisation(self) -> float:
        return self._busy / (len(self.peak_bytes) * self._seconds)

    def add(self, update: Update, seconds: float) -> None:
        """seconds are all that it took, with making its batches."""
        self.updates.append(update)
        self._since_report += seconds
        self.last_records = update.records
        self._busy += sum(update.busy_seconds)
        self._seconds += update.seconds
        self.ops.add(update.records)
        peaks = zip(self.peak_bytes, update.peak_bytes, strict=True)
        self.peak_bytes = [max(pair) for pair in peaks]
        self._skipped_in_row = self._skipped_in_row + 1 if update.is_skipped else 0
        if self._skipped_in_row == _MOST_SKIPPED:
            raise EngineError(
                f"{_MOST_SKIPPED} updates in a row were not finite: lower --learning-rate, or "
                "set --max-grad-norm. The last checkpoint is whole."
            )

    def report(self, iteration: int, learning_rate: float, accumulated: int) -> Reported:
        """And begins a new window."""
        updates, seconds = self.updates, self._since_report
        good = [update for update in updates if not update.is_skipped]
        num_labels = sum(update.num_labels for update in good)
        loss = sum(update.loss * update.num_labels for update in good)
        busy = sum(sum(update.busy_seconds) / update.seconds for update in updates)
        reported = Reported(
            iteration=iteration,
            loss=loss / num_labels if num_labels else float("nan"),
            learning_rate=learning_rate,
            gradient_norm=updates[-1].gradient_norm,
            tokens_per_second=sum(update.num_tokens for update in updates) / seconds,
            iterations_per_second=len(updates) * accumulated / seconds,
            utilisation=busy / (len(updates) * len(self.peak_bytes)),
            peak_bytes=[max(peaks) for peaks in zip(*(u.peak_bytes for u in updates), strict=True)],
            num_skipped=len(updates) - len(good),
        )
        self.updates, self._since_report = [], 0.0
        return reported
