"""The adapters of a stage: reads and checks them, and puts them into its modules or removes them
between steps.

`serve.lora.layers` applies them.
"""

import functools
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from serve.core.errors import AdapterError, EngineError, ModelError
from serve.core.messages import AdapterRead, AdapterRefused, LoadAdapter
from serve.core.types import Step
from serve.hub.partial import PartialModel, open_partial
from serve.hub.repo import ADAPTER
from serve.lora import copies
from serve.lora.files import (
    CONFIG_FILE,
    AdapterFiles,
    Target,
    file_stamp,
    read_adapter,
)
from serve.lora.layers import (
    EMBEDDINGS,
    EXPERTS,
    Adapted,
    Matrices,
    ModuleMatrices,
    Rows,
    note_routing,
)
from serve.model import trace
from serve.model.stage import Stage

_ADAPTABLE = (nn.Linear, nn.QuantizedLinear, *EMBEDDINGS, *EXPERTS)
_MIN_SLOTS = 4
_SUSPICIOUS = 100.0  # the size of an adapter's change ÷ the size of the module's weight
_TINY = 1e-30
_SAMPLED_ROWS = 64  # of a weight, to estimate its size


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """The part of an adapter that a stage has read: the matrices for its own modules."""

    files: AdapterFiles
    matrices: ModuleMatrices

    def checksum(self) -> str:
        """A checksum of the matrices, which differs if the files change between two reads."""
        digest = hashlib.sha256(self.files.digest.encode())
        for name, matrices in sorted(self.matrices.items()):
            digest.update(name.encode())
            for array in (matrices.a, matrices.b, matrices.gain):
                if array is not None:
                    digest.update(memoryview(array))  # type: ignore[arg-type]
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Place:
    """A module of the stage. layer is the number of its layer, inside its name in that layer; they
    are None and "" outside of layers. router is the module that chooses experts, if this one holds
    experts."""

    module: nn.Module
    layer: int | None
    inside: str
    router: nn.Module | None


