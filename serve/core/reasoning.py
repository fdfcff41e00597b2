"""Follows an answer into and out of the model's reasoning, token by token.

The state depends on the answer's tokens only, so rank 0's engine, the front end and a replay after
a fault agree about it.
"""

from collections.abc import Iterable

from serve.core.types import Reasoning


class ReasoningTracker:
    """Follows the reasoning of one answer from its tokens so far. num_tokens counts the tokens
    between marks of reasoning, in the whole answer."""

    def __init__(self, reasoning: Reasoning, output: Iterable[int] = ()) -> None:
        self._reasoning = reasoning
        self._is_open = reasoning.is_open
        self._last: tuple[int, ...] = ()  # the latest tokens, at most as many as the next mark has
        self.num_tokens = 0
        for token in output:
            self.note(token)

    def note(self, token: int) -> None:
        mark = self._reasoning.end if self._is_open else self._reasoning.start
        self._last = (*self._last, token)[-len(mark) :]
        self.num_tokens += self._is_open
        if self._last != mark:
            return
        if self._is_open:
            self.num_tokens -= len(mark)
        self._is_open = not self._is_open
        self._last = ()

    @property
    def forced_token(self) -> int | None:
        """The next token of the end mark, if the budget is used up. A mark that the model has
        begun to write is completed."""
        budget, end = self._reasoning.budget, self._reasoning.end
        if not self._is_open or budget is None or self.num_tokens < budget:
            return None
        lengths = range(min(len(self._last), len(end) - 1), 0, -1)
        num_written = next((n for n in lengths if self._last[-n:] == end[:n]), 0)
        return end[num_written]
