"""Whole pipelines in one process: scheduler, step loops and an in-process ring,
against mlx_lm on the whole model."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from serve.core.plan import even_split
from serve.core.types import Sampling, Sequence
from serve.core.wire import Result
from serve.front.scheduler import Scheduler
from serve.rank.outbox import Outbox
from serve.rank.slots import quantized
from serve.rank.stage import Stage
from serve.rank.transport import local_ring
from serve.rank.worker import StepLoop
from tests import architectures
from tests.models import build

PROMPTS = [[1 + i, 2, 3, *range(i)] for i in range(16)] + [[5]]
GREEDY = Sampling(temperature=0)
Make = Callable[[], nn.Module]
LLAMA = partial(build, "llama")
BUILDING = threading.Lock()


class LocalPipeline:
    def __init__(
        self, num_ranks: int, results: "queue.Queue[Result]", make: Make, kv_bits: int | None
    ) -> None:
        self.make, self.kv_bits = make, kv_bits
        self.ring = local_ring(num_ranks)
        self.results = results
        self.samplings: dict[int, Sampling] = {}
        self.outbox = Outbox(lambda step: self.ring[0].send(step, []))
        self.scheduler = Scheduler(num_ranks, max_num_sequences=32, max_queue=64, prefill_chunk=4)
        self.threads = [
            threading.Thread(target=self._run, args=(rank, layers))
            for rank, layers in enumerate(even_split(4, num_ranks))
        ]

    def _run(self, rank: int, layers: tuple[int, int]) -> None:
        # One after another, as in processes: the seed and the trial's seams are global.
        with BUILDING:
            stage = Stage(self.make(), *layers)
        loop = StepLoop(stage, self.ring[rank], self.kv_bits)
        loop.outbox = self.outbox
        loop.samplings = self.samplings
        for result in loop.run():
            self.results.put(result)

    def answer(self, sequences: list[Sequence]) -> dict[int, list[int]]:
        """Runs the sequences to their end, as serve.front.engine does."""
        for sequence in sequences:
            self.samplings[sequence.id] = sequence.sampling
            self.scheduler.add(sequence)
        self._pump()
        while self.scheduler.num_running or self.scheduler.waiting:
            result = self.results.get(timeout=30)
            self.scheduler.update(result.number, result.tokens)
            self._pump()
        return {sequence.id: sequence.output for sequence in sequences}

    def _pump(self) -> None:
        while step := self.scheduler.schedule():
            self.outbox.put(step)


@contextmanager
def pipeline(
    num_ranks: int, make: Make = LLAMA, kv_bits: int | None = None
) -> Iterator[LocalPipeline]:
    local = LocalPipeline(num_ranks, queue.Queue(), make, kv_bits)
    for thread in local.threads:
        thread.start()
    try:
        yield local
    finally:
        for transport in local.ring:
            transport.close()
        for thread in local.threads:
            thread.join(10)
            assert not thread.is_alive()


def whole_model(
    prompt: list[int], num_tokens: int, make: Make = LLAMA, kv_bits: int | None = None
) -> list[int]:
    model = make()
    cache = quantized(make_prompt_cache(model), kv_bits)
    steps = generate_step(mx.array(prompt), model, max_tokens=num_tokens, prompt_cache=cache)
    return [token for token, _ in steps]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_greedy_tokens_equal_mlx_lm(num_ranks: int) -> None:
    with pipeline(num_ranks) as local:
        alone = local.answer([Sequence(100, PROMPTS[3], 12, GREEDY, frozenset())])
        sequences = [Sequence(i, p, 12, GREEDY, frozenset()) for i, p in enumerate(PROMPTS)]
        together = local.answer(sequences)
    expected = {i: whole_model(prompt, 12) for i, prompt in enumerate(PROMPTS)}
    assert len({tuple(tokens) for tokens in expected.values()}) > 8, "the model says one thing only"
    assert together == expected
    assert alone[100] == expected[3]


@pytest.mark.parametrize("name", ["gemma2", "gemma4_text", "recurrent_gemma"])
def test_greedy_tokens_of_other_architectures(name: str) -> None:
    """Rows that cannot share caches, keys and values that cross a cut, and one-token
    prompts beside longer rows."""
    make = partial(architectures.build, name)
    prompts = [*PROMPTS[:5], [5], [9]]
    with pipeline(2, make) as local:
        sequences = [Sequence(i, p, 9, GREEDY, frozenset()) for i, p in enumerate(prompts)]
        together = local.answer(sequences)
    assert together == {i: whole_model(prompt, 9, make) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("kv_bits", [4, 8])
def test_greedy_tokens_with_quantised_keys_and_values(kv_bits: int) -> None:
    make = partial(build, "qwen3", head_dim=32)
    with pipeline(2, make, kv_bits) as local:
        sequences = [Sequence(i, p, 12, GREEDY, frozenset()) for i, p in enumerate(PROMPTS)]
        together = local.answer(sequences)
    expected = {i: whole_model(prompt, 12, make, kv_bits) for i, prompt in enumerate(PROMPTS)}
    assert together == expected
    exact = {i: whole_model(prompt, 12, make) for i, prompt in enumerate(PROMPTS)}
    assert together != exact, "nothing was quantised"


def test_a_seed_gives_the_same_tokens_whoever_shares_the_batch() -> None:
    def sampled(id: int, seed: int) -> Sequence:
        return Sequence(id, PROMPTS[5], 10, Sampling(1.5, 0.95, seed), frozenset())

    with pipeline(2) as local:
        alone = local.answer([sampled(50, seed=3)])[50]
        crowd = local.answer([sampled(i, seed=i) for i in range(8)])
    assert crowd[3] == alone
    assert len({tuple(tokens) for tokens in crowd.values()}) == 8, "seeds make no difference"
