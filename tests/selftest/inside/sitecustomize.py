"""Python runs this first where PYTHONPATH has its folder: it breaks processes of a self-test.

SELFTEST_FAULT is `PROGRAM | MODULE:NAME = EXPRESSION`: in processes of that program, the name gets
the value of the expression, which may use `os`, `signal`, `time` and the module's own names.
"""

import importlib
import os
import signal
import sys
import time

program, _, change = os.environ.get("SELFTEST_FAULT", "").partition(" | ")
if program and program in sys.orig_argv:
    place, _, expression = change.partition(" = ")
    name, _, attribute = place.partition(":")
    module = importlib.import_module(name)
    known = {**vars(module), "os": os, "signal": signal, "time": time}
    setattr(module, attribute, eval(expression, known))
