"""Embeddings as a part: rank 0 reduces the hidden states of prompts.

A prompt may come in several steps. Between them, only a running sum or one hidden state is kept.
Everything is float32.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from serve.core.messages import Embed, Message, Order, Result
from serve.core.outputs import Embedding
from serve.core.sections import HiddenSize
from serve.core.types import Pooling, Row, Step
from serve.model.stage import Stage
from serve.rank.cache import ForwardPass
from serve.rank.parts.interface import RankPart, Surroundings


@dataclass(slots=True)
class _Pool:
    """The pooling of a prompt of num_tokens tokens. state (D,) covers its first num_done."""

    pooling: Pooling
    num_tokens: int
    num_done: int = 0
    state: mx.array | None = None

    @property
    def is_done(self) -> bool:
        return self.num_done == self.num_tokens

    def add(self, row: Row, hidden: mx.array) -> bool:
        """Adds the hidden states (L, D) of a row, lazily. Returns False for a row of an earlier
        try: a prompt that returned to the queue begins again at its first token."""
        if row.position == 0:
            self.num_done, self.state = 0, None
        if row.position != self.num_done:
            return False
        hidden = hidden.astype(mx.float32)
        if self.pooling.kind == "last":
            self.state = hidden[-1]
        elif self.pooling.kind == "mean":
            total = hidden.sum(axis=0)
            self.state = total if self.state is None else self.state + total
        elif self.state is None:
            self.state = hidden[0]
        self.num_done += row.num_tokens
        return True

    def embedding(self) -> mx.array:
        """Returns the embedding of a whole prompt, lazily. A mean has the direction of its sum."""
        assert self.state is not None
        cut = self.state[: self.pooling.num_dimensions]
        return cut / mx.maximum(mx.linalg.norm(cut), 1e-12)


class EmbeddingsPart(RankPart):
    """Holds the state of each prompt to embed, from its message to its drop."""

    messages = (Embed,)

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._pools: dict[int, _Pool] = {}
        self._num_begun: Counter[int] = Counter()
        self._done: list[int] = []  # prompts that the step under way completes
        self._embeddings: list[mx.array] = []  # in the order of _done
        self._lock = threading.Lock()

    @classmethod
    def build(cls, surroundings: Surroundings) -> Self | None:
        return cls(surroundings.stage) if surroundings.has_head else None

    def obey(self, message: Message) -> None:
        """Begins a prompt, perhaps before the drop of an earlier try of the same sequence."""
        assert isinstance(message, Embed)
        with self._lock:
            self._pools[message.sequence] = _Pool(message.pooling, message.num_tokens)
            self._num_begun[message.sequence] += 1

    def dropped(self, sequence: int) -> None:
        """Counts one try of a sequence as ended."""
        with self._lock:
            if sequence not in self._pools:
                return
            self._num_begun[sequence] -= 1
            if self._num_begun[sequence] <= 0:
                del self._num_begun[sequence], self._pools[sequence]

    def after_rows(
        self,
        step: Step,
        passes: list[ForwardPass],
        hidden: list[mx.array | None],
    ) -> Sequence[mx.array]:
        """Returns the embeddings of prompts that this step completes, and the states of others."""
        if not self._pools:
            return ()
        states: list[mx.array] = []
        for each, output in zip(passes, hidden, strict=True):
            for i, n in enumerate(each.rows):
                if n is None or output is None:
                    continue
                row = step.rows[n]
                pool = self._pools.get(row.sequence)
                if pool is None or not pool.add(row, output[i, -row.num_tokens :]):
                    continue
                if pool.is_done:
                    self._done.append(row.sequence)
                    self._embeddings.append(pool.embedding())
                elif pool.state is not None:
                    states.append(pool.state)
        return self._embeddings + states

    def outputs(self, step: Step, result: Result) -> Sequence[Embedding]:
        """Returns the finished embeddings, whose arrays have been evaluated."""
        if not self._done:
            return ()
        embeddings: list[Embedding] = []
        for sequence, numbers in zip(self._done, self._embeddings, strict=True):
            is_finite = bool(mx.isfinite(numbers).all().item())
            embeddings.append(Embedding(sequence, bytes(numbers) if is_finite else None))
        self._done = []
        self._embeddings = []
        return embeddings

    def rejoin(self, order: Order) -> Sequence[mx.array]:
        with self._lock:
            self._pools.clear()
            self._num_begun.clear()
        self._done = []
        self._embeddings = []
        return ()

    def loaded(self) -> Sequence[HiddenSize]:
        """Runs the stage lazily, for the size of its hidden states."""
        self._stage.logits()
        hidden = self._stage.pop_hidden()
        return () if hidden is None else [HiddenSize(hidden.shape[-1])]
