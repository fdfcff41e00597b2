"""Divides the layers of a model among shards: with mlx-lm's own `shard` if the parts are equal, and
otherwise by `serve.model.pairs`. Arrays that cannot be divided, or are outside of the layers, are
whole on every shard."""

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed
from mlx.utils import tree_map, tree_map_with_path

from serve.core.errors import PlanError
from serve.model import trace
from serve.model.pairs import Pairs, find_pairs
from serve.model.probe import LINEAR
from serve.model.slices import Ranges, Segments, Slices, own_ranges, scaled, select, size_of
from serve.model.trial import FAILURES, modules_outside

SUMMING = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)
"""Modules that get only some of the inputs, and add up the outputs of all shards."""
DIVIDED = (nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear, *SUMMING)
"""All modules of MLX that are divided among shards."""
_PART_CLASSES: dict[tuple[bool, bool], Any] = {
    (True, False): nn.AllToShardedLinear,
    (True, True): nn.QuantizedAllToShardedLinear,
    (False, False): nn.ShardedToAllLinear,
    (False, True): nn.QuantizedShardedToAllLinear,
}
"""MLX's modules for a shard's part of a linear module, by whether the part has all inputs, and
whether it is quantized."""

_Where = Callable[[str, mx.array], int | tuple[int, Segments] | None]
"""Returns the axis along which an array of a module is divided, or the axis and its segments; or
None for an array that stays whole. It gets the name of the array."""
_Numbers = dict[str, int]
_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StandIn:
    """A stand-in for MLX's group of the shards, so that one process can plan for one shard."""

    num_shards: int
    shard: int = 0

    def rank(self) -> int:
        return self.shard

    def size(self) -> int:
        return self.num_shards


@dataclass(frozen=True, slots=True)
class Division:
    """This shard's part of a module's weight (..., outputs, inputs): ranges of axis -2 or -1, which
    has num_whole numbers in the whole weight. Quantized inputs are counted as packed. is_partition
    says that the parts of all shards do not overlap, and together are the whole."""

    axis: int
    num_whole: int
    ranges: Ranges
    is_partition: bool = True

    def own_part(self, array: mx.array, axis: int) -> mx.array:
        """Returns the shard's part of another array, one axis of which is divided in the same way.
        It is contiguous, as after an update: MLX may round differently with a view, and a view
        would keep the whole array in memory."""
        return mx.contiguous(select(array, axis, self.ranges_of(array.shape[axis])))

    def ranges_of(self, size: int) -> Ranges:
        """Returns the shard's ranges of an axis of size, divided in the same way. Raises
        ValueError."""
        return scaled(self.ranges, size, self.num_whole)

    @property
    def share(self) -> float:
        return size_of(self.ranges) / self.num_whole

    def before_repetition(self, num_whole: int) -> "Division":
        """Returns this division in terms of the original weight, which has num_whole rows, if
        mlx-lm has repeated heads of keys and values. The copies of a head follow each other."""
        ((start, end),) = self.ranges
        size_of_head = end - start
        num_copies = self.num_whole // num_whole
        head = start // size_of_head // num_copies
        first = head * size_of_head
        own = (first, first + size_of_head)
        return Division(self.axis, num_whole, (own,), is_partition=False)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the whole weight, from that of the own part."""
        sizes = list(shape)
        sizes[self.axis] = self.num_whole
        return tuple(sizes)


Divisions = dict[str, Division]
"""How the weights of modules are divided, by the full name of the module. Other modules are
whole."""


@dataclass(frozen=True, slots=True)
class Made:
    """A shard's lazy array, and the whole model's weight (source) of which it is a part."""

    array: mx.array
    source: mx.array
    division: Division


@dataclass(frozen=True, slots=True)
class Sharding:
    """The divisions of modules. `made` holds all arrays that were made, by their id. The caller
    must clear `made` before the model is evaluated, because it keeps whole weights in memory.
    digest covers everything that is divided or summed. It differs between shards if one has found
    other pairs, because its processor rounds differently. blocks are the modules of which each
    shard computes a summand: their outputs, and the gradients of their inputs, are added up."""

    divisions: Divisions
    made: dict[int, Made]
    digest: str
    shard: int
    num_shards: int
    blocks: tuple[str, ...] = ()

    def is_in_block(self, name: str) -> bool:
        return name in self.blocks or _is_below(name, self.blocks)


def shard(model: nn.Module, group: Any) -> Sharding:
    """Reduces each layer of a lazy model to the part that this shard computes. group is MLX's group
    of the shards, or a StandIn. Without divisions in the result, every shard holds all layers."""
    before = [_State(module) for module in model.modules()]
    if hasattr(model, "shard"):
        try:
            return _shard_as_mlx_lm(model, group)
        except PlanError:
            for state in before:
                state.restore()
    return _shard_pairs(model, find_pairs(model, group.size()), group)


def shard_to_train(model: nn.Module, group: Any, trained: Set[str]) -> Sharding:
    """Divides a model so that its shards can compute gradients. `trained` are the names of the
    trained arrays. MLX's own modules add up the gradients of their inputs. But a whole matrix
    beside such a module, such as a router's, would get and pass on only a part of its gradient, and
    a trained array, such as a norm's, might do so too. If there is either, every pair becomes part
    of a block, in which all gradients are partial. Raises PlanError if the outputs of a pair do not
    belong to a block."""
    before = [_State(module) for module in model.modules()]
    sharding = shard(model, group)
    matrices = matrices_of_layers(model).values()
    has_other_matrices = any(not isinstance(module, DIVIDED) for module in matrices)
    has_arrays_beside = any(_is_beside(name, sharding.divisions) for name in trained)
    if not has_other_matrices and not has_arrays_beside:
        return sharding
    for state in before:
        state.restore()
    pairs = find_pairs(model, group.size(), in_blocks=True)
    return _shard_pairs(model, pairs, group)


def _is_beside(array: str, divisions: Divisions) -> bool:
    """Whether an array that is not divided belongs to a module that contains divided arrays."""
    module = owner_of(array)
    if module in divisions:
        return False
    return any(_is_below(array, [owner_of(name)]) for name in divisions)


def owner_of(name: str) -> str:
    """Returns the name of the module that contains an array or another module."""
    owner, _, _ = name.rpartition(".")
    return owner


def matrices_of_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of the layers whose weight is a matrix, by name."""
    in_layers = {id(module) for layer in model.layers for module in layer.modules()}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        weight = module.get("weight")
        is_matrix = isinstance(weight, mx.array) and weight.ndim > 1
        if is_matrix and id(module) in in_layers:
            found[name] = module
    return found


