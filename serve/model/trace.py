"""What a forward does, found by running it on lazy arrays. Evaluates nothing.

Three tools for cutting a model whose code does not know it: seams replace the
calls of modules, values are the arrays that a layer gives to others (its result,
and objects among its arguments that it writes to), and `Graph` is the lazy graph
between them: which arrays others are made of.
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
Seam = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a module, with the module's own call and its arguments."""

_EXPORT_LIMIT = 1000  # mx.export_to_dot takes at most 1,024 names in one call


# --- seams


def open_seam(module: nn.Module, seam: Seam) -> None:
    """Sends each call of this one module through seam."""
    if not hasattr(type(module), "_brigade_original"):
        module.__class__ = _seamed(type(module))
    object.__setattr__(module, "_brigade_seam", seam)


def close_seam(module: nn.Module) -> None:
    original = getattr(type(module), "_brigade_original", None)
    if original:
        module.__class__ = original
        object.__delattr__(module, "_brigade_seam")


@contextmanager
def seams(modules: Sequence[nn.Module], make: Callable[[int], Seam]) -> Iterator[None]:
    """Seams that are closed again: make(i) gives that of the i-th module."""
    try:
        for i, module in enumerate(modules):
            open_seam(module, make(i))
        yield
    finally:
        for module in modules:
            close_seam(module)


@functools.cache
def _seamed(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass is needed because Python looks __call__ up in the class. It keeps
    the name, so that code which looks at names sees what it expects."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = functools.partial(original.__call__, self)
        return self._brigade_seam(inner, args, kwargs)

    return type(original.__name__, (original,), {"__call__": call, "_brigade_original": original})


@contextmanager
def uncompiled() -> Iterator[None]:
    """Without mx.compile: a compiled function gives the graphs of all its calls the same
    nodes, and then everything would seem to depend on everything."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


# --- values: arrays in tuples, lists, dicts and plain objects


def arrays_in(value: Any) -> list[mx.array]:
    """The arrays of a value, depth first."""
    return list(places_in(value).values())


def places_in(value: Any) -> dict[str, mx.array]:
    """The same by their place in it."""
    return dict(_places(value, ""))


def with_arrays(value: Any, arrays: Mapping[str, Any], place: str = "") -> Any:
    """A copy of a value with its arrays replaced; None where there is none for a place."""
    if isinstance(value, mx.array):
        return arrays.get(place)
    if isinstance(value, (list, tuple)):
        items = [with_arrays(item, arrays, f"{place}.{n}") for n, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    fields = _fields(value)
    if not fields:
        return value
    replaced = copy.copy(value)
    _fields(replaced).update(
        {name: with_arrays(v, arrays, f"{place}.{name}") for name, v in fields.items()}
    )
    return replaced


def snapshot(value: Any) -> Any:
    """A copy that does not change when the objects of the original are written to."""
    return with_arrays(value, places_in(value))


def _places(value: Any, place: str) -> Iterator[tuple[str, mx.array]]:
    if isinstance(value, mx.array):
        yield place, value
        return
    items = enumerate(value) if isinstance(value, (list, tuple)) else _fields(value).items()
    for key, item in items:
        yield from _places(item, f"{place}.{key}")


def write_back(targets: Sequence[Any], written: Sequence[Any]) -> None:
    """Makes mutable objects what a snapshot says that they became."""
    for target, value in zip(targets, written, strict=True):
        if isinstance(target, list):
            target[:] = value
        else:
            _fields(target).update(_fields(value))


def _fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else getattr(value, "__dict__", {})


# --- the lazy graph


class Graph(Generic[Key]):
    """How outputs are computed from sources, and these from each other. Raises PlanError
    if there are more of them than MLX can name in one graph."""

    def __init__(self, outputs: Sequence[mx.array], sources: Mapping[Key, mx.array]) -> None:
        by_array: dict[int, list[Key]] = defaultdict(list)
        for key, array in sources.items():
            by_array[id(array)].append(key)
        if len(outputs) + len(by_array) > _EXPORT_LIMIT:
            raise PlanError(f"This model gives more than {_EXPORT_LIMIT} arrays at once.")
        self._keys = {f"in{n}": keys for n, keys in enumerate(by_array.values())}
        # stop_gradient gives each output a node of its own, even if it is a source.
        self._sinks = {f"out{n}": mx.stop_gradient(array) for n, array in enumerate(outputs)}
        named = {name: sources[keys[0]] for name, keys in self._keys.items()}
        dot = io.StringIO()
        mx.export_to_dot(dot, **named, **self._sinks)
        self._parents: dict[str, list[str]] = defaultdict(list)
        for line in dot.getvalue().splitlines():
            if line[-1] != "}":  # "}" ends the lines that describe a node.
                parent, arrow, child = line.partition(" -> ")
                if arrow:
                    self._parents[child.strip('"')].append(parent.strip('"'))

    def used(self, known: Collection[Key], *, and_theirs: bool = False) -> set[Key]:
        """Which of the known sources the outputs need; of what those in turn are computed
        from only if asked for."""
        ends = {name for name, keys in self._keys.items() if any(key in known for key in keys)}
        reached: set[str] = set()
        todo = list(self._sinks)
        while todo:
            name = todo.pop()
            if name not in reached:
                reached.add(name)
                if and_theirs or name not in ends:
                    todo += self._parents[name]
        return {key for name in reached & ends for key in self._keys[name] if key in known}


def depends_on(outputs: Sequence[mx.array], sources: Mapping[Key, mx.array]) -> set[Key]:
    """The keys of the sources that the outputs are computed from, for any number of them."""
    room = _EXPORT_LIMIT // 2
    entries = list(sources.items())
    found: set[Key] = set()
    for some in (outputs[at : at + room] for at in range(0, len(outputs), room)):
        for at in range(0, len(entries), room):
            part = dict(entries[at : at + room])
            found |= Graph(some, part).used(part.keys(), and_theirs=True)
    return found
