"""The names of the files in a run's folder, and the check that a folder is free for a new run. This
needs no MLX, so a taken folder is reported before MLX is loaded."""

from pathlib import Path

from serve.core.errors import UsageError
from serve.lora.files import CONFIG_FILE, MLX_FILE, PEFT_FILE

ADAPTERS = MLX_FILE
CONFIG = CONFIG_FILE
CARD = "README.md"
METRICS = "metrics.jsonl"
BEST = "best"
PEFT = "peft"
CHECKPOINTS = "checkpoints"


def folder_of(folder: Path, iteration: int) -> Path:
    """Returns the folder of a run's checkpoint after `iteration` batches."""
    return folder / CHECKPOINTS / f"{iteration:07d}"


def whole_checkpoints(folder: Path) -> list[Path]:
    """Returns a run's complete checkpoints, the oldest first."""
    paths = (folder / CHECKPOINTS).glob("*")
    return sorted(path for path in paths if path.name.isdecimal())


def check_free(folder: Path) -> None:
    """Raises UsageError if the folder contains a checkpoint, an adapter or a README.md."""
    if whole_checkpoints(folder):
        raise UsageError(
            f"--adapter-path {folder} already contains a run: give another folder, or "
            "--resume to continue it."
        )
    for name in (ADAPTERS, PEFT_FILE, CARD):
        if (folder / name).exists():
            raise UsageError(
                f"--adapter-path {folder} contains {name} but no run: give another folder."
            )


def check_resumable(folder: Path) -> None:
    """Raises UsageError if there is no checkpoint to continue from."""
    if not whole_checkpoints(folder):
        raise UsageError(f"--resume: {folder} contains no checkpoint: leave out --resume.")
