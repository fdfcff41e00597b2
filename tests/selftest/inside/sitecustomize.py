"""Python runs this first where PYTHONPATH has its folder: it breaks processes of a self-test.

Each line of SELFTEST_FAULT is `PROGRAM | MODULE:NAME = EXPRESSION`: in processes of that program,
the name gets the value of the expression, which may use `os`, `signal`, `time` and the module's own
names.
"""

import importlib
import os
import signal
import sys
import time

for line in os.environ.get("SELFTEST_FAULT", "").splitlines():
    program, _, change = line.partition(" | ")
    if program not in sys.orig_argv:
        continue
    place, _, expression = change.partition(" = ")
    name, _, attribute = place.partition(":")
    module = importlib.import_module(name)
    known = {**vars(module), "os": os, "signal": signal, "time": time}
    setattr(module, attribute, eval(expression, known))
