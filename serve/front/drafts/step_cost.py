"""Estimates what a decode step costs by the number of tokens that it feeds, from the steps that
have run."""

_KEPT = 0.97  # of what was seen before, with each new step
_PRIOR_SHARE = 0.06  # of a step's time that one more token takes, before anything is known
_PRIOR_WEIGHT = 4.0  # in squares of tokens


class StepCost:
    """Fits seconds = a + b * tokens to recent steps. Old ones are forgotten by and by."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0  # weighted means
        self._seconds = 0.0
        self._variance = 0.0  # weighted sums of squares and of products around the means
        self._covariance = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        self._weight = _KEPT * self._weight + 1
        share = 1 / self._weight
        off = num_tokens - self._tokens
        self._variance = _KEPT * self._variance + (1 - share) * off * off
        self._covariance = _KEPT * self._covariance + (1 - share) * off * (seconds - self._seconds)
        self._tokens += share * off
        self._seconds += share * (seconds - self._seconds)

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    @property
    def seconds_per_token(self) -> float:
        """The time that one more token takes."""
        prior = _PRIOR_SHARE * self._seconds
        slope = self._covariance + _PRIOR_WEIGHT * prior
        return max(0.0, slope / (self._variance + _PRIOR_WEIGHT))

    def seconds(self, num_tokens: int) -> float:
        """The time of a step with so many tokens; never less than half of the mean."""
        estimate = self._seconds + (num_tokens - self._tokens) * self.seconds_per_token
        return max(0.5 * self._seconds, estimate)
