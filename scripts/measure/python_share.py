"""The share of a decode step in which one rank runs Python instead of MLX's arithmetic.

As a program: prints the share for the model in a folder.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from serve.core.blas import with_openblas

PROMPT_TOKENS = 66
NUM_WARM_UPS = 10
NUM_STEPS = 60


def python_share(model: Path) -> float:
    """Returns the median share over the steps of one row. It is measured in a process of its own,
    with the BLAS of a rank."""
    words = [sys.executable, "-m", __name__, str(model)]
    environment = with_openblas(os.environ)
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return float(ended.stdout)


def _measure(folder: Path) -> float:
    """Times the steps of a rank that holds all layers, and how much of that is spent in mx.eval."""
    import mlx.core as mx

    from serve.core.checkpoint import read_checkpoint
    from serve.core.types import Row, Sampling, Step
    from serve.model.weights import load_stage
    from serve.rank.step_loop import StepLoop
    from serve.ring.transport import LocalTransport

    num_layers = read_checkpoint(folder).num_layers
    loaded = load_stage(folder, 0, num_layers, lambda *_: None)
    loop = StepLoop(loaded.stage, LocalTransport(), folder=folder, batchable=True)
    evaluate = mx.eval
    evaluating = 0.0

    def timed(*arrays: Any) -> None:
        nonlocal evaluating
        started = time.perf_counter()
        evaluate(*arrays)
        evaluating += time.perf_counter() - started

    mx.eval = timed
    loop.chooser.admit(0, Sampling(temperature=0), PROMPT_TOKENS, [])
    prompt = tuple(range(1, PROMPT_TOKENS))
    loop.forward(Step(1, 1, (Row(0, 0, len(prompt)),), prompt, sample=False), [])
    shares: list[float] = []
    token = 1
    for n in range(NUM_WARM_UPS + NUM_STEPS):
        step = Step(n + 2, 0, (Row(0, len(prompt) + n, 1),), (token,), sample=True)
        evaluating = 0.0
        started = time.perf_counter()
        result = loop.chooser.result(step, loop.forward(step, []))
        seconds = time.perf_counter() - started
        (token,) = result.tokens
        if n >= NUM_WARM_UPS:
            shares.append(1 - evaluating / seconds)
    return median(shares)


if __name__ == "__main__":
    print(_measure(Path(sys.argv[1])))
