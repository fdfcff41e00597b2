"""Runs a model with random numbers in place of the outputs of its matrices.

Such a run reads no weight and takes hardly any time, whatever the size of the model. It shows what
the code between two matrices does: a run of a shard must give each matrix the same inputs, or the
shard's part of them.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from serve.model import trace, trial
from serve.model.slices import Slices

LINEAR = (nn.Linear, nn.QuantizedLinear)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
_MATRICES = (*LINEAR, *EXPERTS, nn.Embedding, nn.QuantizedEmbedding)

_STEPS = (4, 1)  # the tokens of each step: a prompt, and the token after it
_NUM_ROWS = 2
_MAX_SIZE = 1 << 22  # Larger arrays outside of matrices stay NaN: nothing can be proved.
_TINY = 1e-20
TOLERANCE = 1e-4  # the largest difference, relative to the largest value

Value = TypeVar("Value")


class MismatchError(Exception):
    """The run of a shard computes a different result from the run of the whole model."""


FAILURES = (*trial.FAILURES, MismatchError)
"""Errors which show that a shard does not compute the same as the whole model."""


Numbers = dict[tuple[str, str], tuple[int, ...]]
"""The value of each attribute on each shard, by the names of the module and the attribute."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The differences of a shard from the whole model, by the names of modules: column_parallel
    matrices have only some outputs; row_parallel matrices have only some inputs, and their outputs
    are added up; arrays are divided along an axis, and numbers are attributes with new values."""

    column_parallel: dict[str, Slices] = field(default_factory=dict)
    row_parallel: dict[str, Slices] = field(default_factory=dict)
    arrays: dict[str, tuple[int, Slices]] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)

    def renamed(self, rename: Callable[[str], str]) -> "Roles":
        """Makes the same roles for modules with other names."""
        return Roles(
            column_parallel={rename(name): own for name, own in self.column_parallel.items()},
            row_parallel={rename(name): own for name, own in self.row_parallel.items()},
            arrays={rename(name): own for name, own in self.arrays.items()},
            numbers={(rename(name), key): own for (name, key), own in self.numbers.items()},
        )

    def add(self, other: "Roles") -> None:
        """Adds the roles of other modules."""
        self.column_parallel.update(other.column_parallel)
        self.row_parallel.update(other.row_parallel)
        self.arrays.update(other.arrays)
        self.numbers.update(other.numbers)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer. Caches among its arguments are replaced by their numbers."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True, slots=True)
class _CacheNumber:
    number: int


@dataclass(frozen=True, slots=True)
class MatrixCall:
    """One call of a matrix in the run of the whole model, with its inputs and random outputs."""

    name: str
    inputs: mx.array
    outputs: mx.array


class ModelProbe:
    """A run of a whole lazy model, in a `with` block. Weights are blank, smaller arrays random."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: trial.Layers = list(model.layers)
        self.matrices: dict[str, nn.Module] = {}
        self.calls: dict[str, list[MatrixCall]] = defaultdict(list)
        self.layer_calls: dict[int, list[LayerCall]] = defaultdict(list)
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.names: dict[int, str] = {}
        for name, module in self.modules.items():
            first_name = self.names.setdefault(id(module), name)
            if isinstance(module, _MATRICES) and "weight" in module:
                self.matrices[first_name] = module
        self._num_drawn = 0
        self._open = ExitStack()

    def __enter__(self) -> "ModelProbe":
        self._open.enter_context(mx.stream(mx.cpu))  # CPUs draw the same numbers on every machine
        self._open.enter_context(trace.uncompiled())
        self._open.enter_context(trial.without_weights(self.model))
        self._fill_small_arrays()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def prefix(self, i: int) -> str:
        """Returns the beginning of the names of the modules in layer i."""
        return f"{self.names[id(self.layers[i])]}."

    def random(self, shape: Sequence[int]) -> mx.array:
        """Returns random numbers, different in each call but the same on each rank."""
        self._num_drawn += 1
        return mx.random.normal(shape, key=mx.random.key(self._num_drawn))

    def positive(self, shape: Sequence[int]) -> mx.array:
        """Returns new random numbers between 0.5 and 1.5."""
        self._num_drawn += 1
        return mx.random.uniform(0.5, 1.5, shape, key=mx.random.key(self._num_drawn))

    def record(self) -> None:
        """Runs the whole model, and records calls of matrices and layers. Raises FAILURES."""

        def draw(name: str, call: trace.Call, args: Any, kwargs: Any) -> mx.array:
            lazy = call(*args, **kwargs)
            outputs = self.random(lazy.shape)
            inputs = _copies(args[0])
            mx.eval(inputs, outputs)
            matrix_call = MatrixCall(name, inputs, outputs)
            self.calls[name].append(matrix_call)
            return _copies(outputs)

        def record_layer(i: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
            saved = _copies(self._without_caches((args, kwargs)))
            output = call(*args, **kwargs)
            saved_output = _copies(output)
            arrays = trace.arrays_in((saved, saved_output))
            mx.eval(arrays)
            saved_args, saved_kwargs = saved
            layer_call = LayerCall(saved_args, saved_kwargs, saved_output)
            self.layer_calls[i].append(layer_call)
            return output

        self._caches = make_prompt_cache(self.model)
        with self._seams(draw), trace.seams(self.layers, record_layer):
            self._run_model(self._caches)

    def is_equal(self, roles: Roles, num_shards: int, layer: int | None = None) -> bool:
        """Whether all shards compute the same as the whole model, or as one layer of it."""
        try:
            for shard in range(num_shards):
                if layer is None:
                    self._check_model(roles, shard)
                else:
                    self._check_layer(layer, roles, shard)
        except FAILURES:
            return False
        return True

    def _check_layer(self, i: int, roles: Roles, shard: int) -> None:
        caches = make_prompt_cache(self.model)
        with self._as_shard(roles, shard, self.prefix(i)) as checks:
            for call in self.layer_calls[i]:
                output = self.call_layer(i, call, caches)
                checks.compare(output, call.output)
                checks.finish()

    def _check_model(self, roles: Roles, shard: int) -> None:
        caches = make_prompt_cache(self.model)
        numbers: dict[int, int] = defaultdict(int)

        def compare(i: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            number = numbers[i]
            numbers[i] += 1
            recorded = self.layer_calls[i][number]
            checks.compare(output, recorded.output)
            return output

        with self._as_shard(roles, shard) as checks, trace.seams(self.layers, compare):
            self._run_model(caches)
            checks.finish()

    def _run_model(self, caches: Sequence[Any]) -> None:
        for num_tokens in _STEPS:
            shape = (_NUM_ROWS, num_tokens)
            tokens = mx.ones(shape, dtype=mx.int32)
            self.model(tokens, cache=list(caches))

    def call_layer(self, i: int, call: LayerCall, caches: Sequence[Any]) -> Any:
        """Calls layer i with the arguments of a recorded call, and with these caches."""

        def filled(value: Any) -> Any:
            if isinstance(value, _CacheNumber):
                return caches[value.number]
            return value

        args, kwargs = _copies((call.args, call.kwargs))
        layer = self.layers[i]
        filled_args = [filled(value) for value in args]
        for name, value in kwargs.items():
            kwargs[name] = filled(value)
        return layer(*filled_args, **kwargs)

    @contextmanager
    def matrices_return(
        self,
        outputs: Mapping[str, mx.array],
        prefix: str,
    ) -> Iterator[list[MatrixCall]]:
        """Inside a `with` block, makes the matrices below a module return these outputs, and lists
        their calls. Matrices without an entry return their recorded outputs."""
        calls: list[MatrixCall] = []
        numbers: dict[str, int] = defaultdict(int)

        def give(name: str, _call: trace.Call, args: Any, _kwargs: Any) -> mx.array:
            recorded = self._recorded(name, numbers)
            given = outputs.get(name, recorded.outputs)
            inputs = _copies(args[0])
            calls.append(MatrixCall(name, inputs, given))
            return _copies(given)

        with self._seams(give, prefix):
            yield calls

    @contextmanager
    def _as_shard(self, roles: Roles, shard: int, prefix: str = "") -> Iterator["_Checks"]:
        checks = _Checks()
        numbers: dict[str, int] = defaultdict(int)

        def replay(name: str, _call: trace.Call, args: Any, _kwargs: Any) -> mx.array:
            recorded = self._recorded(name, numbers)
            expected = recorded.inputs
            if name in roles.row_parallel:
                slices = roles.row_parallel[name]
                expected = slices.part_of(expected, shard)
            inputs = args[0]
            checks.compare(inputs, expected)
            outputs = recorded.outputs
            if name in roles.column_parallel:
                slices = roles.column_parallel[name]
                outputs = slices.part_of(outputs, shard)
            return _copies(outputs)

        with self._changed(roles, shard), self._seams(replay, prefix):
            yield checks

    def _changed(self, roles: Roles, shard: int) -> AbstractContextManager[None]:
        """Puts a shard's numbers and arrays into modules, inside a `with` block."""
        changes: list[tuple[dict[str, Any], str, Any]] = []
        for (name, attribute), values in roles.numbers.items():
            changes.append((vars(self.modules[name]), attribute, values[shard]))
        for path, (axis, slices) in roles.arrays.items():
            name, _, key = path.rpartition(".")
            module = self.modules[name]
            changes.append((module, key, slices.part_of(module[key], shard, axis)))
        return _replaced(changes)

    def arrays_are(self, arrays: Mapping[str, mx.array]) -> AbstractContextManager[None]:
        """Replaces arrays of the model, by their names, inside a `with` block."""
        changes: list[tuple[dict[str, Any], str, Any]] = []
        for path, array in arrays.items():
            name, _, key = path.rpartition(".")
            changes.append((self.modules[name], key, array))
        return _replaced(changes)

    def _recorded(self, name: str, numbers: dict[str, int]) -> MatrixCall:
        calls = self.calls[name]
        number = numbers[name]
        numbers[name] += 1
        if number >= len(calls):
            raise MismatchError(f"{name} is called more often")
        return calls[number]

    def _seams(self, seam: Any, prefix: str = "") -> AbstractContextManager[None]:
        names = [name for name in self.matrices if name.startswith(prefix)]
        modules = [self.matrices[name] for name in names]

        def named(number: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
            return seam(names[number], call, args, kwargs)

        return trace.seams(modules, named)

    def _without_caches(self, value: Any) -> Any:
        """Returns the same tuples and dicts of arguments, with numbers in the place of caches."""
        if isinstance(value, tuple):
            return tuple(self._without_caches(item) for item in value)
        if type(value) is dict:
            return {key: self._without_caches(item) for key, item in value.items()}
        for number, cache in enumerate(self._caches):
            if value is cache:
                return _CacheNumber(number)
        return value

    def _fill_small_arrays(self) -> None:
        """Fills arrays outside of matrices, such as norms. Integers become zero: other integers, if
        used as indices, would make MLX read outside of arrays, which can end the process."""
        matrices = {id(module) for module in self.matrices.values()}
        for module in self.model.modules():
            if id(module) in matrices:
                continue
            for key, value in list(module.items()):
                if not isinstance(value, mx.array):
                    continue
                if mx.issubdtype(value.dtype, mx.integer):
                    zero = mx.array(0, value.dtype)
                    module[key] = mx.broadcast_to(zero, value.shape)
                elif mx.issubdtype(value.dtype, mx.floating) and value.size <= _MAX_SIZE:
                    module[key] = self.positive(value.shape)


@contextmanager
def _replaced(changes: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Puts values under keys of dictionaries, inside a `with` block."""
    before = [(holder, key, holder[key]) for holder, key, _ in changes]
    try:
        for holder, key, value in changes:
            holder[key] = value
        yield
    finally:
        for holder, key, value in before:
            holder[key] = value


def _copies(value: Value) -> Value:
    """Returns the value with new objects for its arrays: code such as `x *= 2` changes arrays."""
    arrays = trace.places_in(value)
    copies: trace.Arrays = {}
    for place, array in arrays.items():
        copies[place] = copy.copy(array)
    copied: Value = trace.with_arrays(value, copies)
    return copied


def relative_difference(found: mx.array, expected: mx.array) -> mx.array:
    """Returns the largest difference, divided by the largest of the expected values."""
    whole = expected.astype(mx.float32)
    difference = found.astype(mx.float32) - whole
    largest = mx.abs(difference).max()
    scale = mx.abs(whole).max()
    return largest / (scale + _TINY)


class _Checks:
    """Compares arrays, and evaluates all comparisons together."""

    def __init__(self) -> None:
        self._differences: list[mx.array] = []

    def compare(self, value: Any, expected: Any) -> None:
        """Adds a comparison. Raises MismatchError if the shapes differ."""
        own = trace.places_in(value)
        wanted = trace.places_in(expected)
        if own.keys() != wanted.keys():
            raise MismatchError("other values")
        for place, array in wanted.items():
            found = own[place]
            if found.shape != array.shape:
                raise MismatchError(f"{found.shape} in place of {array.shape}")
            if array.size:
                difference = relative_difference(found, array)
                self._differences.append(difference)

    def finish(self) -> None:
        if not self._differences:
            return
        largest = float(mx.stack(self._differences).max())
        self._differences.clear()
        if not largest < TOLERANCE:  # true for NaN, too
            raise MismatchError(f"a difference of {largest:.2g}")
