"""Estimates from past steps how long a step takes, by the number of tokens that it feeds, or how
long a token takes, by the number of tokens before it."""

_DECAY = 0.97  # the factor by which each new step reduces the weight of earlier ones
_PRIOR_SHARE = 0.06  # the cost of one more token, as a share of a step, until it is measured
_PRIOR_WEIGHT = 4.0  # _PRIOR_SHARE counts like measured steps whose _variance is this number


class StepCost:
    """Fits seconds = a + b * tokens to recent steps. Old steps lose weight with each new one."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0  # the weighted mean of tokens
        self._seconds = 0.0
        self._variance = 0.0  # weighted sum of squared deviations from the mean
        self._covariance = 0.0

    def add_step(self, num_tokens: float, seconds: float) -> None:
        self._weight = _DECAY * self._weight + 1
        share = 1 / self._weight
        deviation = num_tokens - self._tokens
        self._variance = _DECAY * self._variance + (1 - share) * deviation * deviation
        product = deviation * (seconds - self._seconds)
        self._covariance = _DECAY * self._covariance + (1 - share) * product
        self._tokens += share * deviation
        self._seconds += share * (seconds - self._seconds)

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    @property
    def seconds_per_token(self) -> float:
        """The time in seconds that one more token takes."""
        prior = _PRIOR_SHARE * self._seconds
        slope = self._covariance + _PRIOR_WEIGHT * prior
        return max(0.0, slope / (self._variance + _PRIOR_WEIGHT))

    def seconds(self, num_tokens: float) -> float:
        """Returns the time of a step with num_tokens tokens, at least half of the mean."""
        estimate = self._seconds + (num_tokens - self._tokens) * self.seconds_per_token
        return max(0.5 * self._seconds, estimate)
