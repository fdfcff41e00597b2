"""The guesses about one sequence from its text: their sources, and how often they were right."""

from serve.core.types import Sequence
from serve.front.parts.drafts.acceptance import Acceptance, HitShares, net_gain
from serve.front.parts.drafts.draft import Draft, Drafter
from serve.front.parts.drafts.suffixes import Match, Suffixes

_MAX_INDEXED = 32_768  # how many tokens of a prediction, or last tokens of a prompt, are searched
# How many tokens are learned between two steps: few, so that streams do not wait. Comparing a token
# with its guess takes longer than adding it.
_MAX_ADDED_AT_ONCE = 4_096
_MAX_COMPARED_AT_ONCE = 64
_SEPARATOR = 0  # Drafts end where the prediction ends, so any token will do.
_PREDICTION_MATCH_LENGTH = 8


class TextGuesses:
    """Guesses the next tokens of a sequence from its tokens so far, and from the answer that its
    client predicts. Every guess is counted, whether or not it was fed as a draft."""

    def __init__(
        self,
        sequence: Sequence,
        prediction: tuple[int, ...],
        acceptance: Acceptance,
        hit_shares: HitShares,
    ) -> None:
        self._hit_shares = hit_shares
        self._had_match = False  # whether the token before the newest had a match
        self._acceptance = acceptance
        self._suffixes = Suffixes()
        predicted = prediction[:_MAX_INDEXED]
        self._num_predicted = len(predicted)
        self._to_add = [*predicted, _SEPARATOR, *sequence.prompt[-_MAX_INDEXED:]]
        self._num_learned = 0  # the tokens of the answer that were learned
        self._match: Match | None = None
        self._guess: int | None = None

    def waiting_gain(self, token_cost: float) -> float:
        """Returns the expected tokens from a draft of the token after next, minus its cost."""
        return self._hit_shares.gain(self._match is not None, token_cost)

    def next_gain(self, max_drafts: int, token_cost: float) -> float:
        """Returns the expected tokens from drafts after the next token, minus their cost."""
        if self._match is None:
            return max(0.0, self._hit_shares.gain(False, token_cost))
        length = self._match.length
        gains = self._acceptance.gains(length + 1, max_drafts)
        return self._acceptance.share(length) * net_gain(gains, token_cost)

    def catch_up(self, sequence: Sequence) -> bool:
        """Learns new tokens, a limited number at a time. Returns whether all are learned."""
        if self._to_add:
            for token in self._to_add[:_MAX_ADDED_AT_ONCE]:
                self._suffixes.add(token)
            del self._to_add[:_MAX_ADDED_AT_ONCE]
            if self._to_add:
                return False
            self._guess_next(is_start=not sequence.output)
        end = self._num_learned + _MAX_ADDED_AT_ONCE
        new = sequence.output[self._num_learned : end]
        self._learn(new)
        self._num_learned += len(new)
        return self._num_learned == len(sequence.output)

    def draft(self, max_tokens: int) -> Draft:
        """Returns the guesses of the next tokens; none without a match."""
        if self._match is None or self._match.place == self._num_predicted:
            return Draft()
        drafter: Drafter = "suffixes"
        if self._match.place < self._num_predicted:
            drafter = "prediction"
            max_tokens = min(max_tokens, self._num_predicted - self._match.place)
        return Draft(self._suffixes.draft(self._match, max_tokens), drafter)

    def gains(self, num_drafts: int) -> list[float]:
        """Returns the chance of each of num_drafts consecutive drafts to be accepted."""
        assert self._match is not None
        return self._acceptance.gains(self._match.length, num_drafts)

    def _learn(self, tokens: list[int]) -> None:
        num_added = max(0, len(tokens) - _MAX_COMPARED_AT_ONCE)
        for token in tokens[:num_added]:
            self._suffixes.add(token)
        if num_added:
            self._guess_next()
        for token in tokens[num_added:]:
            self._compare(token)
            self._suffixes.add(token)
            self._guess_next()

    def _guess_next(self, is_start: bool = False) -> None:
        """Guesses the next token. An answer is expected to begin like its prediction."""
        if is_start and self._num_predicted:
            self._match = Match(_PREDICTION_MATCH_LENGTH, 0)
        else:
            self._match = self._suffixes.match()
        tokens = self.draft(1).tokens
        self._guess = tokens[0] if tokens else None

    def _compare(self, token: int) -> None:
        is_hit = token == self._guess
        self._hit_shares.count(self._had_match, self._guess is not None, is_hit)
        self._had_match = self._match is not None
        if self._match is not None and self._guess is not None:
            self._acceptance.count(self._match.length, is_hit)
