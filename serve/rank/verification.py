"""Decides which drafts of a step are right. Each position is sampled as it would be without drafts,
and a draft is right if it equals the token that is sampled there."""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import mlx.core as mx

from serve.core.types import FAILURES, OVERFLOWED_TOKEN, Step
from serve.rank.sampling import Sampler

Draw = Callable[[mx.array, list[Sampler], list[int]], mx.array]
"""Draws tokens (B,) from logits (B, vocabulary), each with its sampler and its position."""


class Verification:
    """The verification of one step, in which some rows have drafts. logits holds an array
    (num_tokens, vocabulary) for each row. If the sampling of a row depends on the tokens before it,
    `tokens` draws them one by one. All others are drawn at once, as part of `arrays`."""

    def __init__(
        self,
        step: Step,
        samplers: list[Sampler],
        logits: list[mx.array],
        draw: Draw,
    ) -> None:
        self._step = step
        self._drafts = [fed[1:] for fed in step.tokens_fed]
        self._samplers = samplers
        self.logits = logits
        self._draw = draw
        self._drawn: mx.array | None = None
        free = [n for n in range(len(step.rows)) if not self._is_sequential(n)]
        if free:
            self._drawn = self._draw_at_once(free)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that the caller has to evaluate before it calls `tokens`."""
        drawn = [] if self._drawn is None else [self._drawn]
        return [*drawn, *self.logits]

    def tokens(self) -> list[list[int]]:
        """Returns the tokens of each row: its right drafts, and then one more token or one of
        FAILURES. The row's sampler takes note of all these tokens. A row has no tokens if its
        numbers overflowed, perhaps because of its drafts."""
        drawn: list[int] = []
        if self._drawn is not None:
            drawn = self._drawn.tolist()  # type: ignore[assignment]
        tokens: list[list[int]] = []
        start = 0
        for n, row in enumerate(self._step.rows):
            if self._is_sequential(n):
                tokens.append(self._right_ones(n, self._one_by_one(n)))
                continue
            own = drawn[start : start + row.num_tokens]
            start += row.num_tokens
            tokens.append(self._right_ones(n, own))
        return tokens

    def _is_sequential(self, n: int) -> bool:
        return bool(self._drafts[n]) and self._samplers[n].sampling.reads_tokens

    def _draw_at_once(self, rows: list[int]) -> mx.array:
        samplers: list[Sampler] = []
        positions: list[int] = []
        for n in rows:
            row = self._step.rows[n]
            samplers += [self._samplers[n]] * row.num_tokens
            first = row.position + 1
            positions += range(first, first + row.num_tokens)
        return self._draw(mx.concatenate([self.logits[n] for n in rows]), samplers, positions)

    def _right_ones(self, n: int, drawn: Iterable[int]) -> list[int]:
        """Takes the tokens drawn for a row until one differs from the draft. A draft that overflows
        may spoil the logits of tokens before it, so an overflow counts only without drafts."""
        drafts = self._drafts[n]
        tokens: list[int] = []
        for token, draft in zip(drawn, [*drafts, None], strict=True):
            if token == OVERFLOWED_TOKEN and drafts:
                break
            tokens.append(token)
            if token not in FAILURES:
                self._samplers[n].note(token)
            if token != draft:
                break
        return tokens

    def _one_by_one(self, n: int) -> Iterator[int]:
        """Draws a row's tokens lazily, each once the sampler knows the one before."""
        row = self._step.rows[n]
        for i in range(row.num_tokens):
            logits = self.logits[n][i : i + 1]
            drawn = self._draw(logits, [self._samplers[n]], [row.position + 1 + i])
            (token,) = cast(list[int], drawn.tolist())
            yield token
