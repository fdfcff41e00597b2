"""How much memory MLX may still use on this machine."""

import os
from pathlib import Path

import mlx.core as mx

_MOST_SHARE = 0.8
"""Other programs live here too."""


def free_bytes() -> int:
    """On a GPU what the system recommends to use at most, on a CPU what is available, less
    what is in use already."""
    if mx.metal.is_available():
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        return max(0, recommended - mx.get_active_memory())
    return int(_MOST_SHARE * _available_bytes())


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
