"""The guesses about one sequence: where they come from, and how often they came true."""

from serve.core.types import Sequence
from serve.front.drafts.acceptance import Acceptance
from serve.front.drafts.suffixes import Match, Suffixes

_MAX_INDEXED = 32_768  # tokens of a prompt, its last ones, and of a prediction
_MAX_AT_ONCE = 4_096  # that are added between two steps, so that no stream has to wait
_SEPARATOR = 0  # Drafts never go past the prediction's end, so that any token will do.
_FIRST_HIT_SHARE_AFTER_MATCH = 0.4
_FIRST_HIT_SHARE_AFTER_NONE = 0.15  # Short answers often repeat words of the prompt.
_NEW_SHARE = 0.08
_MATCH_OF_A_PREDICTION = 8


class Guesses:
    """Guesses the next tokens of a sequence from those so far and from the answer that its client
    predicts. All guesses are counted, whether or not they were fed as drafts."""

    def __init__(self, sequence: Sequence, acceptance: Acceptance) -> None:
        self._hit_share_after_match = _FIRST_HIT_SHARE_AFTER_MATCH
        self._hit_share_after_none = _FIRST_HIT_SHARE_AFTER_NONE
        self._had_match = False  # before the newest token
        self._acceptance = acceptance
        self._suffixes = Suffixes()
        prediction = sequence.prediction[:_MAX_INDEXED]
        self._num_predicted = len(prediction)
        self._to_learn = [*prediction, _SEPARATOR, *sequence.prompt[-_MAX_INDEXED:]]
        self._num_answered = 0  # tokens of the answer that are learned
        self._match: Match | None = None
        self._guess: int | None = None

    @property
    def drafter(self) -> str:
        """The name of what the current guess comes from, as metrics have it."""
        if self._match and self._match.place < self._num_predicted:
            return "prediction"
        return "suffixes"

    @property
    def hit_share(self) -> float:
        """The share of tokens after the next one that were guessed right, where there was a match
        as there is one here, or none."""
        return self._hit_share_after_match if self._match else self._hit_share_after_none

    def catch_up(self, sequence: Sequence) -> None:
        """Learns the tokens that have come, or a part of those of a long prompt."""
        if self._to_learn:
            for token in self._to_learn[:_MAX_AT_ONCE]:
                self._suffixes.add(token)
            del self._to_learn[:_MAX_AT_ONCE]
            if self._to_learn:
                return
            self._look(is_start=not sequence.output)
        for token in sequence.output[self._num_answered :]:
            self._note(token)
            self._suffixes.add(token)
            self._look()
            self._num_answered += 1

    def draft(self, max_tokens: int) -> list[int]:
        """The guesses of the next tokens; none without a match."""
        if self._match is None or self._match.place == self._num_predicted:
            return []
        if self._match.place < self._num_predicted:
            max_tokens = min(max_tokens, self._num_predicted - self._match.place)
        return self._suffixes.draft(self._match, max_tokens)

    def gains(self, num_drafts: int) -> list[float]:
        """The chance of each of so many drafts to be accepted."""
        assert self._match is not None
        return self._acceptance.gains(self._match.length, num_drafts)

    def _look(self, is_start: bool = False) -> None:
        """Finds what the next token may be. An answer is expected to begin as its prediction."""
        if is_start and self._num_predicted:
            self._match = Match(_MATCH_OF_A_PREDICTION, 0)
        else:
            self._match = self._suffixes.match()
        drafts = self.draft(1)
        self._guess = drafts[0] if drafts else None

    def _note(self, token: int) -> None:
        is_hit = token == self._guess
        if self._had_match:
            self._hit_share_after_match += _NEW_SHARE * (is_hit - self._hit_share_after_match)
        else:
            self._hit_share_after_none += _NEW_SHARE * (is_hit - self._hit_share_after_none)
        self._had_match = self._match is not None
        if self._match is not None and self._guess is not None:
            self._acceptance.note(self._match.length, is_hit)
