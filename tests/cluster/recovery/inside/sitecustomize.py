"""Python runs this first where PYTHONPATH has its folder: parents wait long for engines that leave
their ring, although they may be silent on a busy machine. The next sitecustomize of the path, such
as that of tests/on_cpu, runs as well."""

import os
import runpy
import sys
from pathlib import Path

SECONDS = 60.0
PROGRAMS = {"brigade", "serve", "serve.cli.main"}  # a parent may be any of these

if PROGRAMS.intersection(Path(word).name for word in sys.orig_argv):
    from serve.parent import engine

    engine._LEAVE_SECONDS = engine._SILENT_SECONDS = SECONDS

_, *_others = os.environ["PYTHONPATH"].split(os.pathsep)
for _file in [Path(folder) / "sitecustomize.py" for folder in _others]:
    if _file.exists():
        runpy.run_path(str(_file))
        break
