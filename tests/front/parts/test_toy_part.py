"""A part can be added by registration alone: this one counts tokens that repeat the one before, and
a client finds the number in the usage of its chat completion."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx2
import pytest

from serve.core import types
from serve.core.config import ServeConfig
from serve.core.messages import Loaded, ToEngine
from serve.core.plan import StagePlan
from serve.core.types import Step
from serve.front.parts import registry
from serve.front.parts.interface import SchedulerPart
from serve.front.pipeline.generation import Generation
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.requests import Requests
from serve.front.pipeline.status import StageStatus
from serve.front.text.tokens import Tokenizer
from serve.parent.engines import Engines
from tests.configs import serve_config
from tests.front.fakes import MAX_CONTEXT, FakeEngine, Running, byte_level, save
from tests.front.pipeline.stage_model import result_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


class RepeatedTokens(SchedulerPart):
    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self.latest: dict[int, int] = {}  # the latest token of each sequence

    def took(self, sequence: types.Sequence, tokens: Sequence[int]) -> None:
        for token in tokens:
            sequence.usage["repeated_tokens"] += token == self.latest.get(sequence.id)
            self.latest[sequence.id] = token

    def ended(self, sequence: types.Sequence) -> None:
        self.latest.pop(sequence.id, None)


class SchedulingEngine(FakeEngine):
    """Has the scheduler and its parts, and stages that say answer_ids."""

    def __init__(self, tokenizer: Tokenizer, answer_ids: list[int]) -> None:
        super().__init__(tokenizer)
        self.answer_ids = answer_ids
        engines = cast(Engines, SimpleNamespace(send=self._send))
        self.requests = Requests(serve_config(model=Path("model")), 1, engines)
        stage = StageStatus(0, "h", StagePlan(0, (0, 4), 0, 0, 10, 0, 0, 0.5, None))
        stage.loaded = Loaded(0, None, 0, 10**6, "none")
        self.requests.settle([stage])
        self.requests.resume()

    def submit(
        self, prompts: Sequence[Prompt], adapter_version: int = 0, cache_scope: str = ""
    ) -> Generation:
        return self.requests.submit(prompts, adapter_version, cache_scope)

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, Step):
            result = result_of(message, self._token)
            asyncio.get_running_loop().call_soon(self.requests.on_result, result)

    def _token(self, sequence: int, position: int) -> int:
        prompt = self.requests.scheduler.sequence(sequence).prompt
        return self.answer_ids[min(position - len(prompt), len(self.answer_ids) - 1)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(registry, "PARTS", [*registry.PARTS, RepeatedTokens])
    tokenizer = Tokenizer(save(byte_level(), tmp_path))
    (hello, world) = tokenizer.encode("aé")[:2]
    answer = [hello, hello, world, world, world, hello, min(tokenizer.eos_ids)]
    with Running(SchedulingEngine(tokenizer, answer), max_context=MAX_CONTEXT) as running:
        yield running


def test_a_toy_part_reports_repeated_tokens_in_usage(server: Running) -> None:
    for _ in range(2):
        reply = httpx2.post(f"{server.url}/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert usage["completion_tokens"] == 7
        assert usage["completion_tokens_details"]["repeated_tokens"] == 3


def test_a_toy_part_forgets_sequences_that_have_ended(server: Running) -> None:
    httpx2.post(f"{server.url}/v1/chat/completions", json=CHAT)
    parts = server.engine.requests.scheduler.parts  # type: ignore[attr-defined]
    (toy,) = [part for part in parts if isinstance(part, RepeatedTokens)]
    assert not toy.latest


def test_a_prompt_that_no_part_takes_is_refused(server: Running) -> None:
    parts = server.engine.requests.scheduler.parts  # type: ignore[attr-defined]
    parts[:] = [part for part in parts if isinstance(part, RepeatedTokens)]
    asked = {"model": "tiny", "input": "hello"}
    reply = httpx2.post(f"{server.url}/v1/embeddings", json=asked)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "missing_part"