class _State:
    """The class, arrays, children and attributes of a module, to undo later changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._class = type(module)
        self._children = dict(module)
        self._attributes = dict(vars(module))
        # Lists of modules are changed in place, too.
        self._lists: list[tuple[list[Any], list[Any]]] = []
        # Operators such as /= change an array in place, but not a second object for it. The first
        # objects are restored, because the code that reads the files knows arrays by their ids.
        self._arrays: list[tuple[mx.array, mx.array]] = []
        for child in module.values():
            if isinstance(child, list):
                self._lists.append((child, list(child)))
            elif isinstance(child, mx.array):
                self._arrays.append((child, copy.copy(child)))

    def restore(self) -> None:
        self._module.__class__ = self._class
        for children, same in self._lists:
            children[:] = same
        for array, before in self._arrays:
            array[...] = before
        self._module.clear()
        dict.update(self._module, self._children)
        vars(self._module).clear()
        vars(self._module).update(self._attributes)


def _shard_as_mlx_lm(model: Any, group: Any) -> Sharding:
    """Divides a model with its own `shard`. Raises PlanError if the parts are not equal."""
    numbers = [(module, _numbers(module)) for module in model.modules()]
    shapes = _weight_shapes(model)
    modules = modules_outside(model, list(model.layers))
    outside = [(module, dict(module), dict(vars(module))) for module in modules]
    num_shards = group.size()
    divider = _Divider()
    try:
        with divider.in_place_of_mlx():
            model.shard(group)
    except FAILURES as error:
        raise PlanError(f"This model cannot be divided evenly ({error}).") from error
    for module, before in numbers:
        _check_numbers(before, _numbers(module), num_shards)
    for module, children, attributes in outside:
        _restore(module, children, attributes, group)
    return _sharding(model, divider, None, group, shapes)


def _shard_pairs(model: nn.Module, pairs: Pairs, group: Any) -> Sharding:
    shapes = _weight_shapes(model)
    divider = _Divider()
    _divide_matrices(model, pairs, divider, group)
    modules: dict[str, Any] = dict(model.named_modules())
    for path, (axis, slices) in pairs.roles.arrays.items():
        name, _, key = path.rpartition(".")
        module = modules[name]
        whole = module[key]
        module[key] = divider.own_part(whole, axis, slices, group)
    for (name, attribute), values in pairs.roles.numbers.items():
        module = modules[name]
        vars(module)[attribute] = values[group.rank()]
    for name in pairs.summed:
        _sum_outputs(modules[name], group)
    return _sharding(model, divider, pairs, group, shapes)


def _divide_matrices(model: nn.Module, pairs: Pairs, divider: "_Divider", group: Any) -> None:
    """Reduces the matrices of pairs to the parts of this shard. Matrices in a module whose outputs
    are summed keep their class; others become modules of MLX."""
    modules: dict[str, Any] = dict(model.named_modules())
    roles = pairs.roles
    for name, slices in roles.column_parallel.items():
        module = modules[name]
        where = functools.partial(_divided_outputs, slices)
        own = divider.divide(module.parameters(), where, group)
        if _is_below(name, pairs.summed) or not isinstance(module, LINEAR):
            module.update(own)
        else:
            part = _linear_part(module, own, group, has_all_inputs=True)
            _replace(model, name, part)
    for name, slices in roles.row_parallel.items():
        module = modules[name]
        where = functools.partial(_divided_inputs, slices)
        own = divider.divide(module.parameters(), where, group)
        if not _is_below(name, pairs.summed):
            part = _linear_part(module, own, group, has_all_inputs=False)
            _replace(model, name, part)
            continue
        module.update(own)
        if "bias" in module:
            # Every shard adds its share of the bias, and then the outputs are added up.
            bias = module["bias"]
            module["bias"] = bias / group.size()


def _weight_shapes(model: nn.Module) -> _Shapes:
    modules = model.named_modules()
    return {name: module["weight"].shape for name, module in modules if "weight" in module}


def _sharding(
    model: nn.Module,
    divider: "_Divider",
    pairs: Pairs | None,
    group: Any,
    shapes: _Shapes,
) -> Sharding:
    """Returns the result for a divided model. pairs is None if mlx-lm has divided it."""
    divisions = divider.divisions(model, shapes)
    digest = hashlib.sha256(repr(pairs).encode())
    for name, module in model.named_modules():
        division = divisions.get(name)
        # All modules that compute sums, MLX's own and others, refer to the group.
        is_summing = any(value is group for value in vars(module).values())
        if division is None and not is_summing:
            continue
        words = [name, type(module).__name__]
        if division is not None:
            words += [str(division.axis), str(division.num_whole)]
        digest.update(f"{words}\n".encode())
    blocks = pairs.summed if pairs else ()
    return Sharding(
        divisions=divisions,
        made=divider.made,
        digest=digest.hexdigest()[:16],
        shard=group.rank(),
        num_shards=group.size(),
        blocks=blocks,
    )


def _linear_part(
    module: nn.Module,
    parameters: dict[str, Any],
    group: Any,
    *,
    has_all_inputs: bool,
) -> nn.Module:
    """Makes MLX's module for a part of a linear one: its `shard_linear` makes only equal parts."""
    is_quantized = "scales" in module
    settings: dict[str, Any] = {}
    num_outputs, num_inputs = parameters["weight"].shape
    if is_quantized:
        for name in ("group_size", "bits", "mode"):
            settings[name] = getattr(module, name)
        num_inputs = num_inputs * 32 // module.bits
    # MLX asks for the sizes of the whole matrix, and divides them.
    if has_all_inputs:
        num_outputs *= group.size()
    else:
        num_inputs *= group.size()
    part_class = _PART_CLASSES[has_all_inputs, is_quantized]
    part: nn.Module = part_class(num_inputs, num_outputs, "bias" in module, group=group, **settings)
    part.update(parameters)
    return part