class Adapters:
    """The adapters of one stage, by version, a number that rank 0 assigns.

    `read` may be called from another thread than the rest, which belongs to the step loop.
    cache_dir stores parts of hub adapters; copies is a folder that outlives this process.
    """

    def __init__(
        self,
        stage: Stage,
        cache_dir: Path | None = None,
        copies: Path | None = None,
    ) -> None:
        self._cache_dir = cache_dir
        self._copies = copies
        self._places = dict(_places(stage))
        self._num_layers = len(stage.layers)
        self._read: dict[int, ModuleMatrices] = {}
        self._uncopied: tuple[int, ModuleMatrices, AdapterRead] | None = None
        self._slots: dict[int, int] = {}
        self._num_slots = 0
        self._adapted: dict[str, Adapted] = {}
        self._rows = Rows()

    @property
    def num_bytes(self) -> int:
        waiting = list(self._read.values())
        waiting_bytes = sum(_num_bytes(matrices) for matrices in waiting)
        installed_bytes = sum(array.nbytes for array in self._arrays())
        return waiting_bytes + installed_bytes

    def read(
        self,
        version: int,
        path: str,
        root: str | None,
        max_rank: int,
        commit: str | None = None,
    ) -> ReadAdapter:
        """Checks the whole adapter and reads the matrices for this stage. With a commit, path is
        `org/name` on the hub. Raises AdapterError, and then nothing has changed."""
        partial = self._open(path, commit) if commit else None
        folder = str(partial.folder) if partial else path
        files = read_adapter(folder, root, is_whole=partial is None)
        if files.rank > max_rank:
            raise AdapterError(f"The adapter has rank {files.rank}: --max-lora-rank is {max_rank}.")
        self._check_targets(files)
        own: dict[str, Target] = {}
        modules: dict[str, nn.Module] = {}
        for name, target in files.targets.items():
            place = self._places.get(name)
            if place:
                _check(name, place, files, target)
                own[name] = target
                modules[name] = place.module
        if partial:
            _fetch(partial, own)
        matrices = _read_matrices(files, own, modules)
        self._warn_of_size(version, path, matrices)
        self._read[version] = matrices
        return ReadAdapter(files, matrices)

    def _check_targets(self, files: AdapterFiles) -> None:
        """Raises AdapterError if the adapter is for a model with another number of layers, or has
        no tensors for a module that its config names."""
        num_layers = files.num_layers
        other = (
            f"This adapter was made for another model: it has {num_layers} layers, this model has "
            f"{self._num_layers}."
        )
        if num_layers > self._num_layers:
            raise AdapterError(other)
        for name, place in self._places.items():
            wanted = files.expects(name, place.layer, place.inside, self._num_layers)
            if not wanted or name in files.targets:
                continue
            if num_layers and (place.layer or 0) >= num_layers:
                raise AdapterError(other)
            raise AdapterError(
                f"The adapter has no tensors for {name}, which its {CONFIG_FILE} names: it is "
                "incomplete, or was made for another model."
            )

    def _warn_of_size(
        self,
        version: int,
        path: str,
        matrices: Mapping[str, Matrices],
    ) -> None:
        """Logs a warning for a huge adapter, most likely the result of a training run that
        diverged. It can only harm its own requests, so it is not refused."""
        large: dict[str, float] = {}
        for name, own in matrices.items():
            size = _relative_size(own, self._places[name].module)
            if not size < _SUSPICIOUS:  # A NaN is suspicious too.
                large[name] = size
        if large:
            worst = max(large, key=lambda name: large[name])
            _logger.warning(
                "event=adapter_suspicious version=%d path=%s modules=%d worst=%s ratio=%.3g",
                *(version, json.dumps(path), len(large), worst, large[worst]),
            )

    def _open(self, repo: str, commit: str) -> PartialModel:
        try:
            return open_partial(repo, commit, self._cache_dir, kind=ADAPTER)
        except ModelError as error:
            raise AdapterError(str(error)) from error

    def answer(self, asked: LoadAdapter) -> AdapterRead | AdapterRefused:
        """Reads an adapter, and returns the answer to rank 0. A version that an earlier engine of
        this rank has read comes from its copy."""
        version = asked.version
        copy = self._copy_of(version, asked.held) if self._copies else None
        if copy:
            matrices, answer = copy
            for own in matrices.values():
                mx.eval(own.a, own.b, own.gain)
            self._read[version] = matrices
            return answer
        try:
            read = self.read(
                version,
                asked.path,
                asked.root,
                asked.max_rank,
                asked.commit,
            )
        except AdapterError as error:
            return AdapterRefused(version, str(error), error.http_status)
        targets = read.files.targets
        scales = {target.scale for target in targets.values()}
        kinds = {name.rpartition(".")[2] for name in targets}
        scale = scales.pop() if len(scales) == 1 else None
        answer = AdapterRead(
            version=version,
            digest=read.files.digest,
            checksum=read.checksum(),
            targets=sorted(targets),
            own=sorted(read.matrices),
            kinds=sorted(kinds),
            lora_rank=read.files.rank,
            scale=scale,
            num_bytes=_num_bytes(read.matrices),
        )
        self._uncopied = version, read.matrices, answer
        return answer

    def _copy_of(
        self,
        version: int,
        held: Collection[int],
    ) -> tuple[ModuleMatrices, AdapterRead] | None:
        """The copy of a version that an earlier engine of this rank has made; None if there is
        none, or if that engine had other layers."""
        assert self._copies
        copy = copies.read(self._copies, version, held)
        if not copy:
            return None
        _, answer = copy
        targets_here = self._places.keys() & answer.targets
        if answer.own != sorted(targets_here):
            return None
        return copy

    def copy(self) -> None:
        """Keeps a copy of the adapter that was read last. It is called after the answer was sent to
        rank 0, so that no request waits for the disk."""
        if self._copies and self._uncopied:
            copies.write(self._copies, *self._uncopied)
        self._uncopied = None

    # --- in the step loop

    def apply(self, step: Step) -> list[mx.array]:
        """Frees the versions that a step unloads and installs those that its rows need. Returns the
        arrays to evaluate before the forward: lazy arrays would keep tables from being written in
        place."""
        needed = {row.adapter_version for row in step.rows}
        new = needed.difference(self._slots, {0})
        for version in step.unload:
            self._unload(version)
        for version in sorted(new):
            self._install(version)
        if new or step.unload:
            return self._arrays()
        return []

    def _install(self, version: int) -> None:
        modules = self._read.pop(version, None)
        if modules is None:
            raise EngineError(f"A step names adapter version {version}, which is not here.")
        taken = set(self._slots.values())
        free = (number for number in itertools.count(1) if number not in taken)
        slot = next(free)
        if slot >= self._num_slots:
            unchanged = {number: number for number in taken}
            self._move(unchanged, 2 * self._num_slots)
        self._slots[version] = slot
        for name, matrices in modules.items():
            if name not in self._adapted:
                place = self._places[name]
                self._adapted[name] = Adapted(name, place.module, self._rows)
                if place.router:
                    trace.open_seam(place.router, functools.partial(note_routing, self._rows))
            self._adapted[name].write(slot, matrices, self._num_slots)

    def _unload(self, version: int) -> None:
        self._read.pop(version, None)
        slot = self._slots.pop(version, None)
        if slot is None:
            return
        for adapted in self._adapted.values():
            adapted.clear(slot)
        num_needed = len(self._slots) + 1  # Slot 0 is never free.
        if self._num_slots > _MIN_SLOTS and self._num_slots >= 4 * num_needed:
            moved: dict[int, int] = {}
            for new, (kept, old) in enumerate(self._slots.items(), start=1):
                moved[old] = new
                self._slots[kept] = new
            self._move(moved, self._num_slots // 2)

    def select(self, step: Step, rows: Sequence[int | None]) -> None:
        """Selects the adapters for the next forward, which has these rows of the step; None is a
        padding row."""
        if not self._slots:
            return  # Then every module is the plain one, whatever was selected before.
        slots: list[int] = []
        own: set[int] = set()
        for n in rows:
            version = 0 if n is None else step.rows[n].adapter_version
            slot = self._slots[version] if version else 0
            slots.append(slot)
            if n is not None:
                own.add(slot)
        if len(own) == 1:
            self._rows.alone = min(own)
        else:
            self._rows.alone = None
        if len(own) > 1:
            self._rows.index = mx.array(slots)
        else:
            self._rows.index = None
        self._rows.used = own - {0}

    def _move(self, moved: Mapping[int, int], num_slots: int) -> None:
        """Moves slots (old: new) within tables of num_slots slots. Free slots become zero."""
        self._num_slots = max(_MIN_SLOTS, num_slots)
        sources = [0] * self._num_slots
        for old, new in moved.items():
            sources[new] = old
        for adapted in self._adapted.values():
            adapted.move(sources)

    def _arrays(self) -> list[mx.array]:
        arrays: list[mx.array] = []
        for adapted in list(self._adapted.values()):
            arrays += adapted.arrays()
        return arrays


def _places(stage: Stage) -> Iterator[tuple[str, _Place]]:
    """The modules of a stage that an adapter may change, with their full names."""
    layers: dict[int, tuple[int, str]] = {}
    for i in range(stage.start, stage.end):
        for inside, module in stage.layers[i].named_modules():
            layers[id(module)] = (i, inside)
    modules = list(stage.model.named_modules())
    routers: dict[int, nn.Module] = {}
    for _, module in modules:
        if isinstance(module, (SwitchGLU, SwitchMLP)):
            for child in module.values():
                routers[id(child)] = module
    for name, module in modules:
        if isinstance(module, _ADAPTABLE) and "weight" in module:
            layer, inside = layers.get(id(module), (None, ""))
            router = routers.get(id(module))
            yield name, _Place(module, layer, inside, router)


def _num_bytes(modules: ModuleMatrices) -> int:
    num_bytes = 0
    for matrices in modules.values():
        num_bytes += matrices.a.nbytes + matrices.b.nbytes
    return num_bytes


# --- reading


def _check(name: str, place: _Place, files: AdapterFiles, target: Target) -> None:
    """Raises AdapterError if the matrices do not fit the module."""
    module = place.module
    if not _is_supported(place, files):
        file_format = "PEFT" if files.is_peft else "mlx-lm"
        kind = "DoRA" if files.is_dora else "LoRA"
        raise AdapterError(
            f"{name} is a {type(module).__name__}: {file_format}'s {kind} on it is not supported."
        )
    *experts, rows, columns = module["weight"].shape
    if "scales" in module:
        columns = columns * 32 // module.bits
    if isinstance(module, EMBEDDINGS):
        num_in = rows
        num_out = columns
    else:
        num_in = columns
        num_out = rows
    # None stands for the adapter's rank; all other sizes are the model's.
    shapes: dict[str, tuple[int | None, ...]]
    shapes = {
        "a": (num_in, None),
        "b": (None, num_out),
        "m": (num_out,),
    }
    is_transposed = files.is_peft or bool(experts)
    for part, tensor in target.parts.items():
        shape = shapes[part]
        if is_transposed:
            shape = shape[::-1]
        pattern = (*experts, *shape)
        _check_shape(tensor, files.tensors[tensor].shape, pattern, target.rank)


def _is_supported(place: _Place, files: AdapterFiles) -> bool:
    """Whether the module can have an adapter of this kind and format."""
    if isinstance(place.module, EMBEDDINGS):
        return not files.is_dora
    if isinstance(place.module, EXPERTS):
        return place.router is not None and not files.is_peft and not files.is_dora
    return True


def _check_shape(
    tensor: str,
    found: tuple[int, ...],
    pattern: tuple[int | None, ...],
    rank: int,
) -> None:
    """Raises AdapterError if a tensor's shape does not match. None in pattern stands for rank."""
    shape = tuple(rank if size is None else size for size in pattern)
    if found == shape:
        return
    if _matches_with_any_rank(found, pattern):
        raise AdapterError(
            f"{tensor} has the shape {found}, but rank {rank} in {CONFIG_FILE} needs {shape}."
        )
    raise AdapterError(
        f"This adapter was made for another model: {tensor} has the shape {found}, this model "
        f"needs {shape}."
    )


def _matches_with_any_rank(found: tuple[int, ...], pattern: tuple[int | None, ...]) -> bool:
    if len(found) != len(pattern):
        return False
    for own, size in zip(found, pattern, strict=True):
        if size is not None and own != size:
            return False
    return True


def _fetch(partial: PartialModel, targets: Mapping[str, Target]) -> None:
    names: list[str] = []
    for target in targets.values():
        names += target.parts.values()
    try:
        partial.fetch(names, lambda *_: None)
    except ModelError as error:
        raise AdapterError(str(error), 503) from error


def _read_matrices(
    files: AdapterFiles,
    targets: Mapping[str, Target],
    modules: Mapping[str, nn.Module],
) -> ModuleMatrices:
    """Reads the matrices for these targets, and nothing else of the file. They are evaluated here,
    because a lazy array belongs to the thread that made it."""
    matrices: ModuleMatrices = {}
    try:
        tensors = mx.load(str(files.file))
        assert isinstance(tensors, dict)
        for name, target in targets.items():
            parts = {part: tensors[tensor] for part, tensor in target.parts.items()}
            matrices[name] = _matrices(parts, target, files, modules[name])
        has_changed = files.stamp not in (None, file_stamp(files.file))
    except (RuntimeError, KeyError, OSError) as error:
        reason = str(error).rstrip(".")
        raise AdapterError(f"{files.file.name} cannot be read: {reason}.") from error
    if has_changed:
        raise AdapterError(f"{files.file.name} changed while it was read: load it again.", 409)
    return matrices


def _matrices(
    parts: dict[str, mx.array],
    target: Target,
    files: AdapterFiles,
    module: nn.Module,
) -> Matrices:
    """The matrices for one module, from the tensors of the file by part (a, b and m)."""
    a = parts["a"].astype(mx.float32)
    b = parts["b"].astype(mx.float32)
    is_transposed = files.is_peft or isinstance(module, EXPERTS)
    if is_transposed:
        a = a.swapaxes(-1, -2)
        b = b.swapaxes(-1, -2)
    a = mx.contiguous(a)
    b = mx.contiguous(target.scale * b)
    gain = None
    made = {"a": a, "b": b}
    if files.is_dora:
        magnitudes = parts["m"].astype(mx.float32)
        adapted_weight = _weight(module) + (a @ b).T
        norm = mx.linalg.norm(adapted_weight, axis=1)
        gain = (magnitudes / norm - 1)[None]
        made["m"] = gain
    finite = {part: mx.isfinite(array).all() for part, array in made.items()}
    mx.eval(a, b, gain, finite)
    for part, is_finite in finite.items():
        if not is_finite.item():
            raise AdapterError(f"{target.parts[part]} has values that are not finite numbers.")
    return Matrices(a, b, gain)


def _relative_size(matrices: Matrices, module: nn.Module) -> float:
    """The root mean square of the change of a module's weight, divided by that of the weight. Both
    are estimates: they look at the first expert and some rows. With DoRA it is the largest change
    of an output's magnitude."""
    if matrices.gain is not None:
        return _number(mx.abs(matrices.gain).max())
    first_expert = (0,) * (matrices.a.ndim - 2)
    a = matrices.a[first_expert]
    b = matrices.b[first_expert]
    largest_a = _number(mx.abs(a).max())
    largest_b = _number(mx.abs(b).max())
    if not largest_a or not largest_b:
        return 0.0
    # The squares of huge numbers would overflow.
    a = a / largest_a
    b = b / largest_b
    sum_of_squares = _number(((a.T @ a) * (b @ b.T)).sum())  # of all elements of a @ b
    num_elements = a.shape[0] * b.shape[1]
    change = math.sqrt(max(0.0, sum_of_squares) / num_elements)
    weight = _weight(module, _SAMPLED_ROWS).astype(mx.float32)
    weight_size = math.sqrt(_number(mx.square(weight).mean()))
    return change * largest_a * largest_b / max(weight_size, _TINY)


def _number(array: mx.array) -> float:
    return float(array.item())  # type: ignore[arg-type]


def _weight(module: nn.Module, num_rows: int | None = None) -> mx.array:
    """The weight (out, in) of a module, dequantized; with num_rows only its first rows."""
    arrays: dict[str, mx.array] = {}
    for name in ("weight", "scales", "biases"):
        if name not in module:
            continue
        array = module[name]
        if num_rows is not None:
            array = array.reshape(-1, array.shape[-1])[:num_rows]
        arrays[name] = array
    weight = arrays["weight"]
    if "scales" not in arrays:
        return weight
    return mx.dequantize(
        weight,
        arrays["scales"],
        arrays.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
