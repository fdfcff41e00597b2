"""The weights of one stage, out of a local model folder. Those of other stages are
never read: mlx-lm builds the model on lazy arrays, and only what the stage keeps is
evaluated."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from serve.core.errors import ModelError
from serve.rank.stage import Stage

_PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """bytes_read is what the process really read from files, None where the system
    does not tell (it does on Linux)."""

    stage: Stage
    bytes_owned: int
    bytes_read: int | None


def load_stage(
    folder: Path, start: int, end: int, progress: Callable[[float], None]
) -> LoadedStage:
    """Builds layers [start, end) and reads their weights; progress gets 0.0 to 1.0."""
    before = _bytes_read()
    stage = Stage(build_model(folder), start, end)
    weights = list(stage.weights().values())
    bytes_owned = sum(array.nbytes for array in weights)
    done = 0
    for part in _parts(weights):
        try:
            mx.eval(part)  # Here, in parts, so that loading can be seen to go on.
        except RuntimeError as error:
            raise ModelError(f"The weights in {folder} cannot be read: {error}.") from error
        done += sum(array.nbytes for array in part)
        progress(done / bytes_owned)
    after = _bytes_read()
    read = None if before is None or after is None else after - before
    return LoadedStage(stage, bytes_owned, read)


def build_model(folder: Path) -> nn.Module:
    try:
        model, _ = load_model(folder, lazy=True)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
        raise ModelError(f"mlx-lm cannot build the model in {folder}: {error}.") from error
    return model


def _parts(weights: list[mx.array]) -> list[list[mx.array]]:
    parts: list[list[mx.array]] = [[]]
    size = 0
    for array in weights:
        if size > _PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(array)
        size += array.nbytes
    return parts


def _bytes_read() -> int | None:
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in text.splitlines())["rchar"])