def _divided_outputs(slices: Slices, path: str, weight: mx.array) -> tuple[int, Segments] | None:
    if path == "bias":
        return -1, slices
    return (-2, slices) if weight.ndim > 1 else None


def _divided_inputs(slices: Slices, path: str, weight: mx.array) -> tuple[int, Segments] | None:
    if path == "bias" or weight.ndim < 2:
        return None
    return -1, slices


def _is_below(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _replace(model: Any, name: str, module: nn.Module) -> None:
    *path, last = name.split(".")
    parent = model
    for word in path:
        parent = parent[int(word)] if isinstance(parent, list) else parent[word]
    if isinstance(parent, list):
        parent[int(last)] = module
    else:
        parent[last] = module


def _sum_outputs(module: nn.Module, group: Any) -> None:
    module.__class__ = _summing(type(module))
    object.__setattr__(module, "_brigade_group", group)


@functools.cache
def _summing(original: type[nn.Module]) -> type[nn.Module]:
    """Makes the subclass that adds up the outputs of all shards, with the name of the original."""

    def call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        group = self._brigade_group
        share = distributed.sum_gradients(group)

        def shared(value: Any) -> Any:
            if not isinstance(value, mx.array):
                return value
            is_float = mx.issubdtype(value.dtype, mx.floating)
            return share(value) if is_float else value

        own_args = tree_map(shared, args)
        own_kwargs = tree_map(shared, kwargs)
        partial_sum = original.__call__(self, *own_args, **own_kwargs)
        return sum_of_shards(partial_sum, group)

    return type(original.__name__, (original,), {"__call__": call})


def sum_of_shards(x: mx.array, group: Any) -> mx.array:
    """Adds up the arrays of all shards of the group."""
    total: mx.array = mx.distributed.all_sum(x, group=group)
    return total


def with_summed_gradient(x: mx.array, group: Any) -> mx.array:
    """Returns x, whose gradient is then the sum of the gradients on all shards of the group."""
    same: mx.array = distributed.sum_gradients(group)(x)
    return same


class _Divider:
    """Divides weights as MLX's `shard_linear` and `shard_inplace` do, and records how."""

    def __init__(self) -> None:
        self.made: dict[int, Made] = {}  # by the id of each array that was made

    @contextmanager
    def in_place_of_mlx(self) -> Iterator[None]:
        original = distributed._shard
        vars(distributed)["_shard"] = self.divide
        try:
            yield
        finally:
            vars(distributed)["_shard"] = original

    def divisions(self, model: nn.Module, shapes: _Shapes) -> Divisions:
        found: Divisions = {}
        for name, module in model.named_modules():
            made = self.made.get(id(module.get("weight")))
            if made is None:
                continue
            division = made.division
            num_whole = shapes[name][division.axis]
            if num_whole < division.num_whole:
                division = division.before_repetition(num_whole)
            found[name] = division
        return found

    def divide(self, parameters: dict[str, Any], where: _Where, group: Any) -> Any:
        """Returns this shard's part of a module's parameters. MLX calls it, too."""

        def own(path: str, weight: Any) -> Any:
            if not isinstance(weight, mx.array):
                return weight
            place = where(path, weight)
            if place is None:
                return weight
            axis, segments = place if isinstance(place, tuple) else (place, 1)
            return self.own_part(weight, axis, segments, group)

        return tree_map_with_path(own, parameters)

    def own_part(self, weight: mx.array, axis: int, segments: Segments, group: Any) -> mx.array:
        """Returns this shard's part of a weight, as a lazy array."""
        size = weight.shape[axis]
        ranges = own_ranges(size, segments, group.rank(), group.size())
        made = mx.contiguous(select(weight, axis, ranges))
        from_end = axis % weight.ndim - weight.ndim
        is_partition = not isinstance(segments, Slices) or segments.is_partition
        division = Division(from_end, size, ranges, is_partition)
        self.made[id(made)] = Made(made, weight, division)
        return made


@contextmanager
def without_sums() -> Iterator[None]:
    """Inside a `with` block, a model that was sharded with a StandIn can run: shapes are right, but
    nothing is exchanged, nor compiled, because compiled functions would never exchange anything."""

    def all_sum(x: mx.array, **_: Any) -> mx.array:
        return x

    def all_gather(x: mx.array, *, group: StandIn, **_: Any) -> mx.array:
        return mx.concatenate([x] * group.size(), axis=0)

    stand_ins = {"all_sum": all_sum, "all_gather": all_gather}
    real = {name: getattr(mx.distributed, name) for name in stand_ins}
    try:
        vars(mx.distributed).update(stand_ins)
        with trace.uncompiled():
            yield
    finally:
        vars(mx.distributed).update(real)


def _numbers(module: nn.Module) -> _Numbers:
    """Returns the integer attributes of a module, such as its number of heads."""
    return {name: value for name, value in vars(module).items() if type(value) is int}


def _check_numbers(before: _Numbers, after: _Numbers, num_shards: int) -> None:
    """Raises PlanError for heads that cannot be divided: mlx-lm would compute wrong results."""
    for name, whole in before.items():
        part = after.get(name, whole)
        is_even = part * num_shards == whole
        # A shard may also hold a copy of a head that several shards need.
        is_copied = part == 1 and whole > 0 and num_shards % whole == 0
        if part != whole and not is_even and not is_copied:
            raise PlanError(
                f"--tensor-parallel-size {num_shards} does not divide this model's {name} of "
                f"{whole}: choose a divisor of {whole}, or leave the option out."
            )


def _restore(
    module: nn.Module,
    children: dict[str, Any],
    attributes: dict[str, Any],
    group: Any,
) -> None:
    """Makes a module outside of the layers whole again: rank 0 computes the head alone."""
    for name, child in children.items():
        if isinstance(child, nn.Module) and module.get(name) is not child:
            module[name] = child
    for name, value in attributes.items():
        if vars(module)[name] is group:
            vars(module)[name] = value
