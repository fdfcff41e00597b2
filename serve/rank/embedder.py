"""Reduces the hidden states of prompts to embeddings. Only rank 0 uses it.

A prompt may come in several steps, so each keeps what it needs of the steps before: a sum, or one
hidden state. Everything is float32.
"""

import threading
from collections import Counter
from dataclasses import dataclass

import mlx.core as mx

from serve.core.outputs import Embedding
from serve.core.types import Pooling, Row, Step
from serve.rank.cache import ForwardPass


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


class Embedder:
    """Holds the state of each prompt to embed. Call pool and result from one thread; admit and
    forget may be called from any."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}
        self._num_begun: Counter[int] = Counter()
        self._done: list[int] = []  # sequences of the step under way
        self._lock = threading.Lock()

    def admit(self, sequence: int, pooling: Pooling, num_tokens: int) -> None:
        """Begins a prompt, perhaps before the drop of an earlier try of the same sequence."""
        with self._lock:
            self._pools[sequence] = _Pool(pooling, num_tokens)
            self._num_begun[sequence] += 1

    def forget(self, sequence: int) -> None:
        """Counts one try of a sequence as ended."""
        with self._lock:
            if sequence not in self._pools:
                return
            self._num_begun[sequence] -= 1
            if self._num_begun[sequence] <= 0:
                del self._num_begun[sequence], self._pools[sequence]

    def pool(
        self,
        step: Step,
        passes: list[ForwardPass],
        hidden: list[mx.array | None],
    ) -> list[mx.array]:
        """Returns the arrays to evaluate after a step, from the hidden states (B, L, D) of its
        passes: the embeddings of prompts that are whole with it, and the states of others."""
        self._done = []
        if not self._pools:
            return []
        embeddings: list[mx.array] = []
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
                    embeddings.append(pool.embedding())
                elif pool.state is not None:
                    states.append(pool.state)
        return embeddings + states

    def result(self, outputs: list[mx.array]) -> tuple[Embedding, ...]:
        """Returns the finished embeddings. outputs are the arrays from pool, evaluated."""
        done, self._done = self._done, []
        embeddings: list[Embedding] = []
        for sequence, numbers in zip(done, outputs, strict=False):
            is_finite = bool(mx.isfinite(numbers).all().item())
            embeddings.append(Embedding(sequence, bytes(numbers) if is_finite else None))
        return tuple(embeddings)
