"""Divides the head among the shards of the last stage: each computes the logits of its part of the
vocabulary, and all these parts are gathered.

Every shard holds the whole head, because rank 0 needs it for steps that are not shared, and the
embedding may be the same array. A shard's part is a view of the head, which takes no memory.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from serve.model.stage import Stage
from serve.model.trial import Layers, modules_outside

# The methods that compute logits, by type of module. In other types, an output may depend on
# several rows of the weights.
_METHODS: dict[type, str] = {
    nn.Linear: "__call__",
    nn.QuantizedLinear: "__call__",
    nn.Embedding: "as_linear",
    nn.QuantizedEmbedding: "as_linear",
}
_NUM_MEASUREMENTS = 8

Compute = Callable[[mx.array], mx.array]
"""Computes logits (..., vocabulary) from hidden states (..., D)."""
Gather = Callable[[mx.array], mx.array]
"""Returns the concatenation of the arrays (n, ...) of all shards."""


@dataclass(frozen=True, slots=True)
class HeadCall:
    """A call of the module that computes logits: its input, and its output, not yet evaluated."""

    module: nn.Module
    hidden: mx.array
    logits: mx.array

    @property
    def vocabulary_size(self) -> int:
        return self.logits.shape[-1]

    @property
    def logits_bytes(self) -> int:
        return self.vocabulary_size * self.logits.dtype.size


class SharedHead:
    """The head of a last stage. Inside `shared`, a shard computes its part of the logits, otherwise
    all logits. All shards evaluate the result of `pop_logits`, in the order of their sums. Rank 0
    shares only steps of at most max_tokens tokens: for more, gathering takes longer."""

    def __init__(
        self,
        example: HeadCall,
        shard: int,
        num_shards: int,
        gather: Gather,
    ) -> None:
        module = example.module
        hidden_size = example.hidden.shape[-1]
        self.max_tokens = 0
        self.vocabulary_size = example.vocabulary_size
        self.logits_bytes = example.logits_bytes
        self._example = mx.zeros((1, 1, hidden_size), example.hidden.dtype)
        self._num_shards = num_shards
        self._gather = gather
        self._part_size = _part_size(self.vocabulary_size, num_shards)
        start = shard * self._part_size
        end = min(start + self._part_size, self.vocabulary_size)
        self._part = _rows_of(module, start, end)
        self._method = _METHODS[type(module)]
        self._is_shared = False
        self._gathered: mx.array | None = None
        _intercept(module, self._logits)
        self._whole = module

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside a `with` block, calls compute the logits together with the other shards."""
        self._is_shared = True
        try:
            yield
        finally:
            self._is_shared = False

    def pop_logits(self) -> mx.array:
        """Returns and removes the gathered logits of the last shared call, not evaluated."""
        gathered, self._gathered = self._gathered, None
        assert gathered is not None, "pop_logits() follows a shared call"
        return gathered

    def saved_seconds(self) -> float:
        """Measures the time that a shard saves if it computes only its part of a token's logits."""
        compute_all = getattr(self._whole, self._method)
        compute_own = getattr(self._part, self._method)
        seconds_of_all = _seconds(compute_all, self._example)
        seconds_of_own = _seconds(compute_own, self._example)
        return max(0.0, seconds_of_all - seconds_of_own)

    def _logits(self, compute: Compute, hidden: mx.array) -> mx.array:
        if not self._is_shared:
            return compute(hidden)
        compute_own: Compute = getattr(self._part, self._method)
        own = compute_own(hidden)
        *shape, num_own = own.shape
        rows = own.reshape(-1, num_own)
        num_missing = self._part_size - num_own
        if num_missing:
            # The last shard's part is smaller, but all gathered arrays must have the same size.
            rows = mx.pad(rows, [(0, 0), (0, num_missing)])
        gathered = self._gather(rows)
        self._gathered = gathered
        parts = gathered.reshape(self._num_shards, *rows.shape)
        parts_of_rows = parts.swapaxes(0, 1)
        joined = parts_of_rows.reshape(*shape, -1)
        return joined[..., : self.vocabulary_size]


def share_head(
    stage: Stage,
    shard: int,
    num_shards: int,
    gather: Gather,
) -> SharedHead | None:
    """Prepares the head of a loaded last stage to be shared. Returns None, and changes nothing, if
    its rows are too few, or are not known to be independent."""
    example = find_head(stage.model, stage.layers, stage.logits)
    if example is None:
        return None
    vocabulary_size = example.vocabulary_size
    start_of_last = _part_size(vocabulary_size, num_shards) * (num_shards - 1)
    if start_of_last >= vocabulary_size:
        return None
    return SharedHead(example, shard, num_shards, gather)


def find_head(
    model: nn.Module,
    layers: Layers,
    run: Callable[[], mx.array],
) -> HeadCall | None:
    """Returns the call in which a lazy run computes its logits, or None if no module does."""
    candidates = [module for module in modules_outside(model, layers) if type(module) in _METHODS]
    with _recorded(candidates) as calls:
        logits = run()
    vocabulary_size = logits.shape[-1]
    found = [call for call in calls if call.vocabulary_size == vocabulary_size]
    if len(found) != 1:
        return None
    (call,) = found
    for value in call.module.values():
        if isinstance(value, mx.array) and value.shape[:1] != (vocabulary_size,):
            return None
    return call


@contextmanager
def _recorded(modules: Sequence[nn.Module]) -> Iterator[list[HeadCall]]:
    calls: list[HeadCall] = []

    def record(module: nn.Module, compute: Compute, hidden: mx.array) -> mx.array:
        outputs = compute(hidden)
        calls.append(HeadCall(module, hidden, outputs))
        return outputs

    types = [type(module) for module in modules]
    try:
        for module in modules:
            _intercept(module, functools.partial(record, module))
        yield calls
    finally:
        for module, original in zip(modules, types, strict=True):
            module.__class__ = original
            object.__delattr__(module, "_brigade_head")


def _part_size(vocabulary_size: int, num_shards: int) -> int:
    return -(-vocabulary_size // num_shards)


def _rows_of(module: nn.Module, start: int, end: int) -> nn.Module:
    """Makes a module of the same type with the rows [start, end) of its arrays, as views."""
    part = type(module).__new__(type(module))
    vars(part).update(vars(module))
    for key, value in module.items():
        if isinstance(value, mx.array):
            value = value[start:end]
        part[key] = value
    return part


def _intercept(module: nn.Module, function: Callable[[Compute, mx.array], mx.array]) -> None:
    """Makes this one module compute logits through a function, which gets the original method and
    the hidden states. The seams of adapters enclose the function."""
    module.__class__ = _intercepted(type(module))
    object.__setattr__(module, "_brigade_head", function)


@functools.cache
def _intercepted(original: type[nn.Module]) -> type[nn.Module]:
    """Makes the subclass that calls the function. It has the name of the original, which some code
    reads."""
    method = _METHODS[original]

    def call(self: Any, hidden: mx.array) -> mx.array:
        compute = functools.partial(getattr(original, method), self)
        logits: mx.array = self._brigade_head(compute, hidden)
        return logits

    return type(original.__name__, (original,), {method: call})


def _seconds(compute: Compute, hidden: mx.array) -> float:
    """Returns the shortest measured time of computing logits: other programs only add to it."""
    times: list[float] = []
    for _ in range(_NUM_MEASUREMENTS):
        started = time.perf_counter()
        logits = compute(hidden)
        first = logits[..., 0]
        first.item()
        seconds = time.perf_counter() - started
        times.append(seconds)
    return min(times)
