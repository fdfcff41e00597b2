"""Sums over updates: those since the last report, and those of a whole run."""

import math

from serve.tune.events import Reported
from serve.tune.forecast import OpRecord, OpSeconds
from serve.tune.loop import UpdateMetrics

_MAX_SKIPPED = 10  # the most updates in a row that are not finite


class Window:
    """The sums over the updates since the last report, and those over the whole run."""

    def __init__(self, num_ranks: int, *, is_float16: bool = False) -> None:
        self._is_float16 = is_float16
        self.peak_bytes = [0] * num_ranks
        self.ops = OpSeconds()
        self.last_records: list[OpRecord] = []
        self._busy = 0.0
        self._seconds = 0.0
        self._skipped_in_row = 0
        self._num_applied = 0
        self._has_finite_loss = True
        self.updates: list[UpdateMetrics] = []
        self._since_report = 0.0

    @property
    def utilisation(self) -> float:
        return self._busy / (len(self.peak_bytes) * self._seconds)

    def add(self, update: UpdateMetrics, seconds: float) -> None:
        """Adds an update. `seconds` includes the time to make its batches."""
        self.updates.append(update)
        self._since_report += seconds
        self.last_records = update.records
        self._busy += sum(update.busy_seconds)
        self._seconds += update.seconds
        self.ops.add(update.records)
        peaks = zip(self.peak_bytes, update.peak_bytes, strict=True)
        self.peak_bytes = [max(pair) for pair in peaks]
        if update.is_skipped:
            self._skipped_in_row += 1
        else:
            self._skipped_in_row = 0
            self._num_applied += 1
        self._has_finite_loss = math.isfinite(update.loss)

    @property
    def has_failed(self) -> bool:
        """Whether too many updates in a row were skipped for training to recover."""
        return self._skipped_in_row >= _MAX_SKIPPED

    @property
    def failure(self) -> str:
        """A sentence that says which of the last updates were skipped, and the likely cause."""
        count = self._skipped_in_row
        if count == 1:
            skipped = "The last update was"
        else:
            skipped = f"{count} updates in a row were"
        what = "gradients" if self._has_finite_loss else "loss"
        if self._num_applied:
            cause = "training has diverged: begin again with a lower --learning-rate, or with "
            cause += "--max-grad-norm"
        else:
            cause = "this was the first update, so the learning rate is not the cause: check the "
            cause += "model, its data and --resume-adapter-file"
        if self._is_float16:
            cause += (
                ". Or the range of float16 is too small for this model: try bfloat16 or float32"
            )
        return f"{skipped} not finite (the {what}), and skipped: {cause}."

    def report(self, iteration: int, learning_rate: float, accumulated: int) -> Reported:
        """Returns the means since the last report, and begins a new window."""
        updates = self.updates
        seconds = self._since_report
        good = [update for update in updates if not update.is_skipped]
        num_labels = sum(update.num_labels for update in good)
        loss = sum(update.loss * update.num_labels for update in good)
        busy = sum(sum(update.busy_seconds) / update.seconds for update in updates)
        peaks_of_updates = [update.peak_bytes for update in updates]
        self.updates = []
        self._since_report = 0.0
        return Reported(
            iteration=iteration,
            loss=loss / num_labels if num_labels else float("nan"),
            learning_rate=learning_rate,
            gradient_norm=updates[-1].gradient_norm,
            tokens_per_second=sum(update.num_tokens for update in updates) / seconds,
            iterations_per_second=len(updates) * accumulated / seconds,
            utilisation=busy / (len(updates) * len(self.peak_bytes)),
            peak_bytes=[max(peaks) for peaks in zip(*peaks_of_updates, strict=True)],
            num_skipped=len(updates) - len(good),
        )
