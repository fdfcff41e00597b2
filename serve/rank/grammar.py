"""Computes which tokens a sequence may continue with under a grammar. Only rank 0 has logits.

A mask is computed in a thread as soon as its token is known, while other groups run: llguidance
releases the GIL meanwhile.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from serve.core.errors import RequestError
from serve.core.grammar_limits import FOLLOW_STACK_BYTES, PARSER_LIMITS
from serve.core.types import Sampling
from serve.hub.tiktoken_model import tokenizer_source

_NUM_THREADS = 2
_MAX_COMPILED = 16
# How much CPU time a grammar may take for each token, and how far the sum may exceed this. There
# are limits because all rows of a step wait for a late mask.
_SECONDS_PER_TOKEN = 0.02
_MAX_LATE_SECONDS = 2.0
_MAX_BYTES_OF_A_CHARACTER = 4

CONFLICT = "grammar_conflict"

_NO_FORCING = '%llguidance {"no_forcing": true}\n'

Mask = NDArray[np.bool_]


class GrammarCompiler:
    """Compiles grammars for the tokenizer in the model's folder, and keeps the latest ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        return _deep_threads()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return LLTokenizer(tokenizer_source(self._folder))

    def matcher(self, grammar: str) -> LLMatcher:
        """Returns a matcher at a grammar's beginning. Matchers of one grammar share slow parts."""
        return self._compiled(grammar).deep_copy()

    def _compile(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(**PARSER_LIMITS)
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)


def unforced(grammar: str) -> str:
    """Returns the grammar with an option that stops llguidance from tokenizing text that the
    grammar prescribes. It tokenizes such text like a prompt, so a special token's text becomes that
    token. But the grammar expects the text in ordinary tokens, and refuses the special one."""
    if not grammar.startswith("{"):
        return _NO_FORCING + grammar
    parts = json.loads(grammar)["grammars"]
    if len(parts) == 1:
        return _NO_FORCING + _lark_of(parts[0])
    # The first grammar refers to the others by their names.
    unforced_parts = [
        {"name": part.get("name"), "lark_grammar": _NO_FORCING + _lark_of(part)} for part in parts
    ]
    return json.dumps({"grammars": unforced_parts})


def _lark_of(part: dict[str, Any]) -> str:
    lark: str | None = part.get("lark_grammar")
    return lark if lark is not None else f"start: %json {json.dumps(part['json_schema'])}"


def _deep_threads() -> ThreadPoolExecutor:
    """Makes threads with more stack, on any system, than the check of grammars has."""
    threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")
    all_started = threading.Barrier(_NUM_THREADS + 1)
    before = threading.stack_size(FOLLOW_STACK_BYTES)
    try:
        for _ in range(_NUM_THREADS):
            threads.submit(all_started.wait)  # Each call blocks a thread.
        all_started.wait()
    finally:
        threading.stack_size(before)
    return threads


