"""Python runs this first where PYTHONPATH has its folder: it keeps a rank of a training run in a
function forever, as MLX does in a sum.

HOLD_AT names the function, such as serve.tune.results.card:write. HOLD_FILE is a file with the
number of a rank, which removes the file when it calls the function, and stays there. Nothing
happens while the file is missing, or in the first HOLD_AFTER calls. There are no charts, as in
tests/tune/without_charts.
"""

import functools
import importlib
import itertools
import os
import sys
import threading
from pathlib import Path

_file = Path(os.environ["HOLD_FILE"])
_calls = itertools.count(-int(os.environ["HOLD_AFTER"]))
sys.modules["matplotlib"] = None


def _held(function):
    @functools.wraps(function)
    def call(*arguments, **named):
        if next(_calls) >= 0 and _file.exists() and _file.read_text() == os.environ["MLX_RANK"]:
            _file.unlink()
            _stay()
        return function(*arguments, **named)

    return call


def _stay():
    while True:
        try:
            threading.Event().wait()
        except SystemExit:
            continue  # MLX returns for no signal.


if "serve.cli.fine_tune" in sys.orig_argv:
    _module, _, _path = os.environ["HOLD_AT"].partition(":")
    *_owners, _name = _path.split(".")
    _owner = functools.reduce(getattr, _owners, importlib.import_module(_module))
    setattr(_owner, _name, _held(getattr(_owner, _name)))
