"""The CPU kernels that MLX compiles. Each costs a second of a compiler, and MLX keeps them below
TMPDIR: a test with a TMPDIR of its own would compile all of them again."""

import tempfile
from pathlib import Path


def share_kernels(folder: Path) -> None:
    """Lets programs whose TMPDIR is this folder use the kernels of all other tests."""
    kernels = Path(tempfile.gettempdir()) / "mlx"
    # MLX makes the folder where none is, but not through a link to nothing.
    kernels.mkdir(exist_ok=True)
    (folder / "mlx").symlink_to(kernels)
