"""Estimates how likely the next guess is right, from how many earlier guesses were right."""

# Guesses are counted by the length of the match that they come from: up to each of these lengths,
# and above the last one.
_LENGTHS = (3, 6, 12, 24)
_PRIOR_SHARES = (0.45, 0.6, 0.75, 0.85, 0.9)
_PRIOR_WEIGHT = 4.0
_KEPT = 0.95  # of the earlier counts, with each new guess


class Acceptance:
    """The share of right guesses by the length of the match that they come from. prior is another
    Acceptance, which decides until enough guesses are counted here. It gets the same counts."""

    def __init__(self, prior: "Acceptance | None" = None) -> None:
        self._prior = prior
        self._num_right = [0.0] * len(_PRIOR_SHARES)
        self._num_all = [0.0] * len(_PRIOR_SHARES)

    def note(self, match_length: int, is_right: bool) -> None:
        kind = _kind(match_length)
        self._num_right[kind] = _KEPT * self._num_right[kind] + is_right
        self._num_all[kind] = _KEPT * self._num_all[kind] + 1
        if self._prior:
            self._prior.note(match_length, is_right)

    def share(self, match_length: int) -> float:
        kind = _kind(match_length)
        prior = self._prior.share(match_length) if self._prior else _PRIOR_SHARES[kind]
        num_right = self._num_right[kind] + _PRIOR_WEIGHT * prior
        return num_right / (self._num_all[kind] + _PRIOR_WEIGHT)

    def gains(self, match_length: int, num_drafts: int) -> list[float]:
        """The chance of each of num_drafts consecutive drafts to be accepted. A draft is accepted
        only if all drafts before it are, and each accepted draft makes the match longer."""
        chances = []
        chance = 1.0
        for n in range(num_drafts):
            chance *= self.share(match_length + n)
            chances.append(chance)
        return chances


def _kind(match_length: int) -> int:
    for kind, length in enumerate(_LENGTHS):
        if match_length <= length:
            return kind
    return len(_LENGTHS)
