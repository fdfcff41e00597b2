"""Python runs this first where PYTHONPATH has its folder: it breaks engines from inside.

BROKEN_SEED is a seed with which drawing a token raises, FATAL_SEED one with which it ends the
engine as a stack overflow would. STEP_SECONDS is how much longer each step takes.

With GPU_SECONDS, MLX fails as it does on Metal: work of the GPU that takes longer is an error, also
if it waits for a sum of the shards, which the CPU computes. GPU_COST is how many times longer
decode steps take if each sum is evaluated separately.
"""

import os
import signal
import sys
import threading
import time

METAL = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
)
TICK_SECONDS = 0.05
MOST_SECONDS_OF_A_TICK = 0.5  # on a busy machine


class _Metal:
    """A GPU's watchdog. Its clock stands still while this process is stopped: a GPU goes on."""

    def __init__(self, max_seconds):
        from serve.ring import sums

        self.max_seconds = max_seconds
        self.seconds = 0.0
        self.summand = self.sum = None
        self.is_summand_done = False
        threading.Thread(target=self.tick, daemon=True).start()
        distributed = vars(mx.distributed)
        for name in ("all_sum", "all_gather"):
            distributed[name] = functools.partial(self.add_up, distributed[name])
        self.eval, mx.eval = mx.eval, self.checked_eval
        sums.has_gpu = lambda exchange: True
        cost = float(os.environ["GPU_COST"])
        sums.Sums._chain_seconds = lambda self, group, waits=False: cost if waits else 1.0

    def tick(self):
        before = time.monotonic()
        while True:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            self.seconds += min(now - before, MOST_SECONDS_OF_A_TICK)
            before = now

    def add_up(self, original, x, **kwargs):
        self.summand, self.sum = x, original(x, **kwargs)
        self.is_summand_done = False
        return self.sum

    def checked_eval(self, *arrays):
        only = arrays[0] if len(arrays) == 1 else None
        is_cpu = only is not None and only is self.sum and self.is_summand_done
        before = self.seconds
        self.eval(*arrays)
        if only is not None and only is self.summand:
            self.is_summand_done = True
        if self.seconds - before > self.max_seconds and not is_cpu:
            raise RuntimeError(METAL)


if "serve.rank.worker" in sys.orig_argv:
    import functools

    import mlx.core as mx

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
    if "GPU_SECONDS" in os.environ:
        _Metal(float(os.environ["GPU_SECONDS"]))