class Constraint:
    """The grammar of one sequence, and its state after the output so far. With sampling.free_until,
    the grammar begins after that token; before this token, the answer cannot end, and the token
    takes the place of an end. end_ids are allowed where the grammar is complete."""

    def __init__(self, grammars: GrammarCompiler, sampling: Sampling, output: list[int]) -> None:
        self._grammars = grammars
        self._sampling = sampling
        self._is_free = sampling.free_until is not None
        self._matcher: LLMatcher | None = None
        self._consumed: list[int] = []
        self._is_unforced = False
        self._late_seconds = 0.0
        self._mask = grammars.threads.submit(self._advance, output)

    def apply(self, logits: mx.array) -> mx.array:
        """Returns logits (vocabulary,) with -inf for tokens that are not allowed. Raises
        RequestError when the grammar has become too complex or too slow to follow."""
        mask = self._mask.result()
        if mask is None:
            return self._without_ends(logits)
        allowed = mx.array(mask[: logits.size])
        only = mx.full(logits.shape, -mx.inf)
        only[: allowed.size] = mx.where(allowed, logits[: allowed.size], -mx.inf)
        return only

    def _without_ends(self, logits: mx.array) -> mx.array:
        """Replaces the end of the answer by the token that ends the thoughts before the grammar."""
        mark = self._sampling.free_until
        ends = [id for id in self._sampling.end_ids if id < logits.size and id != mark]
        if ends:
            likeliest_end = logits[mx.array(ends)].max()
            logits[mark] = mx.maximum(logits[mark], likeliest_end)
            logits[mx.array(ends)] = -mx.inf
        return logits

    def num_allowed(self, tokens: tuple[int, ...]) -> int:
        """Returns how many of `tokens`, from the first on, may come next; an end token counts."""
        try:
            self._mask.result()  # A mask in progress uses the matcher.
        except RequestError:
            return len(tokens)  # The step reports the error.
        if self._is_free or self._matcher is None:
            return len(tokens)
        return self._grammars.threads.submit(self._validate, self._matcher, tokens).result()

    def _validate(self, matcher: LLMatcher, tokens: tuple[int, ...]) -> int:
        ends = self._sampling.end_ids
        num_before_end = next((n for n, t in enumerate(tokens) if t in ends), len(tokens))
        try:
            num_valid: int = matcher.validate_tokens(list(tokens[:num_before_end]))
        except Exception:
            raise
        except BaseException:  # Rust's panic. If the grammar is broken, its next mask says so.
            return len(tokens)
        return len(tokens) if num_valid == num_before_end else num_valid

    def accept(self, token: int) -> None:
        """Advances the grammar by the chosen token, and starts computing the next mask."""
        # The matcher must not change while it computes a mask. If the mask failed, the next `apply`
        # will fail too: a token that a reasoning budget forces was chosen without a mask.
        if self._mask.exception() is not None:
            return
        self._mask = self._grammars.threads.submit(self._advance, [token])

    def _advance(self, tokens: list[int]) -> Mask | None:
        """Returns the mask after tokens, or None while every token but an end is allowed."""
        try:
            return self._follow(tokens)
        except Exception:
            raise
        except BaseException as panic:  # Rust's panic, which no `except Exception` catches.
            raise RequestError(f"The grammar of this request cannot be followed: {panic}") from None

    def _follow(self, tokens: list[int]) -> Mask | None:
        _ = self._grammars.tokenizer  # Loading the tokenizer does not count as this request's time.
        began = time.thread_time()
        if self._matcher is None:
            assert self._sampling.grammar is not None
            self._matcher = self._grammars.matcher(self._sampling.grammar)
        for token in tokens:
            if self._is_free:
                self._is_free = token != self._sampling.free_until
            elif token not in self._sampling.end_ids:
                self._consume(self._matcher, token)
        if self._is_free:
            mask = None
        else:
            mask = self._look(self._matcher)
        seconds = time.thread_time() - began - _SECONDS_PER_TOKEN * len(tokens)
        self._late_seconds = max(0.0, self._late_seconds + seconds)
        if self._late_seconds > _MAX_LATE_SECONDS:
            raise RequestError(
                "The grammar of this request takes too long to follow.", code="grammar_too_slow"
            )
        return mask

    def _consume(self, matcher: LLMatcher, token: int) -> None:
        """Forgets the first bytes of a character that a budget has cut: no mark may follow them."""
        reasoning = self._sampling.reasoning
        if reasoning is not None and reasoning.budget is not None and token == reasoning.end[0]:
            for _ in range(_MAX_BYTES_OF_A_CHARACTER - 1):
                if matcher.validate_tokens([token]):
                    break
                matcher.rollback(1)
                del self._consumed[-1:]
        matcher.consume_token(token)
        self._consumed.append(token)

    def _look(self, matcher: LLMatcher) -> Mask:
        mask: Mask = np.frombuffer(matcher.compute_logit_bias(), np.uint8) != 0
        if not self._is_unforced and self._is_dead_end(matcher, mask):
            return self._look(self._without_forcing())
        if matcher.is_error():
            reason = matcher.get_error().partition("<state>")[0]
            raise RequestError(
                f"The grammar of this request cannot be followed: {reason}", code="grammar"
            )
        mask[self._grammars.tokenizer.eos_token] = False  # llguidance only guesses this end.
        ends = [id for id in self._sampling.end_ids if id < mask.size]
        # A stop token that the grammar allows may come before the grammar is complete, as in vLLM.
        mask[ends] |= matcher.is_accepting()
        self._check_some_are_left(mask)
        return mask

    def _is_dead_end(self, matcher: LLMatcher, mask: Mask) -> bool:
        """Whether the only token of the mask is one that the grammar refuses."""
        # Most masks allow thousands of tokens, and this runs in every step: count before listing.
        if np.count_nonzero(mask) != 1 or matcher.is_accepting():
            return False
        return matcher.validate_tokens(np.flatnonzero(mask).tolist()) == 0

    def _without_forcing(self) -> LLMatcher:
        """Returns a matcher at the same place that forces no text."""
        assert self._sampling.grammar is not None
        self._is_unforced = True
        self._matcher = self._grammars.matcher(unforced(self._sampling.grammar))
        for token in self._consumed:
            self._matcher.consume_token(token)
        return self._matcher

    def _check_some_are_left(self, mask: Mask) -> None:
        """Raises RequestError if the request bans every token that its grammar allows."""
        allowed = [id for id in self._sampling.allowed_ids if id < mask.size]
        if allowed and not mask[allowed].any():
            raise RequestError("The grammar allows none of allowed_token_ids.", code=CONFLICT)
