"""The memory that MLX uses on this machine: how much it may still take, what stays in the GPU's
reach, and what goes back to the system.

macOS counts a GPU's memory differently from other memory. It pages out weights that are not wired,
MLX's cache keeps freed arrays, and memory that a killed process had wired is lost until the next
boot. Written from documentation; no Mac has run it yet.
"""

import json
import logging
import threading
from collections.abc import Callable

import mlx.core as mx
import psutil

from serve.core.sections import MemoryUse

_logger = logging.getLogger(__name__)

_MAX_SHARE = 0.8  # the share of a CPU's memory; the rest is for other programs
_MAX_GPU_SHARE = 0.9  # the share of a GPU's memory; the rest is for activations and MLX's cache
_MAX_CACHE_SHARE = 0.05
_MAX_CACHE_BYTES = 2 << 30
_KEPT_ALIVE_SECONDS = 300.0  # how long the weights stay wired after a step
_BEAT_SECONDS = 0.4
_MIN_MEASURED_TOKENS = 64
_NEW_SHARE = 0.5  # the weight of the latest step in a running mean


def free_bytes() -> int:
    """Returns the bytes that MLX may still use: on Apple's GPU a share of the recommended working
    set and of what other programs leave, on a CPU a share of the memory that is available."""
    available = psutil.virtual_memory().available
    if not mx.metal.is_available():
        return int(_MAX_SHARE * available)
    working_set = _MAX_GPU_SHARE * _recommended() - mx.get_active_memory()
    left_by_others = _MAX_GPU_SHARE * (available + mx.get_cache_memory())
    return max(0, int(min(working_set, left_by_others)))


def limit_cache() -> None:
    """Limits the freed arrays that MLX keeps. By default, they may fill nearly the whole GPU."""
    if mx.metal.is_available():
        mx.set_cache_limit(min(int(_MAX_CACHE_SHARE * _recommended()), _MAX_CACHE_BYTES))


def wire(num_processes: int) -> None:
    """Wires the memory that MLX uses, for one of num_processes engines on this host. Without this,
    large models decode 10 to 100 times slower on a GPU."""
    if mx.metal.is_available():
        mx.clear_cache()  # frees the arrays that loading has left
        mx.set_wired_limit(_recommended() // num_processes)


def tidy() -> None:
    """Gives back the freed arrays that MLX keeps, after work with arrays of many sizes."""
    if mx.metal.is_available():
        mx.clear_cache()


class StepMemory:
    """The memory that prefill steps take on Apple's GPU in addition to what stays."""

    def __init__(self) -> None:
        self.bytes_per_token = 0.0
        self._active_before = 0

    def begin(self) -> None:
        if mx.metal.is_available():
            mx.reset_peak_memory()
            self._active_before = mx.get_active_memory()

    def end(self, num_tokens: int) -> None:
        """Ends a prefill step of this many tokens."""
        if mx.metal.is_available() and num_tokens:
            taken = mx.get_peak_memory() - self._active_before
            # Few tokens may make a large buffer of keys and values grow.
            latest = taken / max(num_tokens, _MIN_MEASURED_TOKENS)
            before = self.bytes_per_token or latest
            self.bytes_per_token = before + _NEW_SHARE * (latest - before)
        tidy()

    def usage(self) -> MemoryUse:
        """Returns the use of memory for the report to the parent, in any thread."""
        active, cached = mx.get_active_memory(), mx.get_cache_memory()
        of_system = psutil.virtual_memory()
        head_room = of_system.available + cached
        if mx.metal.is_available():
            head_room = max(0, min(head_room, _recommended() - active))
        wired = getattr(of_system, "wired", None)  # only on macOS
        return MemoryUse(active, cached, wired, head_room, self.bytes_per_token)


def keep_wired(idle_seconds: Callable[[], float], is_ending: threading.Event) -> None:
    """Gives the GPU something to do now and then, until the process ends. idle_seconds says how
    long there has been no step: by reports, macOS unwires what a GPU has not used for a second, and
    the next step waits for it."""
    while not is_ending.wait(_BEAT_SECONDS):
        if _BEAT_SECONDS < idle_seconds() < _KEPT_ALIVE_SECONDS:
            try:
                mx.eval(mx.ones(1) + 1)
            except RuntimeError as error:  # A GPU that fails shows it in the next step too.
                _logger.warning("event=not_kept_wired reason=%s", json.dumps(str(error)))
                return


def seconds_for_last_step() -> float:
    """Returns how long a process that ends waits for its last step. Metal may lose the memory of a
    process that ends in the middle of one."""
    return 4.0 if mx.metal.is_available() else 0.5


def give_back() -> None:
    """Gives memory back to the system before this process ends."""
    if mx.metal.is_available():
        mx.set_wired_limit(0)
        mx.clear_cache()


def _recommended() -> int:
    return int(mx.device_info()["max_recommended_working_set_size"])
