"""Lets a process form another group of MLX after it has left one.

`mx.distributed.init` returns the group that it formed first until MLX's `clear_backends` is called.
Python sees that function only at exit, so it is called here by its name in MLX's library.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

_MAX_SHARE_OF_DESCRIPTORS = 0.5
_CLEAR_BACKENDS = "_ZN3mlx4core11distributed14clear_backendsEv"


def forget_groups() -> None:
    """Makes MLX forget the groups that it has formed. A group closes its connections when nothing
    refers to it any more. Raises OSError or AttributeError if this MLX has no such function."""
    _clear_backends()()


def objection() -> str | None:
    """Returns the reason why this process should not form another group, or None. This MLX may lack
    the function, or too many descriptors may be open: MLX leaves one open whenever it connects to a
    neighbour that does not listen yet. `brigade doctor` tests whether the function works."""
    num_open = len(os.listdir("/dev/fd"))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and num_open > _MAX_SHARE_OF_DESCRIPTORS * limit:
        return f"{num_open} of {limit} descriptors are open"
    try:
        _clear_backends()
    except (OSError, AttributeError) as error:
        return f"this MLX does not offer clear_backends ({type(error).__name__})"
    return None


def _clear_backends() -> Callable[[], Any]:
    name = "libmlx.dylib" if sys.platform == "darwin" else "libmlx.so"
    library = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / name))
    clear = library[_CLEAR_BACKENDS]
    clear.restype = None
    return clear
