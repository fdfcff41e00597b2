"""Writes to standard output, and survives a reader that has gone."""

import os
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console


class StandardOutput(Console):
    """Standard output that ignores failed writes, once nobody reads it or its disk is full."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()
