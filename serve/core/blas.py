"""The environment in which MLX's Linux CPU wheel multiplies with OpenBLAS."""

import sys
from collections.abc import Mapping
from pathlib import Path

# The wheel links the reference BLAS, which is about 30 times slower.
_OPENBLAS = (
    "/usr/lib/x86_64-linux-gnu/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
)


def with_openblas(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a process that runs MLX: on Linux it preloads OpenBLAS, if that
    is installed, with one thread. Variables that are already set stay as they are."""
    chosen = dict(environment)
    installed = [path for path in _OPENBLAS if Path(path).exists()]
    if sys.platform == "linux" and installed:
        chosen.setdefault("LD_PRELOAD", installed[0])
        chosen.setdefault("OPENBLAS_NUM_THREADS", "1")
    return chosen
