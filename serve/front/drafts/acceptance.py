"""Estimates how likely the next guess is right, from guesses that came true or did not."""

_BOUNDS = (3, 6, 12, 24)  # Matches up to such lengths are counted together, and longer ones.
_PRIOR_SHARES = (0.45, 0.6, 0.75, 0.85, 0.9)
_PRIOR_WEIGHT = 4.0
_KEPT = 0.95  # of what was counted before, with each new count


class Acceptance:
    """The share of right guesses by the length of the match that they come from. prior is what
    holds until there are own counts."""

    def __init__(self, prior: "Acceptance | None" = None) -> None:
        self._prior = prior
        self._right = [0.0] * len(_PRIOR_SHARES)
        self._all = [0.0] * len(_PRIOR_SHARES)

    def note(self, match_length: int, is_right: bool) -> None:
        kind = _kind(match_length)
        self._right[kind] = _KEPT * self._right[kind] + is_right
        self._all[kind] = _KEPT * self._all[kind] + 1
        if self._prior:
            self._prior.note(match_length, is_right)

    def share(self, match_length: int) -> float:
        kind = _kind(match_length)
        prior = self._prior.share(match_length) if self._prior else _PRIOR_SHARES[kind]
        return (self._right[kind] + _PRIOR_WEIGHT * prior) / (self._all[kind] + _PRIOR_WEIGHT)

    def gains(self, match_length: int, num_drafts: int) -> list[float]:
        """The chance of each of so many drafts in a row to be accepted: all before it have to be
        right, which makes the match longer."""
        chances = []
        chance = 1.0
        for n in range(num_drafts):
            chance *= self.share(match_length + n)
            chances.append(chance)
        return chances


def _kind(match_length: int) -> int:
    for kind, bound in enumerate(_BOUNDS):
        if match_length <= bound:
            return kind
    return len(_BOUNDS)
