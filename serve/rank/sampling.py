"""Samples the next token of each row from logits. Only rank 0 samples.

Each draw has its own key, made of the sequence's seed and the position, so a request gets the same
tokens in any batch.
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
from serve.rank.grammar import Constraint, GrammarCompiler
from serve.rank.speeds import on_gpu

_GREEDY_BELOW = 1e-5  # A lower temperature would overflow: as in vLLM, such sampling is greedy.
# The logit of a banned token. Tokens that are not allowed get -inf, so a banned token still comes
# if all allowed tokens are banned, or unknown to the model.
_BANNED = -1e30
_MIN_TOP_P = 1e-30  # With a top_p of 0 in float32, no token would be left.


class Sampler:
    """Chooses the tokens of one sequence. tokens contains its prompt and its answer so far, or
    nothing if the sampling does not read them. grammars is required if the sampling names a
    grammar."""

    def __init__(
        self,
        sampling: Sampling,
        num_prompt: int = 0,
        tokens: Iterable[int] = (),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.sampling = sampling
        self.num_prompt = num_prompt
        self.tokens = list(tokens)
        self._records = sampling.reads_tokens or bool(self.tokens)
        self._is_greedy = sampling.temperature <= _GREEDY_BELOW
        lists = (sampling.bias_ids, sampling.allowed_ids, sampling.bad_words)
        self._adjusts = sampling.has_penalties or any(lists)
        answer = self.tokens[num_prompt:]
        self._constraint: Constraint | None = None
        if sampling.grammar is not None:
            assert grammars is not None
            self._constraint = Constraint(grammars, sampling, answer)
        self._reasoning: ReasoningTracker | None = None
        if sampling.reasoning is not None and sampling.has_budget:
            self._reasoning = ReasoningTracker(sampling.reasoning, answer)
        self._counts: mx.array | None = None
        self._prompted: mx.array | None = None

    @property
    def reads_tokens(self) -> bool:
        """Whether the next token depends on the earlier ones, or a draft model reads them."""
        return self._records

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the one with the largest logit."""
        adjusts = self._adjusts or self.sampling.min_tokens or self._constraint
        return self._is_greedy and not adjusts and self._forced_token is None

    @property
    def _forced_token(self) -> int | None:
        if self._reasoning:
            return self._reasoning.forced_token
        return None

    def num_allowed(self, drafts: tuple[int, ...]) -> int:
        """Returns the number of drafts, from the first on, that the grammar does not forbid."""
        return self._constraint.num_allowed(drafts) if self._constraint else len(drafts)

    def choose(self, logits: mx.array, position: int) -> mx.array:
        """Returns the token at a position, lazily, from logits (vocabulary,). A token that the
        reasoning budget forces ignores all other parameters and draws no random number."""
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
        """Updates penalties, grammar and reasoning with the token that was chosen."""
        if self._records:
            self.tokens.append(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._constraint:
            self._constraint.accept(token)
        if self._reasoning:
            self._reasoning.note(token)

    def _adjusted(self, logits: mx.array, ends: tuple[int, ...]) -> mx.array:
        """Adjusts the logits in vLLM's order: banned tokens, biases, penalties."""
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
            ids = mx.array(sampling.bias_ids)
            biases = mx.array(sampling.biases)
            logits = logits.at[ids].add(biases)
        if sampling.has_penalties:
            return self._penalised(logits)
        return logits

    @cached_property
    def _allowed(self) -> mx.array:
        # Made only once, because the list may be the whole vocabulary.
        return mx.array(self.sampling.allowed_ids)

    def _ends_of_bad_words(self) -> list[int]:
        """Returns the last token of each bad word whose other tokens end the answer so far."""
        if not self.sampling.bad_words:
            return []
        answer = self.tokens[self.num_prompt :]
        ends = []
        for *start, last in self.sampling.bad_words:
            if not start or answer[-len(start) :] == start:
                ends.append(last)
        return ends

    def _penalised(self, logits: mx.array) -> mx.array:
        counts, is_in_prompt = self._history(logits.size)
        is_in_answer = counts > 0
        sampling = self.sampling
        penalty = sampling.repetition_penalty
        if penalty != 1:
            weakened = mx.where(logits > 0, logits / penalty, logits * penalty)
            logits = mx.where(is_in_answer | is_in_prompt, weakened, logits)
        frequency = sampling.frequency_penalty * counts
        presence = sampling.presence_penalty * is_in_answer
        return logits - frequency - presence

    def _history(self, size: int) -> tuple[mx.array, mx.array]:
        """Returns how often each token of the vocabulary is in the answer, and whether it is in
        the prompt. Both are kept, because making them takes time with a long prompt."""
        if self._counts is None or self._prompted is None:
            prompt = self.tokens[: self.num_prompt]
            answer = self.tokens[self.num_prompt :]
            self._counts = _counts(answer, size)
            self._prompted = _counts(prompt, size) > 0
        return self._counts, self._prompted


def _counts(tokens: list[int], size: int) -> mx.array:
    """Returns how often each token of a vocabulary of this size occurs: (size,)."""
    ids = mx.array(tokens, dtype=mx.uint32)
    return mx.zeros(size).at[ids].add(1.0)


def sample(
    logits: mx.array,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
) -> mx.array:
    """Returns the next token ids (B,), lazily, from logits (B, vocabulary). positions are where
    these tokens will be. A row gets OVERFLOWED_TOKEN if a logit is NaN or the largest is infinite;
    -inf is fine: some models give it to tokens that do not exist."""
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    largest = _largest(logits, tokens)
    is_finite = mx.isfinite(largest)
    rows = zip(samplers, positions, strict=True)
    for row, (sampler, position) in enumerate(rows):
        if not sampler.is_plain:
            tokens[row] = sampler.choose(logits[row], position)
    return mx.where(is_finite, tokens, OVERFLOWED_TOKEN)


def _largest(logits: mx.array, likeliest: mx.array) -> mx.array:
    """Returns the largest logit of each row (B,), or NaN if one of its logits is NaN."""
    if on_gpu():
        # On a GPU, argmax ignores a NaN. max does not, and costs next to nothing.
        return logits.max(axis=-1)
    # On a CPU, argmax finds the NaN, and max takes as long as argmax.
    largest = mx.take_along_axis(logits, likeliest[:, None], axis=-1)
    return largest[:, 0]


def _draw(logits: mx.array, sampling: Sampling, position: int) -> mx.array:
    """Draws a token after vLLM's filters in vLLM's order: temperature, min_p, top_k, top_p.
    mlx_lm's apply_min_p and apply_top_k would be compiled again for each value."""
    full = logits.astype(mx.float32)
    scaled = full / sampling.temperature
    if sampling.min_p > 0:
        largest = scaled.max()
        threshold = largest + math.log(sampling.min_p)
        scaled = mx.where(scaled < threshold, -math.inf, scaled)
    if 0 < sampling.top_k < scaled.size:
        kept = mx.topk(scaled, sampling.top_k)
        threshold = kept.min()
        scaled = mx.where(scaled < threshold, -math.inf, scaled)
    if sampling.top_p < 1:
        # An array, because apply_top_p would be compiled again for each plain number.
        share = max(sampling.top_p, _MIN_TOP_P)
        top_p = mx.array(share)
        log_probabilities = scaled - mx.logsumexp(scaled)
        scaled = apply_top_p(log_probabilities, cast(float, top_p))
    key = _key(sampling.seed, position)
    token = mx.random.categorical(scaled, key=key)
    return token.astype(mx.uint32)


def _key(seed: int, position: int) -> mx.array:
    text = f"{seed} {position}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    halves = struct.unpack("<2I", digest)
    return mx.array(halves, dtype=mx.uint32)


def score(logits: mx.array, tokens: mx.array, num_top: int) -> list[mx.array]:
    """Returns log-probabilities (n,) of tokens (n,), lazily, from logits (n, vocabulary), and ids
    and log-probabilities (n, num_top) of the likeliest; NaN for logits that are NaN or infinite."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    is_finite = mx.isfinite(total)
    total = mx.where(is_finite, total, mx.nan)
    vocabulary_size = logits.shape[-1]
    num_top = min(num_top, vocabulary_size)
    likeliest = mx.argmax(logits, axis=-1, keepdims=True)
    top = likeliest[:, :num_top]
    if num_top > 1:
        top = mx.argpartition(-logits, num_top - 1, axis=-1)[:, :num_top]
        top_logits = mx.take_along_axis(logits, top, axis=-1)
        best_first = mx.argsort(-top_logits, axis=-1)
        top = mx.take_along_axis(top, best_first, axis=-1)
    columns = tokens[:, None]
    own_logits = mx.take_along_axis(logits, columns, axis=-1)
    top_logits = mx.take_along_axis(logits, top, axis=-1)
    own = own_logits - total
    return [own[:, 0], top, top_logits - total]
