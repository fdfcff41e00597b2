"""Checks an adapter against the modules of a stage, and reads the matrices for them."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from serve.core.errors import AdapterError, ModelError
from serve.lora.files import CONFIG_FILE, AdapterFiles, TargetModule, file_stamp
from serve.lora.layers import EMBEDDINGS, EXPERTS, Matrices, ModuleMatrices, dequantized
from serve.model.sharding import DIVIDED, Division, Divisions
from serve.model.stage import Stage

if TYPE_CHECKING:
    from serve.hub.partial import PartialModel

_ADAPTABLE = (nn.Linear, nn.QuantizedLinear, *DIVIDED, *EMBEDDINGS, *EXPERTS)


@dataclass(frozen=True, slots=True)
class Place:
    """A module of the stage. layer is the number of its layer, and `inside` its name in the layer;
    None and "" outside of layers. router chooses its experts. division is this shard's part of the
    module; None means all of it."""

    module: nn.Module
    layer: int | None
    inside: str
    router: nn.Module | None
    division: Division | None


def places(stage: Stage, divisions: Divisions) -> Iterator[tuple[str, Place]]:
    """Yields the modules of a stage that an adapter may change, with their full names."""
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
            yield name, Place(module, layer, inside, router, divisions.get(name))


def checksum(files_digest: str, modules: ModuleMatrices) -> str:
    """Computes a checksum of matrices, to notice files that change between two reads."""
    digest = hashlib.sha256(files_digest.encode())
    for name, matrices in sorted(modules.items()):
        digest.update(name.encode())
        for array in (matrices.a, matrices.b, matrices.gain):
            if array is not None:
                digest.update(memoryview(cast(Any, array)))
    return digest.hexdigest()


def num_bytes(modules: ModuleMatrices) -> int:
    """Returns the number of bytes of all matrices a and b."""
    return sum(matrices.a.nbytes + matrices.b.nbytes for matrices in modules.values())


def check_fit(name: str, place: Place, files: AdapterFiles, target: TargetModule) -> None:
    """Raises AdapterError if the matrices do not fit the module."""
    module = place.module
    if not _is_supported(place, files):
        file_format = "PEFT" if files.is_peft else "mlx-lm"
        kind = "DoRA" if files.is_dora else "LoRA"
        raise AdapterError(
            f"{name} is a {type(module).__name__}: {file_format}'s {kind} on it is not supported.",
            code="unsupported_layer",
        )
    _check_division(name, place, files)
    shape = module["weight"].shape
    if place.division:
        shape = place.division.whole_shape(shape)
    *experts, rows, columns = shape
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
        wanted = shapes[part]
        if is_transposed:
            wanted = wanted[::-1]
        pattern = (*experts, *wanted)
        _check_shape(tensor, files.tensors[tensor].shape, pattern, target.rank)


def _is_supported(place: Place, files: AdapterFiles) -> bool:
    """Whether the module can have an adapter of this kind and format."""
    if isinstance(place.module, EMBEDDINGS):
        return not files.is_dora
    if isinstance(place.module, EXPERTS):
        return place.router is not None and not files.is_peft and not files.is_dora
    return True


def _check_division(name: str, place: Place, files: AdapterFiles) -> None:
    """Raises AdapterError if a shard cannot apply its part alone: DoRA needs whole rows."""
    division = place.division
    if division is None or division.axis == -2:
        return
    kind = "DoRA" if files.is_dora else "LoRA"
    if division.axis != -1 or files.is_dora:
        raise AdapterError(
            f"{name} is divided among shards in a way that {kind} does not support: use another "
            "adapter, or serve without --tensor-parallel-size.",
            code="unsupported_layer",
        )


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
            f"{tensor} has the shape {found}, but rank {rank} in {CONFIG_FILE} needs {shape}.",
            code="wrong_shape",
        )
    raise AdapterError(
        f"This adapter was made for another model: {tensor} has the shape {found}, this model "
        f"needs {shape}.",
        code="other_model",
    )


def _matches_with_any_rank(found: tuple[int, ...], pattern: tuple[int | None, ...]) -> bool:
    if len(found) != len(pattern):
        return False
    for own, size in zip(found, pattern, strict=True):
        if size is not None and own != size:
            return False
    return True


def fetch(partial: "PartialModel", targets: Mapping[str, TargetModule]) -> None:
    """Fetches the tensors of these targets from the hub. Raises AdapterError."""
    names: list[str] = []
    for target in targets.values():
        names += target.parts.values()
    try:
        partial.fetch(names, lambda *_: None)
    except ModelError as error:
        raise AdapterError(str(error), 503, code=error.code) from error


def read_matrices(
    files: AdapterFiles,
    targets: Mapping[str, TargetModule],
    own_places: Mapping[str, Place],
) -> ModuleMatrices:
    """Reads the matrices of these targets only; for a divided module, this shard's part of them.
    Evaluates them, because a lazy array belongs to one thread. Raises AdapterError."""
    matrices: ModuleMatrices = {}
    try:
        tensors = mx.load(str(files.file))
        assert isinstance(tensors, dict)
        for name, target in targets.items():
            parts = {part: tensors[tensor] for part, tensor in target.parts.items()}
            matrices[name] = _matrices(parts, target, files, own_places[name])
        has_changed = files.stamp not in (None, file_stamp(files.file))
    except (RuntimeError, KeyError, OSError) as error:
        reason = str(error).rstrip(".")
        raise AdapterError(f"{files.file.name} cannot be read: {reason}.") from error
    if has_changed:
        raise AdapterError(
            f"{files.file.name} changed while it was read: load it again.", 409, code="changed_file"
        )
    return matrices


def _matrices(
    parts: dict[str, mx.array],
    target: TargetModule,
    files: AdapterFiles,
    place: Place,
) -> Matrices:
    """Returns the matrices for one module, from the tensors of the file by part (a, b and m)."""
    module = place.module
    division = place.division
    a = parts["a"].astype(mx.float32)
    b = parts["b"].astype(mx.float32)
    is_transposed = files.is_peft or isinstance(module, EXPERTS)
    if is_transposed:
        a = a.swapaxes(-1, -2)
        b = b.swapaxes(-1, -2)
    if division and division.axis == -1:
        a = division.own_part(a, -2)
    elif division:
        b = division.own_part(b, -1)
    a = mx.contiguous(a)
    b = mx.contiguous(target.scale * b)
    gain = None
    made = {"a": a, "b": b}
    if files.is_dora:
        magnitudes = parts["m"].astype(mx.float32)
        if division:
            magnitudes = division.own_part(magnitudes, 0)
        adapted_weight = dequantized(module) + (a @ b).T
        norm = mx.linalg.norm(adapted_weight, axis=1)
        gain = (magnitudes / norm - 1)[None]
        made["m"] = gain
    finite = {part: mx.isfinite(array).all() for part, array in made.items()}
    mx.eval(a, b, gain, finite)
    for part, is_finite in finite.items():
        if not is_finite.item():
            raise AdapterError(
                f"{target.parts[part]} has values that are not finite numbers.", code="not_finite"
            )
    return Matrices(a, b, gain)
