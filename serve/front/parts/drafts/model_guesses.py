"""Decides how many tokens the draft model guesses, by how often it was right and what it costs."""

from collections.abc import Callable
from collections.abc import Sequence as ReadableList
from typing import NamedTuple

from serve.core.types import Sequence

MAX_GUESSES = 8
_FIRST_SHARE = 0.7
_NEW_SHARE = 0.06  # the weight of the latest guess in a sequence's share of right guesses
_NEW_SHARE_OF_ALL = 0.01  # the latest guess's weight in the share of right guesses of all sequences
# While nothing is guessed, each token moves the share back towards its first value, so that the
# draft model gets another try after a few hundred tokens.
_DECAY = 0.002
_MIN_GAIN = 1.1  # With guesses, the next step cannot be sent before its tokens are known.
_READ_TOGETHER = 4  # The draft model reads up to this many new tokens in no extra time.
_NUM_TOKENS_READ = 256  # the most tokens that the draft model reads of a new text
_EXPECTED_TOKENS = 64  # Most answers end before their limit.
_MIN_RETURN = 2.0  # the least time saved, as a multiple of the time spent on reading a text


class ModelCosts(NamedTuple):
    """The time of the draft model for a guess, and for reading a token, as shares of the time of a
    one-token step."""

    guess: float
    reading: float


class ModelShare:
    """The draft model's share of right guesses. It begins at prior, the share of all sequences."""

    def __init__(self, prior: "ModelShare | None" = None) -> None:
        self._prior = prior
        self.value: float = prior.value if prior else _FIRST_SHARE

    def count(self, is_right: bool) -> None:
        new_share = _NEW_SHARE if self._prior else _NEW_SHARE_OF_ALL
        self.value += new_share * (is_right - self.value)
        if self._prior:
            self._prior.count(is_right)

    def decay(self, num_tokens: int) -> None:
        """Moves the share towards its first value, for tokens that had no guess."""
        self.value += _DECAY * num_tokens * (_FIRST_SHARE - self.value)


class ModelGuesses:
    def __init__(self, sequence: Sequence, share_of_all: ModelShare) -> None:
        self._share = ModelShare(share_of_all)
        self._num_known = len(sequence.output)
        self._num_read = 0  # tokens of the text that the draft model has read

    def reset(self) -> None:
        """Called when rank 0's engine has dropped the text."""
        self._num_read = 0

    def learn(self, sequence: Sequence, guesses: ReadableList[int]) -> None:
        """Compares guesses with the new tokens, up to the first that is wrong."""
        new = sequence.output[self._num_known :]
        if guesses:
            self._num_read = len(sequence.prompt) + self._num_known
        else:
            self._share.decay(len(new))
        for guess, token in zip(guesses, new, strict=False):
            self._share.count(guess == token)
            if guess != token:
                break
        self._num_known = len(sequence.output)

    def gains(self, num_guesses: int) -> list[float]:
        """Returns the chance of each of num_guesses consecutive guesses to be accepted."""
        return [self._share.value**n for n in range(1, num_guesses + 1)]

    def reading_pays(self, sequence: Sequence, costs: ModelCosts, token_cost: float) -> bool:
        """Whether guesses may save more time than the draft model needs to read the text first.
        token_cost is the share of a step that verifying a guess takes."""
        num_new = min(_NUM_TOKENS_READ, sequence.num_tokens - self._num_read)
        if num_new <= _READ_TOGETHER:
            return True
        gains = [self.gains(MAX_GUESSES)]
        _, rate = best_number(gains, lambda n: 1 + (n - 1) * token_cost, costs.guess)
        num_left = min(_EXPECTED_TOKENS, sequence.num_left)
        saved = num_left * (1 - 1 / rate)
        return saved > _MIN_RETURN * num_new * costs.reading


def best_number(
    gains: ReadableList[ReadableList[float]],
    step_cost: Callable[[int], float],
    guess_cost: float = 0.0,
    min_gain: float = _MIN_GAIN,
) -> tuple[int, float]:
    """Returns the number of guesses per row that gives the most tokens per time, and the speed as a
    multiple of that without guesses. Returns (0, 1.0) if that multiple is not above min_gain. gains
    are the chances of each row's guesses. step_cost gives the relative time of a step by its number
    of tokens. guess_cost, to make one guess for all rows, is a share of a step without guesses."""
    num_rows = len(gains)
    tokens = float(num_rows)
    num_fed = num_rows
    best = 0, 1.0
    for number in range(1, max(map(len, gains), default=0) + 1):
        for chances in gains:
            if number <= len(chances):
                tokens += chances[number - 1]
                num_fed += 1
        seconds = step_cost(num_fed) / step_cost(num_rows) + number * guess_cost
        rate = tokens / seconds / num_rows
        if rate > max(min_gain, best[1]):
            best = number, rate
    return best
