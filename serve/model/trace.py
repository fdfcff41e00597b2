"""Tools to analyse a forward pass, by running it on lazy arrays without evaluating them.

Seams intercept the calls of single modules. A layer passes values to other layers: its result, and
those arguments that it writes to. `Graph` finds the arrays from which others are computed.
"""

import copy
import functools
import io
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn

from serve.core.errors import PlanError

Key = TypeVar("Key", bound=Hashable)
Arrays = dict[str, mx.array]
"""Arrays by their name, or by their place in a value."""
Call = Callable[..., Any]
"""The original call of a module, without its seam."""
Seam = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
"""A function called instead of a module, with the module's own call and its arguments."""

_EXPORT_LIMIT = 1000  # the names in a call of mx.export_to_dot, which takes at most 1,024


# --- seams


def open_seam(module: nn.Module, seam: Seam) -> None:
    """Routes each call of this one module through seam."""
    if not hasattr(type(module), "_brigade_original"):
        module.__class__ = _seamed(type(module))
    object.__setattr__(module, "_brigade_seam", seam)


def close_seam(module: nn.Module) -> None:
    original = getattr(type(module), "_brigade_original", None)
    if original is not None:
        module.__class__ = original
        object.__delattr__(module, "_brigade_seam")


@contextmanager
def seams(modules: Sequence[nn.Module], seam: Callable[..., Any]) -> Iterator[None]:
    """Opens a seam at each module, inside a `with` block. `seam` gets the module's index first."""
    try:
        for i, module in enumerate(modules):
            open_seam(module, functools.partial(seam, i))
        yield
    finally:
        for module in modules:
            close_seam(module)


