"""Estimates how likely the next guess is right, from how many earlier guesses were right."""

from bisect import bisect_left
from collections.abc import Iterable

# Guesses are counted in classes by the length of their match: one class up to each length in this
# list, and one above the last.
_LENGTHS = (3, 6, 12, 24)
_PRIOR_SHARES = (0.45, 0.6, 0.75, 0.85, 0.9)
_PRIOR_WEIGHT = 4.0
_DECAY = 0.95  # the factor by which each new guess reduces earlier counts
_FIRST_HIT_SHARES = (0.15, 0.4)  # Short answers often repeat words of the prompt.
_FIRST_GUESS_SHARES = (0.25, 0.6)
_NEW_SHARE = 0.08  # the weight of the latest token in a sequence's means
_NEW_SHARE_OF_ALL = 0.005  # the weight of the latest token in the means of all sequences


class Acceptance:
    """The share of right guesses, by the length of their match. prior, the Acceptance of more
    sequences, gets the same counts, and dominates until enough guesses are counted here."""

    def __init__(self, prior: "Acceptance | None" = None) -> None:
        self._prior = prior
        self._num_right = [0.0] * len(_PRIOR_SHARES)
        self._num_all = [0.0] * len(_PRIOR_SHARES)

    def count(self, match_length: int, is_right: bool) -> None:
        kind = bisect_left(_LENGTHS, match_length)
        self._num_right[kind] = _DECAY * self._num_right[kind] + is_right
        self._num_all[kind] = _DECAY * self._num_all[kind] + 1
        if self._prior:
            self._prior.count(match_length, is_right)

    def share(self, match_length: int) -> float:
        kind = bisect_left(_LENGTHS, match_length)
        prior = self._prior.share(match_length) if self._prior else _PRIOR_SHARES[kind]
        num_right = self._num_right[kind] + _PRIOR_WEIGHT * prior
        return num_right / (self._num_all[kind] + _PRIOR_WEIGHT)

    def gains(self, match_length: int, num_drafts: int) -> list[float]:
        """Returns, for each of num_drafts drafts in a row, the chance that it and all before it are
        right."""
        chances = []
        chance = 1.0
        for n in range(num_drafts):
            chance *= self.share(match_length + n)
            chances.append(chance)
        return chances


class HitShares:
    """Recent shares: tokens with a right guess, and tokens with any guess, each by whether the
    token before had a match. The shares start at the values of prior, which counts the same
    tokens."""

    def __init__(self, prior: "HitShares | None" = None) -> None:
        self._prior = prior
        self._hits: list[float] = list(prior._hits if prior else _FIRST_HIT_SHARES)
        self._guesses: list[float] = list(prior._guesses if prior else _FIRST_GUESS_SHARES)

    def count(self, had_match: bool, has_guess: bool, is_hit: bool) -> None:
        new_share = _NEW_SHARE if self._prior else _NEW_SHARE_OF_ALL
        self._hits[had_match] += new_share * (is_hit - self._hits[had_match])
        self._guesses[had_match] += new_share * (has_guess - self._guesses[had_match])
        if self._prior:
            self._prior.count(had_match, has_guess, is_hit)

    def gain(self, had_match: bool, token_cost: float) -> float:
        """Returns the expected tokens from a draft, minus its cost in tokens."""
        return self._hits[had_match] - token_cost * self._guesses[had_match]


def net_gain(gains: Iterable[float], token_cost: float) -> float:
    """Returns the expected tokens from drafts minus their cost, if only drafts that pay are fed.
    gains are the chances of the drafts; token_cost is the cost of one draft, in tokens."""
    return sum(max(0.0, chance - token_cost) for chance in gains)
