"""Samples the next token of each row from logits. Only rank 0 samples.

Each draw has a key of its own, made of the sequence's seed and the position: the
same request gives the same tokens, whoever shares its batch.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import cast

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_p

from serve.core.reasoning import ReasoningTracker
from serve.core.types import OVERFLOWED_TOKEN, Sampling
from serve.rank.grammar import Constraint, Grammars

_GREEDY_BELOW = 1e-5  # as in vLLM: dividing by less overflows
# Above -inf, which is what is not allowed at all: if all that is allowed is banned, or
# unknown to the model, it comes all the same.
_BANNED = -1e30
_MIN_TOP_P = 1e-30  # 0 in float32 would leave no token


class Sampler:
    """Chooses the tokens of one sequence. tokens are those of its prompt and of its answer
    so far, which only some samplings read. grammars are needed by those that have one."""

    def __init__(
        self,
        sampling: Sampling,
        num_prompt: int = 0,
        tokens: Iterable[int] = (),
        grammars: Grammars | None = None,
    ) -> None:
        self.sampling = sampling
        self.num_prompt = num_prompt
        self.tokens = list(tokens)
        self._is_greedy = sampling.temperature <= _GREEDY_BELOW
        lists = (sampling.bias_ids, sampling.allowed_ids, sampling.bad_words)
        self._adjusts = sampling.has_penalties or any(lists)
        self._constraint: Constraint | None = None
        if sampling.grammar is not None:
            assert grammars is not None
            self._constraint = Constraint(grammars, sampling, self.tokens[num_prompt:])
        self._reasoning: ReasoningTracker | None = None
        if sampling.reasoning is not None and sampling.has_budget:
            self._reasoning = ReasoningTracker(sampling.reasoning, self.tokens[num_prompt:])
        self._counts: mx.array | None = None
        self._prompted: mx.array | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it takes the likeliest token next."""
        adjusts = self._adjusts or self.sampling.min_tokens or self._constraint
        return self._is_greedy and not adjusts and self._forced_token is None

    @property
    def _forced_token(self) -> int | None:
        return self._reasoning.forced_token if self._reasoning else None

    def num_allowed(self, drafts: tuple[int, ...]) -> int:
        """The number of drafts, from the first on, that the grammar does not forbid."""
        return self._constraint.num_allowed(drafts) if self._constraint else len(drafts)

    def choose(self, logits: mx.array, position: int) -> mx.array:
        """The token at a position, lazily, from logits (vocabulary,). A token that the budget of
        the reasoning forces comes whatever the other parameters say, and draws no random number."""
        if self._forced_token is not None:
            return mx.array(self._forced_token)
        num_generated = position - self.num_prompt
        if num_generated < self.sampling.min_tokens:
            ends = self.sampling.end_ids
        else:
            ends = ()
        if self._adjusts or ends:
            logits = self._adjusted(logits.astype(mx.float32), ends)
        if self._constraint:
            logits = self._constraint.apply(logits.astype(mx.float32))
        if self._is_greedy:
            return mx.argmax(logits)
        return _draw(logits, self.sampling, position)

    def note(self, token: int) -> None:
        """Notes the token that was chosen."""
        if self.sampling.reads_tokens:
            self.tokens.append(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._constraint:
            self._constraint.accept(token)
        if self._reasoning:
            self._reasoning.note(token)

    def _adjusted(self, logits: mx.array, ends: tuple[int, ...]) -> mx.array:
        """Adjusts the logits in vLLM's order: tokens that must not come, biases, penalties."""
        sampling = self.sampling
        banned = [*ends, *self._ends_of_bad_words()]
        if banned:
            logits[mx.array(banned)] = _BANNED
        if sampling.allowed_ids:
            allowed = self._allowed
            only = mx.full(logits.shape, -math.inf)
            only[allowed] = mx.maximum(logits[allowed], 2 * _BANNED)
            logits = only
        if sampling.bias_ids:
            logits = logits.at[mx.array(sampling.bias_ids)].add(mx.array(sampling.biases))
        if sampling.has_penalties:
            return self._penalised(logits)
        return logits

    @cached_property
    def _allowed(self) -> mx.array:
        """May be all of the vocabulary: made once, and not for each token."""
        return mx.array(self.sampling.allowed_ids)

    def _ends_of_bad_words(self) -> list[int]:
        """Last tokens of those words of which the answer ends with all before."""
        if self.sampling.bad_words:
            answer = self.tokens[self.num_prompt :]
        else:
            answer = []
        return [
            last
            for *start, last in self.sampling.bad_words
            if not start or answer[-len(start) :] == start
        ]

    def _penalised(self, logits: mx.array) -> mx.array:
        counts, prompted = self._history(logits.size)
        sampling = self.sampling
        came = counts > 0
        penalty = sampling.repetition_penalty
        if penalty != 1:
            weakened = mx.where(logits > 0, logits / penalty, logits * penalty)
            logits = mx.where(came | prompted, weakened, logits)
        return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * came

    def _history(self, size: int) -> tuple[mx.array, mx.array]:
        """How often each token of the vocabulary came in the answer, and which ones came in
        the prompt. Kept, because making them takes time with a long prompt."""
        if self._counts is None or self._prompted is None:
            prompt, answer = (
                mx.array(tokens, dtype=mx.uint32)
                for tokens in (self.tokens[: self.num_prompt], self.tokens[self.num_prompt :])
            )
            self._counts = mx.zeros(size).at[answer].add(1.0)
            self._prompted = mx.zeros(size).at[prompt].add(1.0) > 0
        return self._counts, self._prompted


def sample(logits: mx.array, samplers: Sequence[Sampler], positions: Sequence[int]) -> mx.array:
    """The next token ids (B,), lazily, from the logits (B, vocabulary) of the rows'
    last tokens. positions are those of the tokens to come. OVERFLOWED_TOKEN for a row that is
    not finite: a single -inf is fine, some models have logits for tokens that do not exist."""
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    is_finite = mx.isfinite(_largest(logits, tokens))
    for row, (sampler, position) in enumerate(zip(samplers, positions, strict=True)):
        if not sampler.is_plain:
            tokens[row] = sampler.choose(logits[row], position)
    return mx.where(is_finite, tokens, OVERFLOWED_TOKEN)


def _largest(logits: mx.array, likeliest: mx.array) -> mx.array:
    """(B,), NaN where a logit of the row is NaN."""
    if mx.default_device() == mx.Device(mx.gpu):
        # There argmax passes over a NaN, max does not and costs next to nothing.
        return logits.max(axis=-1)
    # On the CPU argmax finds the NaN, and max takes as long as argmax.
    return mx.take_along_axis(logits, likeliest[:, None], axis=-1)[:, 0]


def _draw(logits: mx.array, sampling: Sampling, position: int) -> mx.array:
    """Draws a token. Filters apply in vLLM's order: temperature, min_p, top_k, top_p.

    mlx_lm's apply_min_p and apply_top_k would be compiled again for each number.
    """
    scaled = logits.astype(mx.float32) / sampling.temperature
    if sampling.min_p > 0:
        threshold = scaled.max() + math.log(sampling.min_p)
        scaled = mx.where(scaled < threshold, -math.inf, scaled)
    if 0 < sampling.top_k < scaled.size:
        threshold = mx.topk(scaled, sampling.top_k).min()
        scaled = mx.where(scaled < threshold, -math.inf, scaled)
    if sampling.top_p < 1:
        # An array, because apply_top_p is compiled: a number would be compiled in, each anew.
        top_p = cast(float, mx.array(max(sampling.top_p, _MIN_TOP_P)))
        scaled = apply_top_p(scaled - mx.logsumexp(scaled), top_p)
    token = mx.random.categorical(scaled, key=_key(sampling.seed, position))
    return token.astype(mx.uint32)


def _key(seed: int, position: int) -> mx.array:
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return mx.array(struct.unpack("<2I", digest), dtype=mx.uint32)


def score(logits: mx.array, tokens: mx.array, num_top: int) -> list[mx.array]:
    """Lazily, from logits (n, vocabulary): the log-probabilities (n,) of tokens (n,), and ids
    and log-probabilities (n, num_top) of the likeliest tokens, best first. A log-probability is
    NaN where the logits are not finite; those of -inf are fine."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    total = mx.where(mx.isfinite(total), total, mx.nan)
    num_top = min(num_top, logits.shape[-1])
    top = mx.argmax(logits, axis=-1, keepdims=True)[:, :num_top]
    if num_top > 1:
        top = mx.argpartition(-logits, num_top - 1, axis=-1)[:, :num_top]
        top_logits = mx.take_along_axis(logits, top, axis=-1)
        best_first = mx.argsort(-top_logits, axis=-1)
        top = mx.take_along_axis(top, best_first, axis=-1)
    own = mx.take_along_axis(logits, tokens[:, None], axis=-1) - total
    top_logits = mx.take_along_axis(logits, top, axis=-1)
    return [own[:, 0], top, top_logits - total]