@functools.cache
def _seamed(original: type[nn.Module]) -> type[nn.Module]:
    """Makes the subclass that calls the seam. It has the original's name, which some code reads."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = functools.partial(original.__call__, self)
        return self._brigade_seam(inner, args, kwargs)

    members = {"__call__": call, "_brigade_original": original}
    return type(original.__name__, (original,), members)


@contextmanager
def attributes_read(modules: Sequence[nn.Module]) -> Iterator[list[set[str]]]:
    """Collects the names of the attributes that are read from each module inside a `with` block."""
    found: list[set[str]] = [set() for _ in modules]
    classes = [type(module) for module in modules]

    def spied(original: type[nn.Module], names: set[str]) -> type[nn.Module]:
        def get(self: Any, name: str) -> Any:
            names.add(name)
            return original.__getattribute__(self, name)

        return type(original.__name__, (original,), {"__getattribute__": get})

    try:
        for module, original, names in zip(modules, classes, found, strict=True):
            module.__class__ = spied(original, names)
        yield found
    finally:
        for module, original in zip(modules, classes, strict=True):
            module.__class__ = original


_num_uncompiled = 0  # the number of open `with uncompiled()` blocks


@contextmanager
def uncompiled() -> Iterator[None]:
    """Disables mx.compile inside a `with` block. The graphs of all calls of a compiled function
    share their nodes, so everything would seem to depend on everything."""
    global _num_uncompiled
    _num_uncompiled += 1
    mx.disable_compile()
    try:
        yield
    finally:
        _num_uncompiled -= 1
        if not _num_uncompiled:
            mx.enable_compile()


# --- values: arrays in tuples, lists, dicts and plain objects


def arrays_in(value: Any) -> list[mx.array]:
    """Returns the arrays that a value contains, depth first."""
    return list(places_in(value).values())


def places_in(value: Any) -> Arrays:
    """Returns the arrays that a value contains, by their place in it, such as `.0.key`."""
    return dict(_places(value, ""))


def with_arrays(value: Any, arrays: Mapping[str, Any], place: str = "") -> Any:
    """Returns a copy of a value, with its arrays replaced by the one for each place, or by None."""
    if isinstance(value, mx.array):
        return arrays.get(place)
    if isinstance(value, (list, tuple)):
        items: list[Any] = []
        for n, item in enumerate(value):
            items.append(with_arrays(item, arrays, f"{place}.{n}"))
        is_named_tuple = hasattr(value, "_fields")
        if is_named_tuple:
            return type(value)(*items)
        return type(value)(items)
    fields = _fields(value)
    if not fields:
        return value
    replaced = copy.copy(value)
    for name, field in fields.items():
        field_place = f"{place}.{name}"
        _fields(replaced)[name] = with_arrays(field, arrays, field_place)
    return replaced


def snapshot(value: Any) -> Any:
    """Returns a copy that does not change when the objects of the original are written to."""
    return with_arrays(value, places_in(value))


def _places(value: Any, place: str) -> Iterator[tuple[str, mx.array]]:
    if isinstance(value, mx.array):
        yield place, value
        return
    is_sequence = isinstance(value, (list, tuple))
    items = enumerate(value) if is_sequence else _fields(value).items()
    for key, item in items:
        yield from _places(item, f"{place}.{key}")


def write_back(targets: Sequence[Any], written: Sequence[Any]) -> None:
    """Makes mutable objects equal to the snapshots that were taken after a layer wrote to them."""
    for target, value in zip(targets, written, strict=True):
        if isinstance(target, list):
            target[:] = value
        else:
            _fields(target).update(_fields(value))


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return getattr(value, "__dict__", {})


# --- the lazy graph


class Graph(Generic[Key]):
    """The lazy graph between sources and outputs: it finds the sources that outputs use. Raises
    PlanError if MLX cannot name that many arrays."""

    def __init__(self, outputs: Sequence[mx.array], sources: Mapping[Key, mx.array]) -> None:
        by_array: dict[int, list[Key]] = defaultdict(list)
        for key, array in sources.items():
            by_array[id(array)].append(key)
        if len(outputs) + len(by_array) > _EXPORT_LIMIT:
            raise PlanError(f"This model passes on more than {_EXPORT_LIMIT} arrays at once.")
        # Several keys may name the same array, which is one node of the graph.
        self._keys: dict[str, list[Key]] = {}
        named: Arrays = {}
        for number, keys in enumerate(by_array.values()):
            self._keys[f"in{number}"] = keys
            named[f"in{number}"] = sources[keys[0]]
        self._outputs: list[str] = []
        for number, array in enumerate(outputs):
            self._outputs.append(f"out{number}")
            # `stop_gradient` gives each output a separate node, even an output that is a source.
            named[f"out{number}"] = mx.stop_gradient(array)
        self._parents: dict[str, list[str]] = defaultdict(list)
        for parent, child in edges(named):
            self._parents[child].append(parent)

    def used(self, known: Collection[Key], *, and_theirs: bool = False) -> set[Key]:
        """Returns the sources that outputs use directly; and_theirs adds the sources of these."""
        known_by_name: dict[str, set[Key]] = {}
        for name, keys in self._keys.items():
            known_by_name[name] = {key for key in keys if key in known}
        reached: set[str] = set()
        found: set[Key] = set()
        waiting = list(self._outputs)
        while waiting:
            name = waiting.pop()
            if name in reached:
                continue
            reached.add(name)
            known_here = known_by_name.get(name, set())
            found |= known_here
            if and_theirs or not known_here:
                waiting += self._parents[name]
        return found


def edges(named: Mapping[str, mx.array]) -> Iterator[tuple[str, str]]:
    """Yields the edges (parent, child) of these arrays' lazy graph, by their names."""
    dot = io.StringIO()
    mx.export_to_dot(dot, **named)
    for line in dot.getvalue().splitlines():
        if line.endswith("}"):  # The line describes a node.
            continue
        parent, arrow, child = line.partition(" -> ")
        if arrow:
            yield parent.strip('"'), child.strip('"')


def depends_on(outputs: Sequence[mx.array], sources: Mapping[Key, mx.array]) -> set[Key]:
    """Returns the keys of the sources from which the outputs are computed."""
    size = _EXPORT_LIMIT // 2
    entries = list(sources.items())
    found: set[Key] = set()
    for first_output in range(0, len(outputs), size):
        some_outputs = outputs[first_output : first_output + size]
        for first_source in range(0, len(entries), size):
            some_sources = dict(entries[first_source : first_source + size])
            graph = Graph(some_outputs, some_sources)
            found |= graph.used(some_sources.keys(), and_theirs=True)
    return found
