"""Python runs this first where PYTHONPATH has its folder: it breaks engines from inside.

BROKEN_SEED is a seed with which drawing a token raises, FATAL_SEED one with which it ends the
engine as a stack overflow would. STEP_SECONDS is how much longer each step takes.
"""

import os
import signal
import sys
import time

if "serve.rank.worker" in sys.orig_argv:
    from serve.model.stage import Stage
    from serve.rank import sampling

    _key, _call = sampling._key, Stage.__call__

    def _breaking_key(seed, position):
        if str(seed) == os.environ.get("FATAL_SEED"):
            # In this thread, as a real one. With os.kill the main thread takes the signal, and this
            # one may send the token before the process ends.
            signal.raise_signal(signal.SIGSEGV)
        if str(seed) == os.environ.get("BROKEN_SEED"):
            raise ValueError(f"seed {seed}\nFORGED line of /a/path")
        return _key(seed, position)

    def _slow_call(self, *arguments):
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return _call(self, *arguments)

    sampling._key, Stage.__call__ = _breaking_key, _slow_call
