"""Finds out how the layers of any model can be divided among shards.

A pair is a row-parallel matrix, whose inputs are divided among the shards, with everything that a
shard's part is computed from: outputs of column-parallel matrices, and arrays. Gradients show on
which outputs the part depends: a head's, an expert's, or single ones. The code between the matrices
is not interpreted. Runs with random numbers prove that each shard computes its part of the whole
model's results; a pair without this proof is not divided. All ranks use the same random numbers,
and so find the same pairs if their processors round in the same way.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from serve.core.errors import PlanError
from serve.model import trace
from serve.model.probe import (
    EXPERTS,
    FAILURES,
    LINEAR,
    TOLERANCE,
    MismatchError,
    ModelProbe,
    Numbers,
    Roles,
    relative_difference,
)
from serve.model.slices import Slices, cut_units, slices_of
from serve.model.trial import named_arrays

_MAX_CHANGED_NUMBERS = 6
_MAX_TRIALS = 200
_ALIGNED = 64  # the size of an aligned unit, in numbers
_MIN_ALIGNED_UNITS = 16  # the fewest aligned units for each shard

_Options = list[tuple[tuple[str, str], tuple[int, ...]]]
"""The possible new values of one attribute, each with the attribute's module and name."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """How layers are divided among shards, by names of modules. The shards add up the outputs of
    the modules in `summed` and, without in_blocks, of row-parallel matrices elsewhere."""

    roles: Roles
    summed: tuple[str, ...]


def find_pairs(model: nn.Module, num_shards: int, *, in_blocks: bool = False) -> Pairs:
    """Finds how the layers of a lazy model can be divided; the result may be empty. With in_blocks,
    every pair has to be inside of a module in `summed`, else PlanError is raised."""
    with ModelProbe(model) as probe:
        try:
            probe.record()
        except FAILURES:
            return Pairs(Roles(), ())
        return _PairSearch(probe, num_shards, in_blocks=in_blocks).run()


class _PairSearch:
    """Finds the pairs of all layers. Layers whose code does the same are searched once."""

    def __init__(self, probe: ModelProbe, num_shards: int, *, in_blocks: bool) -> None:
        self.probe = probe
        self.num_shards = num_shards
        self.in_blocks = in_blocks

    def run(self) -> Pairs:
        known: dict[Any, list[Roles]] = {}
        found: dict[str, list[Roles]] = {}  # by the row-parallel matrix's name in its layer
        for i, layer in enumerate(self.probe.layers):
            signature = _signature(layer)
            if signature not in known:
                known[signature] = list(_Layer(self.probe, i, self.num_shards).pairs())
            prefix = self.probe.prefix(i)
            for roles in known[signature]:
                (matrix,) = roles.row_parallel
                same = found.setdefault(matrix, [])
                same.append(roles.renamed(partial(_joined, prefix)))
        if not found:
            return Pairs(Roles(), ())
        kinds = [_union(each) for each in found.values()]
        proved = self._proved(kinds)
        roles = _union(proved)
        return Pairs(roles, self._summed(roles))

    def _proved(self, kinds: list[Roles]) -> list[Roles]:
        """Returns the pairs that the whole model allows: a pair that a layer alone allows may fail
        there, because layers can share values."""
        if self.probe.is_equal(_union(kinds), self.num_shards):
            return kinds
        alone = [roles for roles in kinds if self.probe.is_equal(roles, self.num_shards)]
        if self.probe.is_equal(_union(alone), self.num_shards):
            return alone
        return []

    def _summed(self, roles: Roles) -> tuple[str, ...]:
        """Returns the outermost modules whose outputs can be added up: those that call experts, or
        with in_blocks all that call a row-parallel matrix. Raises PlanError."""
        known: dict[Any, str] = {}
        summed: dict[str, None] = {}
        for i, layer in enumerate(self.probe.layers):
            prefix = self.probe.prefix(i)
            signature = _signature(layer)
            row_parallel = [name for name in roles.row_parallel if name.startswith(prefix)]
            for name in row_parallel:
                matrix = self.probe.matrices[name]
                if not self.in_blocks and not isinstance(matrix, EXPERTS):
                    continue
                key = (signature, name.removeprefix(prefix))
                if key not in known:
                    outermost = self._outermost(i, name, row_parallel)
                    known[key] = outermost.removeprefix(prefix)
                module = prefix + known[key]
                summed[module] = None
        return tuple(summed)

    def _outermost(self, i: int, matrix: str, row_parallel: Sequence[str]) -> str:
        """Returns the outermost module around a matrix whose outputs can be added up. For experts,
        this is at least the module that calls them. Raises PlanError if there is none."""
        prefix = self.probe.prefix(i)
        words = matrix.removeprefix(prefix).split(".")
        for length in range(1, len(words)):
            module = prefix + ".".join(words[:length])
            inner = [name for name in row_parallel if name.startswith(f"{module}.")]
            try:
                if _is_additive(self.probe, i, module, inner):
                    return module
            except FAILURES:
                continue
        if self.in_blocks:
            raise PlanError(
                f"--tensor-parallel-size: the shards of this model cannot compute the gradients "
                f"around {matrix}: leave the option out, and use stages or --data-parallel-size."
            )
        return matrix.rpartition(".")[0]


class _Layer:
    """Finds the pairs of one layer. Names are those inside of the layer."""

    def __init__(self, probe: ModelProbe, i: int, num_shards: int) -> None:
        self.probe = probe
        self.i = i
        self.num_shards = num_shards
        self.prefix = probe.prefix(i)
        self.module = probe.layers[i]
        self.names: list[str] = []
        for name in probe.matrices:
            if name.startswith(self.prefix) and len(probe.calls[name]) == len(probe.layer_calls[i]):
                self.names.append(name)

    def pairs(self) -> Iterator[Roles]:
        if not self.probe.is_equal(Roles(), self.num_shards, self.i):
            return  # A large array that stays NaN, for example, makes all runs fail.
        taken: set[str] = set()
        for name in self.names:
            if name in taken:
                continue
            roles = self._pair(name)
            if roles is None or not taken.isdisjoint(roles.column_parallel):
                continue
            if not self._can_be_summed(name):
                continue
            taken.update(roles.column_parallel, roles.row_parallel)
            yield roles.renamed(partial(_cut_off, self.prefix))

    def _possible_parts(self, name: str) -> Iterator[Slices]:
        """Yields ways to divide a matrix's inputs: equal parts, then whole units, the smallest
        first. Quantized weights are cut only between groups."""
        module = self.probe.matrices[name]
        if not isinstance(module, (*LINEAR, *EXPERTS)):
            return
        call = self.probe.calls[name][0]
        num_inputs = call.inputs.shape[-1]
        weight = module["weight"]
        sizes = [num_inputs, weight.shape[-1]]
        if "scales" in module:
            scales = module["scales"]
            sizes.append(scales.shape[-1])
        max_units = math.gcd(*sizes)
        is_even = max_units % self.num_shards == 0
        counts = {number for number in self._numbers() if max_units % number == 0}
        if is_even:
            yield cut_units(num_inputs, self.num_shards, self.num_shards)
        else:
            num_columns = _num_aligned_units(num_inputs, max_units, self.num_shards)
            counts.add(num_columns)
        for num_units in sorted(counts, reverse=True):
            if num_units > self.num_shards and num_units % self.num_shards:
                yield cut_units(num_inputs, num_units, self.num_shards)

    def _numbers(self) -> set[int]:
        """Returns the positive numbers among the attributes of the layer's modules."""
        numbers: set[int] = set()
        for name, module in self.probe.modules.items():
            if not f"{name}.".startswith(self.prefix):
                continue
            values = [value for value in vars(module).values() if type(value) is int]
            numbers.update(value for value in values if value > 0)
        return numbers

    def _can_be_summed(self, matrix: str) -> bool:
        """Whether the outputs of all shards can be added up: linear modules do it themselves,
        experts are summed by the module that calls them."""
        if isinstance(self.probe.matrices[matrix], LINEAR):
            return True
        caller = matrix.rpartition(".")[0]
        is_inside = f"{caller}.".startswith(self.prefix) and caller != self.prefix[:-1]
        try:
            return is_inside and _is_additive(self.probe, self.i, caller, [matrix])
        except FAILURES:
            return False

    def _pair(self, matrix: str) -> Roles | None:
        """Returns the pair of a row-parallel matrix, if a run proves it."""
        for parts in self._possible_parts(matrix):
            try:
                roles = self._pair_of_parts(matrix, parts)
            except FAILURES:
                continue
            if roles:
                return roles
        return None

    def _pair_of_parts(self, matrix: str, parts: Slices) -> Roles | None:
        """Returns the pair of a row-parallel matrix whose inputs are divided into these parts."""
        arrays = self._arrays()
        supports = self._supports(matrix, parts, arrays)
        column_parallel: dict[str, Slices] = {}
        for name in self.names:
            gradients = [support[name] for support in supports]
            slices = slices_of(gradients, -1, parts)
            if slices and isinstance(self.probe.matrices[name], (*LINEAR, *EXPERTS)):
                column_parallel[name] = slices
        if not column_parallel or not self._is_worth_a_sum(matrix, column_parallel):
            return None
        divided: dict[str, tuple[int, Slices]] = {}
        for name, array in arrays.items():
            gradients = [support[name] for support in supports]
            for axis in range(array.ndim):
                slices = slices_of(gradients, axis, parts)
                if slices:
                    divided[name] = (axis, slices)
        scope = _common_module([matrix, *column_parallel])
        for numbers in self._possible_numbers(scope, parts):
            candidate = Roles(column_parallel, {matrix: parts}, divided, numbers)
            if self.probe.is_equal(candidate, self.num_shards, self.i):
                return candidate
        return None

    def _supports(
        self,
        matrix: str,
        slices: Slices,
        arrays: Mapping[str, mx.array],
    ) -> list[dict[str, mx.array]]:
        """Computes for each shard the derivatives of its part of a matrix's inputs with respect to
        all matrices' outputs and to arrays. A derivative is not zero where the part depends on the
        array."""
        probe = self.probe
        names = [*self.names, *arrays]
        primals: list[mx.array] = []
        for name in self.names:
            call = probe.calls[name][0]
            outputs = probe.positive(call.outputs.shape)
            primals.append(outputs)
        primals += arrays.values()

        def inputs_of_matrix(*values: mx.array) -> mx.array:
            by_name = zip(names, values, strict=True)
            given = dict(by_name)
            own_arrays = {name: given[name] for name in arrays}
            matrices = probe.matrices_return(given, self.prefix)
            with probe.arrays_are(own_arrays), matrices as calls:
                self._call()
            for call in calls:
                if call.name == matrix:
                    return call.inputs
            raise MismatchError(f"{matrix} is not called")

        whole = probe.calls[matrix][0].inputs
        found: list[dict[str, mx.array]] = []
        for shard in range(self.num_shards):
            part = mx.zeros(whole.shape)
            for start, end in slices.ranges[shard]:
                own = whole[..., start:end]
                part[..., start:end] = probe.positive(own.shape)
            _, gradients = mx.vjp(inputs_of_matrix, primals, [part])
            by_name = zip(names, gradients, strict=True)
            found.append(dict(by_name))
        return found

    def _call(self) -> Any:
        call = self.probe.layer_calls[self.i][0]
        caches = make_prompt_cache(self.probe.model)
        return self.probe.call_layer(self.i, call, caches)

    def _arrays(self) -> dict[str, mx.array]:
        """Returns the arrays of the layer that do not belong to a matrix."""
        found: dict[str, mx.array] = {}
        for name, array in named_arrays(self.module):
            path = self.prefix + name
            module, _, _ = path.rpartition(".")
            is_outside = module not in self.probe.matrices
            is_float = mx.issubdtype(array.dtype, mx.floating)
            if is_outside and is_float and array.ndim:
                found[path] = array
        return found

    def _is_worth_a_sum(self, matrix: str, column_parallel: Iterable[str]) -> bool:
        """Whether it is worth a sum to divide these weights: low-rank matrices have too few."""
        num_weights = 0
        for name in (matrix, *column_parallel):
            call = self.probe.calls[name][0]
            num_inputs = call.inputs.shape[-1]
            num_outputs = call.outputs.shape[-1]
            num_weights += num_inputs * num_outputs
        call = self.probe.calls[matrix][0]
        num_summed = call.outputs.shape[-1]
        return num_weights >= num_summed**2 / 2

    def _possible_numbers(self, scope: str, parts: Slices) -> Iterator[Numbers]:
        """Yields combinations of new values for a scope's numbers, fewest changes first."""
        options: list[_Options] = []
        for name, attribute in self._attributes_read(scope):
            module = self.probe.modules[name]
            value = vars(module).get(attribute)
            if type(value) is not int:
                continue
            possible = parts.possible_numbers(value)
            key = (name, attribute)
            if possible:
                options.append([(key, values) for values in possible])
        options.sort(key=_is_not_of_heads)
        combinations = _combinations(options)
        return itertools.islice(combinations, _MAX_TRIALS)

    def _attributes_read(self, scope: str) -> list[tuple[str, str]]:
        """Returns the attributes, except matrices, that the layer reads of a scope's modules."""
        names: list[str] = []
        modules: list[nn.Module] = []
        for name, module in self.probe.modules.items():
            is_inside = name == scope or name.startswith(f"{scope}.")
            if is_inside and name not in self.probe.matrices:
                names.append(name)
                modules.append(module)
        matrices = self.probe.matrices_return({}, self.prefix)
        with trace.attributes_read(modules) as read, matrices:
            self._call()
        found: list[tuple[str, str]] = []
        for name, attributes in zip(names, read, strict=True):
            in_order = sorted(attributes)
            found += [(name, attribute) for attribute in in_order]
        return found


