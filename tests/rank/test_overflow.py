"""Pipelines in one process in which some sequences overflow: of an architecture each, quantised,
or through an adapter. No other sequence says anything else than alone."""

import itertools
import random
from collections.abc import Sequence as ReadableList
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import pytest

from serve.core.messages import Result
from serve.core.types import Event, Sampling, Sequence
from serve.front.parts.interface import SchedulerPart
from serve.front.pipeline.scheduler import Scheduler
from tests.models import build
from tests.rank.test_pipeline import GREEDY, LocalPipeline, Make, pipeline, whole_model

BAD = 95
NUM_TOKENS = 8
AT_ONCE = 40
PROMPTS = [[random.Random(n).randrange(1, 90) for _ in range(1 + n * n % 40)] for n in range(12)]


def model(name: str, **config: int) -> nn.Module:
    made = build(name, **config)
    made.model.embed_tokens.weight[BAD] = mx.nan
    made.lm_head.weight[BAD] = 0  # so that no answer has it
    return made


class Watched(Scheduler):
    """Remembers how sequences end."""

    def __init__(self, parts: ReadableList[SchedulerPart]) -> None:
        super().__init__(2, max_num_sequences=12, max_queue=64, prefill_chunk=24, parts=parts)
        self.reuse = "any"
        self.ends: dict[int, str] = {}

    def update(self, result: Result) -> list[Event]:
        events = super().update(result)
        self.ends |= {e.sequence: e.finish_reason for e in events if e.finish_reason}
        return events


def alone(make: Make, kv_bits: int | None = None) -> list[list[int]]:
    return [whole_model(prompt, NUM_TOKENS, make, kv_bits) for prompt in PROMPTS]


def num_changed(local: LocalPipeline, expected: list[list[int]], num: int, adapter: int = 0) -> int:
    """Counts the answers, out of num, that change while half as many sequences overflow: through a
    token, or through an adapter."""
    local.scheduler = scheduler = Watched(local.scheduler.parts)
    ids, wrong = itertools.count(), 0
    chance = random.Random(7)
    for _ in range(0, num, AT_ONCE):
        numbers = [chance.randrange(len(PROMPTS)) for _ in range(AT_ONCE)]
        asked = [Sequence(next(ids), PROMPTS[n], NUM_TOKENS, GREEDY, frozenset()) for n in numbers]
        bad = []
        for n in range(AT_ONCE // 2):
            prompt = [3] * chance.randrange(50) + [7 if adapter else BAD, 9]
            sampling = Sampling(temperature=n % 2, prompt_logprobs=2 if n % 3 == 0 else None)
            bad.append(Sequence(next(ids), prompt, NUM_TOKENS, sampling, frozenset(), adapter))
        mixed = asked + bad
        chance.shuffle(mixed)
        local.answer(mixed)
        answers = [sequence.output for sequence in asked]
        wrong += sum(got != expected[n] for n, got in zip(numbers, answers, strict=True))
        assert all(scheduler.ends[s.id] == "overflowed" and not s.output for s in bad)
        assert not {s.id for s in bad}.intersection(scheduler.budget.kept)
    return wrong


@pytest.mark.parametrize(
    ("name", "kv_bits"), [("llama", None), ("qwen3", 8), ("deepseek_v3", None)]
)
def test_overflow_in_one_sequence_changes_no_other_answer(name: str, kv_bits: int | None) -> None:
    make = partial(model, name, **({"head_dim": 32} if kv_bits else {}))
    expected = alone(make, kv_bits)
    with pipeline(2, make, kv_bits) as local:
        assert num_changed(local, expected, 80) == 0


@pytest.mark.slow
def test_overflow_in_one_sequence_changes_none_of_a_thousand_answers() -> None:
    make = partial(model, "llama")
    expected = alone(make)
    with pipeline(2, make) as local:
        assert num_changed(local, expected, 1000) == 0
