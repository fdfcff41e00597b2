"""The adapters of a stage: read and checked, and the matrices of all of them in its modules.

Rows of one forward may have different adapters. Each adapter has a slot; a module holds the
matrices of all slots, and each row is multiplied with those of its own. Slot 0 is nobody's and
stays zero.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from serve.core.errors import AdapterError, EngineError
from serve.core.types import Step
from serve.rank import trace
from serve.rank.adapter_files import AdapterFiles, Target, read_adapter
from serve.rank.stage import Stage

_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
_ADAPTABLE = (nn.Linear, nn.QuantizedLinear, *_EMBEDDINGS, *_EXPERTS)
_LEAST_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Matrices:
    """For one module, in float32: a (in, rank), and b (rank, out) times the scale. With DoRA
    gain (1, out) is what the magnitudes make of each output, less one."""

    a: mx.array
    b: mx.array
    gain: mx.array | None


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """What a stage has read of an adapter: all that belongs to its own modules."""

    files: AdapterFiles
    matrices: dict[str, Matrices]

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes for m in self.matrices.values() for a in (m.a, m.b))


@dataclass(frozen=True, slots=True)
class _Place:
    """A module of the stage: the number of its layer and its name in it; None and "" outside
    of layers."""

    module: nn.Module
    layer: int | None
    inside: str


class Adapters:
    """Versions are numbers that rank 0 gives. `read` may be called from another thread than
    the rest, which is the step loop's."""

    def __init__(self, stage: Stage) -> None:
        self._places = dict(_places(stage))
        self._num_layers = len(stage.layers)
        self._read: dict[int, ReadAdapter] = {}
        self._slots: dict[int, int] = {}
        self._num_slots = 0
        self._adapted: dict[str, _Adapted] = {}
        self._rows = _Rows()

    @property
    def num_bytes(self) -> int:
        waiting = sum(read.num_bytes for read in list(self._read.values()))
        return waiting + sum(array.nbytes for array in self._arrays())

    def read(self, version: int, path: str, root: str | None, max_rank: int) -> ReadAdapter:
        """Checks the whole adapter and reads what belongs to this stage. Raises AdapterError,
        and then nothing has changed."""
        files = read_adapter(path, root)
        if files.rank > max_rank:
            raise AdapterError(f"The adapter has rank {files.rank}: --max-lora-rank is {max_rank}.")
        for name, place in self._places.items():
            wanted = files.expects(name, place.layer, place.inside, self._num_layers)
            if wanted and name not in files.targets:
                raise AdapterError(f"The adapter has no tensors for {name}; its config says so.")
        own = {name: t for name, t in files.targets.items() if name in self._places}
        for name, target in own.items():
            _check(name, self._places[name].module, files, target)
        matrices = _read_matrices(files, own, {n: self._places[n].module for n in own})
        self._read[version] = ReadAdapter(files, matrices)
        return self._read[version]

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """What rank 0 gets to know of a `read` that it has asked for. targets is all modules
        that the adapter is for, own those of this stage."""
        version = message["version"]
        try:
            read = self.read(version, *(message[name] for name in ("path", "root", "max_rank")))
        except AdapterError as error:
            refused = {"message": str(error), "status": error.http_status}
            return {"version": version, "error": refused}
        targets = read.files.targets
        scales = {target.scale for target in targets.values()}
        return {
            "version": version,
            "error": None,
            "digest": read.files.digest,
            "targets": sorted(targets),
            "own": sorted(read.matrices),
            "kinds": sorted({name.rpartition(".")[2] for name in targets}),
            "lora_rank": read.files.rank,
            "scale": scales.pop() if len(scales) == 1 else None,
            "num_bytes": read.num_bytes,
        }

    # --- in the step loop

    def apply(self, step: Step) -> list[mx.array]:
        """Frees and makes ready what a step says. Returns the arrays to evaluate before its
        forward: until then they keep tables from being written in place."""
        new = {row.adapter for row in step.rows}.difference(self._slots, {0})
        for version in step.unload:
            self._unload(version)
        for version in sorted(new):
            self._install(version)
        return self._arrays() if new or step.unload else []

    def _install(self, version: int) -> None:
        read = self._read.pop(version, None)
        if read is None:
            raise EngineError(f"A step names adapter version {version}, which is not here.")
        slot = min(set(range(1, len(self._slots) + 2)).difference(self._slots.values()))
        if slot >= self._num_slots:
            self._move({s: s for s in self._slots.values()}, 2 * self._num_slots)
        self._slots[version] = slot
        for name, matrices in read.matrices.items():
            if name not in self._adapted:
                self._adapted[name] = _Adapted(name, self._places[name].module, self._rows)
            self._adapted[name].write(slot, matrices, self._num_slots)

    def _unload(self, version: int) -> None:
        self._read.pop(version, None)
        slot = self._slots.pop(version, None)
        if slot is None:
            return
        for adapted in self._adapted.values():
            adapted.clear(slot)
        if 4 * (len(self._slots) + 1) <= self._num_slots > _LEAST_SLOTS:
            moved = {old: new for new, old in enumerate(self._slots.values(), start=1)}
            self._slots = {version: moved[slot] for version, slot in self._slots.items()}
            self._move(moved, self._num_slots // 2)

    def select(self, versions: Sequence[int | None]) -> None:
        """The versions of the rows of the next forward; 0 is none, None a row that only fills
        the batch up."""
        slots = [self._slots[v] if v else 0 for v in versions]
        own = {slot for slot, v in zip(slots, versions, strict=True) if v is not None}
        self._rows.alone = min(own) if len(own) == 1 else None
        self._rows.index = mx.array(slots) if len(own) > 1 else None
        self._rows.used = own - {0}

    def _move(self, moved: Mapping[int, int], num_slots: int) -> None:
        """Puts old slots in the places of new ones. What is free becomes zero."""
        self._num_slots = max(_LEAST_SLOTS, num_slots)
        sources = {new: old for old, new in moved.items()}
        for adapted in self._adapted.values():
            adapted.move([sources.get(slot, 0) for slot in range(self._num_slots)])

    def _arrays(self) -> list[mx.array]:
        return [array for adapted in list(self._adapted.values()) for array in adapted.arrays()]


def _places(stage: Stage) -> Iterator[tuple[str, _Place]]:
    layers = {
        id(module): (i, inside)
        for i in range(stage.start, stage.end)
        for inside, module in stage.layers[i].named_modules()
    }
    for name, module in stage.model.named_modules():
        if isinstance(module, _ADAPTABLE) and "weight" in module:
            yield name, _Place(module, *layers.get(id(module), (None, "")))


# --- reading


def _check(name: str, module: nn.Module, files: AdapterFiles, target: Target) -> None:
    """Raises AdapterError if the matrices do not fit the module."""
    if isinstance(module, _EXPERTS) or (files.is_dora and isinstance(module, _EMBEDDINGS)):
        kind = "DoRA" if files.is_dora else "LoRA"
        raise AdapterError(f"{name} is a {type(module).__name__}: no {kind} on it is supported.")
    rows, columns = module["weight"].shape
    if "scales" in module:
        columns = columns * 32 // module.bits
    num_in, num_out = (rows, columns) if isinstance(module, _EMBEDDINGS) else (columns, rows)
    shapes = {"a": (num_in, target.rank), "b": (target.rank, num_out), "m": (num_out,)}
    for part, tensor in target.parts.items():
        shape = shapes[part][::-1] if files.is_peft else shapes[part]
        if files.tensors[tensor].shape != shape:
            found = files.tensors[tensor].shape
            raise AdapterError(f"{tensor} has the shape {found}, this model needs {shape}.")


def _read_matrices(
    files: AdapterFiles, targets: Mapping[str, Target], modules: Mapping[str, nn.Module]
) -> dict[str, Matrices]:
    """Reads no more of the file than these, and evaluates all of it: what is lazy belongs to
    its thread."""
    matrices = {}
    try:
        tensors = mx.load(str(files.file))
        assert isinstance(tensors, dict)
        for name, target in targets.items():
            parts = {part: tensors[tensor] for part, tensor in target.parts.items()}
            matrices[name] = _matrices(parts, target, files, modules[name])
    except (RuntimeError, KeyError) as error:
        raise AdapterError(f"{files.file.name} cannot be read: {error}.") from error
    return matrices


def _matrices(
    parts: dict[str, mx.array], target: Target, files: AdapterFiles, module: nn.Module
) -> Matrices:
    whole = {part: array.astype(mx.float32) for part, array in parts.items()}
    a, b = (array.T if files.is_peft else array for array in (whole["a"], whole["b"]))
    a, b = mx.contiguous(a), target.scale * b
    gain = None
    if files.is_dora:
        norm = mx.linalg.norm(_weight(module) + (a @ b).T, axis=1)
        gain = (whole["m"] / norm - 1)[None]
    finite = {part: mx.isfinite(array).all() for part, array in whole.items()}
    mx.eval(a, b, gain, finite)
    for part, is_finite in finite.items():
        if not is_finite.item():
            raise AdapterError(f"{target.parts[part]} has values that are not finite numbers.")
    return Matrices(a, b, gain)


def _weight(module: nn.Module) -> mx.array:
    """(out, in) of a linear module."""
    weight: mx.array = module["weight"]
    if "scales" not in module:
        return weight
    return mx.dequantize(
        weight,
        module["scales"],
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


# --- in the forward


@dataclass(slots=True)
class _Rows:
    """The slots of the rows of the forward under way. alone is that of all, if it is the same
    one, else index (B,) tells them."""

    used: frozenset[int] | set[int] = frozenset()
    alone: int | None = 0
    index: mx.array | None = None

    def apart(self, x: mx.array, name: str) -> mx.array:
        """(B, L, D) out of (B, ..., D) or (B * L, D), if rows differ."""
        if self.index is None:
            return x
        if x.shape[0] % self.index.size:
            raise EngineError(f"{name} gets {x.shape}: its rows cannot be told from each other.")
        return x.reshape(self.index.size, -1, x.shape[-1])

    def pick(self, table: mx.array) -> mx.array:
        return table[self.alone] if self.index is None else table[self.index]

    def times(self, x: mx.array, table: mx.array) -> mx.array:
        """Each row (L, in) times its own matrix in table (slots, in, out)."""
        if self.index is None:
            return x @ table[self.alone]
        return mx.gather_mm(x, table, rhs_indices=self.index)


class _Adapted:
    """One module, which adds what the adapters of its rows say. Where none of them has
    anything to say it is the plain module."""

    def __init__(self, name: str, module: nn.Module, rows: _Rows) -> None:
        self._name, self._rows = name, rows
        self._bias = module["bias"] if "bias" in module else mx.array(0.0)
        self._empty()
        if isinstance(module, _EMBEDDINGS):
            trace.open_seam(module, self._embed)
            # A tied head. A seam is for calls only.
            as_linear = functools.partial(self._as_linear, module.as_linear)
            object.__setattr__(module, "as_linear", as_linear)
        else:
            trace.open_seam(module, self._project)

    def arrays(self) -> list[mx.array]:
        return [table for table in (self._a, self._b, self._gain) if table is not None]

    # Tables: a (slots, in, rank), b (slots, rank, out) and with DoRA gain (slots, 1, out).

    def _empty(self) -> None:
        self._held: set[int] = set()
        self._a: Any = None
        self._b: Any = None
        self._gain: Any = None

    def write(self, slot: int, new: Matrices, num_slots: int) -> None:
        (num_in, rank), num_out = new.a.shape, new.b.shape[1]
        if self._a is None:
            self._a = mx.zeros((num_slots, num_in, rank))
            self._b = mx.zeros((num_slots, rank, num_out))
        if (more := rank - self._a.shape[2]) > 0:
            self._a = mx.pad(self._a, [(0, 0), (0, 0), (0, more)])
            self._b = mx.pad(self._b, [(0, 0), (0, more), (0, 0)])
        self._a[slot, :, :rank], self._b[slot, :rank] = new.a, new.b
        if new.gain is not None:
            if self._gain is None:
                self._gain = mx.zeros((num_slots, 1, num_out))
            self._gain[slot] = new.gain
        self._held.add(slot)

    def clear(self, slot: int) -> None:
        if slot in self._held:
            self._held.remove(slot)
            for table in self.arrays():
                table[slot] = 0
        if not self._held:
            self._empty()

    def move(self, sources: list[int]) -> None:
        """The slot of each new one; slot 0 for one that is free."""
        self._held = {new for new, old in enumerate(sources) if old in self._held}
        index = mx.array(sources)
        self._a, self._b, self._gain = (
            None if table is None else table[index] for table in (self._a, self._b, self._gain)
        )

    # Called in place of the module's own.

    def _is_used(self) -> bool:
        return not self._held.isdisjoint(self._rows.used)

    def _project(self, call: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
        y = call(*args, **kwargs)
        if not self._is_used():
            return y
        x, base = (self._rows.apart(value, self._name) for value in (args[0], y))
        delta = self._rows.times(self._rows.times(x, self._a), self._b).astype(y.dtype)
        output = base + delta
        if self._gain is not None:
            # Zero for a row without DoRA, so that its output stays as it is.
            gain = self._rows.pick(self._gain)
            output = output + (gain * (base - self._bias + delta)).astype(y.dtype)
        return output.reshape(y.shape)

    def _embed(self, call: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
        y = call(*args, **kwargs)
        if not self._is_used():
            return y
        ids, index = args[0], self._rows.index
        rows = self._a[self._rows.alone][ids] if index is None else self._a[index[:, None], ids]
        return y + self._rows.times(rows, self._b).astype(y.dtype)

    def _as_linear(self, call: Callable[..., mx.array], x: mx.array) -> mx.array:
        y = call(x)
        if not self._is_used():
            return y
        inner = self._rows.times(self._rows.apart(x, self._name), self._b.swapaxes(1, 2))
        delta = self._rows.times(inner, self._a.swapaxes(1, 2))
        return y + delta.reshape(y.shape).astype(y.dtype)