def _is_additive(probe: ModelProbe, i: int, module_name: str, matrices: Sequence[str]) -> bool:
    """Whether the output of a module is additive in the outputs of these matrices."""
    module = probe.modules[module_name]
    outputs: list[Any] = []

    def record(_: int, call: trace.Call, args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        outputs.append(output)
        return output

    first: trace.Arrays = {}
    second: trace.Arrays = {}
    both: trace.Arrays = {}
    for name in matrices:
        call = probe.calls[name][0]
        shape = call.outputs.shape
        first[name] = probe.random(shape)
        second[name] = probe.random(shape)
        both[name] = first[name] + second[name]
    layer_call = probe.layer_calls[i][0]
    prefix = probe.prefix(i)
    with trace.seams([module], record):
        for given in (first, second, both):
            caches = make_prompt_cache(probe.model)
            with probe.matrices_return(given, prefix):
                probe.call_layer(i, layer_call, caches)
    if not all(isinstance(output, mx.array) for output in outputs):
        return False
    one, other, total = outputs
    added = one + other
    difference = relative_difference(added, total)
    return float(difference) < TOLERANCE


def _joined(prefix: str, name: str) -> str:
    return (prefix + name).rstrip(".")


def _cut_off(prefix: str, name: str) -> str:
    return f"{name}.".removeprefix(prefix).rstrip(".")


def _is_not_of_heads(option: _Options) -> bool:
    """A sort key that puts numbers of heads first: such numbers change most often."""
    (_, attribute), _ = option[0]
    return "head" not in attribute


def _num_aligned_units(size: int, max_units: int, num_shards: int) -> int:
    """Returns the number of equal units into which to cut an axis. A size that is a power of two
    multiplies faster, and there must be enough units for parts of nearly the same size."""
    num_units = max_units
    while size // num_units < _ALIGNED and num_units % 2 == 0:
        if num_units // 2 < _MIN_ALIGNED_UNITS * num_shards:
            break
        num_units //= 2
    return num_units


def _combinations(options: Sequence[_Options]) -> Iterator[Numbers]:
    for num_changed in range(_MAX_CHANGED_NUMBERS + 1):
        for chosen in itertools.combinations(options, num_changed):
            for values in itertools.product(*chosen):
                yield dict(values)


def _common_module(names: Sequence[str]) -> str:
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for words in zip(*paths, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    return ".".join(common)


def _union(several: Sequence[Roles]) -> Roles:
    total = Roles()
    for roles in several:
        total.add(roles)
    return total


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Makes a key that is equal for layers whose code does the same."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        shapes: list[Any] = []
        for key, value in module.items():
            if isinstance(value, mx.array):
                shapes.append((key, value.shape))
        settings: list[Any] = []
        for key, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)):
                settings.append((key, value))
        parts.append((name, type(module), tuple(shapes), tuple(settings)))
    return tuple(parts)
