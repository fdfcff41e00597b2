"""The sizes of chunks follow the measured speed of the stages."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from serve.core.config import ServeConfig
from serve.core.messages import Admit, Loaded, Result
from serve.core.plan import StagePlan
from serve.core.types import Sampling, Step
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.requests import Requests
from serve.front.pipeline.status import StageStatus
from serve.parent.engines import Engines


def test_sizes_of_chunks_follow_the_measured_speed_from_the_first_prompt_on() -> None:
    all_sent: list[Admit | Step] = []
    engines = cast(Engines, SimpleNamespace(send=all_sent.append))
    requests = Requests(ServeConfig(model=Path()), 1, engines)
    stage = StageStatus(0, "h", StagePlan(0, (0, 4), 0, 0, 10, 0, 0, 0.5, None))
    stage.loaded = Loaded(0, None, 0, 10**6, "none")
    stage.pace.decode_seconds, stage.pace.prefill_seconds_per_token = 0.1, 0.01
    requests.settle([stage])
    requests.resume()
    requests.submit([Prompt([1] * 400, 1, (Sampling(),), frozenset())], 0, "")
    stage.pace.prefill_seconds_per_token = 0.005
    first = next(message for message in all_sent if isinstance(message, Step))
    requests.on_result(Result(first.number, ()))
    sent = [message for message in all_sent if isinstance(message, Step)]
    assert [step.rows[0].num_tokens for step in sent] == [90, 180]
