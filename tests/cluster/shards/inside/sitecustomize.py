"""Python runs this first where PYTHONPATH has its folder: drafts cost little, so that their number
does not depend on what was measured. With SHARED_HEAD, it also lets a test say which steps share
the head, whatever rank 0 has measured, and notes the steps that did.

SHARED_HEAD has the folder of both. Its file max_tokens is the largest number of tokens of a step
that shares the head. Each engine of the last stage writes a file of its own with a line for each
part of a step that shared it: the numbers of the step's rows and drafts.
"""

import os
import sys
from pathlib import Path

if "serve.rank.worker" in sys.orig_argv and "SHARED_HEAD" in os.environ:
    from serve.core.ops import ShareHead
    from serve.model.head import SharedHead
    from serve.rank.step_loop import StepLoop

    _folder = Path(os.environ["SHARED_HEAD"])
    _forward = StepLoop._forward

    def _noting_forward(self, step, received):
        if step.ops(ShareHead) and self.stage.is_last:
            with open(_folder / f"steps-{os.getpid()}", "a") as file:
                file.write(f"{len(step.rows)} {step.num_drafts}\n")
        return _forward(self, step, received)

    StepLoop._forward = _noting_forward
    SharedHead.max_tokens = property(
        lambda self: int((_folder / "max_tokens").read_text()),
        lambda self, measured: None,
    )

if "serve.cli.main" in sys.orig_argv:
    from serve.front.parts.drafts.model_guesses import ModelCosts
    from serve.front.parts.drafts.speculation import Speculation

    def _keep_whether_known(self, costs):
        self._has_model = costs is not None

    Speculation.timed = lambda self, seconds: None
    Speculation.token_cost = property(lambda self: 0.01, lambda self, measured: None)
    Speculation.model_costs = property(
        lambda self: ModelCosts(0.01, 0.01) if self._has_model else None,
        _keep_whether_known,
    )
