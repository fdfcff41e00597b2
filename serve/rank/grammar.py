"""Which tokens a sequence may go on with, by a grammar. Only rank 0 has logits.

A mask is computed in a thread as soon as its token is known, while other groups run:
llguidance gives Python's lock back meanwhile. The only module here that knows it.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from serve.core.errors import RequestError

_NUM_THREADS = 2


class Grammars:
    """folder has the model's tokenizer.json; num_logits is the width of its head."""

    def __init__(self, folder: Path, num_logits: int, eos_ids: Iterable[int]) -> None:
        self._file = folder / "tokenizer.json"
        self._num_logits, self._eos_ids = num_logits, sorted(eos_ids)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        eos_ids = [id for id in self._eos_ids if id < self._num_logits]
        return LLTokenizer(str(self._file), n_vocab=self._num_logits, eos_token=eos_ids or None)

    def begin(self, grammar: str, output: list[int]) -> "Constraint":
        """Of a sequence that has so much output already. May take a second: call it from
        a thread that nobody waits for."""
        return Constraint(LLMatcher(self._tokenizer, grammar, log_level=0), output, self._threads)


class Constraint:
    """A grammar and how far one sequence has come in it."""

    def __init__(self, matcher: LLMatcher, output: list[int], threads: ThreadPoolExecutor) -> None:
        self._matcher, self._threads = matcher, threads
        if output:
            matcher.consume_tokens(output)
        self._mask = self._next_mask()

    def allowed(self) -> mx.array:
        """Of each token (vocabulary,), whether it may come next. Raises RequestError when
        the grammar has become too complex to follow."""
        mask = self._mask.result()
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("<state>")[0]
            raise RequestError(f"The grammar of this request cannot be followed: {reason}")
        return mx.array(np.frombuffer(mask, np.uint8)) != 0

    def accept(self, token: int) -> None:
        """The token that was sampled; what comes after an end token is not looked at."""
        self._mask.result()  # The matcher must not change while it is computed.
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._mask = self._next_mask()

    def _next_mask(self) -> "Future[bytes]":
        return self._threads.submit(self._matcher.compute_logit_bias)
