"""Whole pipelines in one process: scheduler, step loops and an in-process ring,
against mlx_lm on the whole model."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from serve.core.messages import Embed, FromEngine, Result
from serve.core.outputs import Embedding, Scores
from serve.core.plan import even_split
from serve.core.types import Pooling, Sampling, Score, Sequence, Step
from serve.front.parts.interface import SchedulerPart
from serve.front.pipeline.scheduler import Scheduler
from serve.model.caches import quantized
from serve.model.stage import Stage
from serve.rank.batching import can_batch
from serve.rank.parts.interface import Surroundings
from serve.rank.step_loop import StepLoop
from serve.ring.transport import local_ring
from tests import architectures
from tests.front.pipeline.simulation import prompt_of
from tests.models import build
from tests.rank.loops import ORDER, loop_of, surroundings_of

PROMPTS = [[1 + i, 2, 3, *range(i)] for i in range(16)] + [[5]]
GREEDY = Sampling(temperature=0)
Make = Callable[[], nn.Module]
FromPart = tuple[int, FromEngine]
LocalPipelineT = TypeVar("LocalPipelineT", bound="LocalPipeline")
LLAMA = partial(build, "llama")
BUILDING = threading.Lock()


class LocalPipeline:
    """A scheduler, and a step loop on each rank. results has the results of rank 0, and beside its
    rank every message that a part sends."""

    def __init__(
        self,
        num_ranks: int,
        make: Make = LLAMA,
        kv_bits: int | None = None,
        parts: tuple[SchedulerPart, ...] = (),
        num_groups: int | None = None,
    ) -> None:
        self.make, self.kv_bits = make, kv_bits
        self.ring = local_ring(num_ranks)
        self.loops: dict[int, StepLoop] = {}
        self.results: queue.Queue[Result | FromPart] = queue.Queue()
        # Of the prompts of sequences that will be added, by their ids.
        self.boundaries: dict[int, tuple[int, ...]] = {}
        self.poolings: dict[int, Pooling] = {}
        self.embeddings: dict[int, bytes | None] = {}
        self.scores: dict[int, dict[int, Score]] = defaultdict(dict)
        self.scheduler = Scheduler(
            num_ranks,
            max_num_sequences=32,
            max_queue=64,
            prefill_chunk=4,
            num_groups=num_groups,
            parts=parts,
        )
        self.built = threading.Barrier(num_ranks)
        self.started = threading.Event()
        self.threads = [
            threading.Thread(target=self._run, args=(rank, layers))
            for rank, layers in enumerate(even_split(4, num_ranks))
        ]

    def _run(self, rank: int, layers: tuple[int, int]) -> None:
        # One after another, and no step before, as in processes: the seed and what a trial puts
        # in the place of mlx's functions are global.
        with BUILDING:
            model = self.make()
            batchable = can_batch(model)
            surroundings = self._surroundings(rank, Stage(model, *layers), batchable)
            loop = self.loops[rank] = loop_of(surroundings, self.ring[rank])
            self._built(loop)
        self.built.wait(60)
        self.started.set()
        for result in loop.run():
            self.results.put(result)

    def _built(self, loop: StepLoop) -> None:
        """Changes a loop before it runs."""

    def _surroundings(self, rank: int, stage: Stage, batchable: bool) -> Surroundings:
        order = msgspec.structs.replace(
            ORDER,
            rank=rank,
            ring=tuple(range(len(self.ring))),
            kv_bits=self.kv_bits,
        )
        return surroundings_of(
            stage,
            self.ring[rank],
            order,
            batchable=batchable,
            send=lambda message: self.results.put((rank, message)),
        )

    def _take(self, result: Result | FromPart) -> None:
        if not isinstance(result, Result):
            self.scheduler.on_message(*result)
            return
        for each in result.outputs_of(Scores):
            self.scores[each.sequence] |= dict(enumerate(each.scores, each.position))
        for embedding in result.outputs_of(Embedding):
            self.embeddings[embedding.sequence] = embedding.numbers
        self.scheduler.update(result)

    def _add(self, sequences: list[Sequence]) -> None:
        prompts = {s.id: prompt_of(s, self.boundaries.get(s.id, ())) for s in sequences}
        self.scheduler.add(*sequences, prompts=prompts)

    def leave(self, sequence: Sequence, num_tokens: int) -> None:
        """Runs a sequence until its answer has num_tokens tokens, then ends it as if its client had
        disconnected."""
        self._add([sequence])
        self._pump()
        while len(sequence.output) < num_tokens:
            self._take(self.results.get(timeout=60))
            self._pump()
        self.scheduler.drop(sequence.id, may_keep=True)
        self._pump()
        while self.scheduler.num_in_flight:
            self._take(self.results.get(timeout=60))
            self._pump()

    def answer(self, sequences: list[Sequence]) -> dict[int, list[int]]:
        """Runs the sequences to their end, as serve.front.pipeline.engine does."""
        self._add(sequences)
        self._pump()
        while self.scheduler.num_running or self.scheduler.num_waiting:
            self._take(self.results.get(timeout=60))
            self._pump()
        return {sequence.id: sequence.output for sequence in sequences}

    def _pump(self) -> None:
        assert self.started.wait(60)
        while True:
            step = self.scheduler.schedule()
            if step is None:
                return
            if not isinstance(step, Step):
                for loop in self.loops.values():
                    loop.parts.obey(step)
                continue
            for id in step.begun:
                self._begin(self.scheduler.sequence(id))
            self.loops[0].put(step)

    def _begin(self, sequence: Sequence) -> None:
        num_prompt = len(sequence.prompt)
        if pooling := self.poolings.get(sequence.id):
            self.loops[0].parts.obey(Embed(sequence.id, pooling, num_prompt))
        else:
            sampling = sequence.sampling
            is_read = any(part.reads_tokens for part in self.scheduler.parts)
            tokens = sequence.tokens if is_read or sampling.reads_tokens else []
            self.loops[0].chooser.admit(sequence.id, sampling, num_prompt, tokens)


@contextmanager
def running(local: LocalPipelineT) -> Iterator[LocalPipelineT]:
    for thread in local.threads:
        thread.start()
    try:
        yield local
    finally:
        for transport in local.ring:
            transport.close()
        for thread in local.threads:
            thread.join(60)
            assert not thread.is_alive()


def pipeline(
    num_ranks: int,
    make: Make = LLAMA,
    kv_bits: int | None = None,
    parts: tuple[SchedulerPart, ...] = (),
    num_groups: int | None = None,
) -> AbstractContextManager[LocalPipeline]:
    return running(LocalPipeline(num_ranks, make, kv_bits, parts, num_groups))


def whole_model(
    prompt: list[int], num_tokens: int, make: Make = LLAMA, kv_bits: int | None = None
) -> list[int]:
    model = make()
    cache = quantized(make_prompt_cache(model), kv_bits)
    steps = generate_step(mx.array(prompt), model, max_tokens=num_tokens, prompt_cache=cache)
    return [token for token, _ in steps]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_greedy_tokens_equal_those_of_mlx_lm(num_ranks: int) -> None:
    with pipeline(num_ranks) as local:
        alone = local.answer([Sequence(100, PROMPTS[3], 12, GREEDY, frozenset())])
        sequences = [Sequence(i, p, 12, GREEDY, frozenset()) for i, p in enumerate(PROMPTS)]
        together = local.answer(sequences)
    expected = {i: whole_model(prompt, 12) for i, prompt in enumerate(PROMPTS)}
    assert len({tuple(tokens) for tokens in expected.values()}) > 8, "the model says one thing only"
    assert together == expected
    assert alone[100] == expected[3]


@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_neither_chunks_nor_kept_prefixes_change_greedy_tokens(chunk: int) -> None:
    """Two turns of chats that begin alike; the second begins as a copy of the first."""
    prompts = {i: [*range(1, 20), i, *range(5 * i)] for i in range(5)}
    with pipeline(2) as local:
        local.scheduler = Scheduler(2, max_num_sequences=32, max_queue=64, prefill_chunk=chunk)
        local.scheduler.reuse = "any"
        first = {i: Sequence(i, p, 9, GREEDY, frozenset()) for i, p in prompts.items()}
        local.answer(list(first.values()))
        turns = {10 + i: [*s.tokens, 7, 8, i] for i, s in first.items()}
        second = {i: Sequence(i, p, 9, GREEDY, frozenset()) for i, p in turns.items()}
        local.answer(list(second.values()))
    for i, sequence in second.items():
        assert sequence.num_cached == len(first[i - 10].tokens) - 1
    prompts |= turns
    expected = {i: whole_model(prompt, 9) for i, prompt in prompts.items()}
    assert {i: s.output for i, s in (first | second).items()} == expected


@pytest.mark.parametrize("name", ["gemma2", "gemma4_text", "recurrent_gemma"])
def test_greedy_tokens_of_other_architectures_equal_those_of_mlx_lm(name: str) -> None:
    """Rows that cannot share caches, keys and values that cross a cut, and one-token
    prompts beside longer rows."""
    make = partial(architectures.build, name)
    prompts = [*PROMPTS[:5], [5], [9]]
    with pipeline(2, make) as local:
        sequences = [Sequence(i, p, 9, GREEDY, frozenset()) for i, p in enumerate(prompts)]
        together = local.answer(sequences)
    assert together == {i: whole_model(prompt, 9, make) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("kv_bits", [pytest.param(4, marks=pytest.mark.long), 8])
def test_greedy_tokens_with_quantised_keys_and_values_equal_those_of_mlx_lm(kv_bits: int) -> None:
    make = partial(build, "qwen3", head_dim=32)
    with pipeline(2, make, kv_bits) as local:
        sequences = [Sequence(i, p, 12, GREEDY, frozenset()) for i, p in enumerate(PROMPTS)]
        together = local.answer(sequences)
    expected = {i: whole_model(prompt, 12, make, kv_bits) for i, prompt in enumerate(PROMPTS)}
    assert together == expected
    exact = {i: whole_model(prompt, 12, make) for i, prompt in enumerate(PROMPTS)}
    assert together != exact, "nothing was quantised"


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    def sampled(id: int, seed: int) -> Sequence:
        return Sequence(id, PROMPTS[5], 10, Sampling(1.5, 0.95, seed), frozenset())

    with pipeline(2) as local:
        alone = local.answer([sampled(50, seed=3)])[50]
        crowd = local.answer([sampled(i, seed=i) for i in range(8)])
    assert crowd[3] == alone
    assert len({tuple(tokens) for tokens in crowd.values()}) == 8, "seeds make no difference"


# --- scores, penalties, copies


def log_softmax(tokens: list[int]) -> np.ndarray:
    """(L, vocabulary): of the whole model, after each token."""
    (logits,) = LLAMA()(mx.array([tokens])).astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def check_scores(
    scores: dict[int, Score], tokens: list[int], positions: range, num_top: int
) -> None:
    exact = log_softmax(tokens)
    assert sorted(scores) == list(positions)
    for position, score in scores.items():
        likely = exact[position - 1]
        assert score.token == tokens[position]
        assert score.logprob == pytest.approx(likely[score.token], abs=1e-4)
        assert len(score.top) == num_top
        for (id, logprob), best in zip(score.top, np.sort(likely)[::-1], strict=False):
            assert logprob == pytest.approx(likely[id], abs=1e-4)
            assert logprob == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(
    ("num_ranks", "chunk"),
    [
        (1, 3),
        (2, 4),
        (3, 64),
        *(
            pytest.param(*both, marks=pytest.mark.long)
            for both in [(1, 4), (1, 64), (2, 3), (2, 64), (3, 3), (3, 4)]
        ),
    ],
)
def test_prompt_scores_equal_those_of_the_whole_model(num_ranks: int, chunk: int) -> None:
    """In one chunk and in many, alone and beside others that ask for nothing."""
    asking = Sampling(temperature=0, logprobs=2, prompt_logprobs=2)
    with pipeline(num_ranks) as local:
        local.scheduler = Scheduler(
            num_ranks, max_num_sequences=32, max_queue=64, prefill_chunk=chunk
        )
        sequences = [
            Sequence(i, prompt, 3, GREEDY if i % 3 == 2 else asking, frozenset())
            for i, prompt in enumerate(PROMPTS)
        ]
        answers = local.answer(sequences)
    for i, prompt in enumerate(PROMPTS):
        assert answers[i] == whole_model(prompt, 3)
        whole = prompt + answers[i]
        if i % 3 == 2:
            assert i not in local.scores
        else:
            check_scores(local.scores[i], whole, range(1, len(whole)), 2)


def test_a_held_prompt_is_computed_again_if_its_scores_are_asked_for() -> None:
    prompt = [*range(1, 30)]
    asking = Sampling(temperature=0, prompt_logprobs=0)
    with pipeline(2) as local:
        local.scheduler.reuse = "any"
        local.answer([Sequence(0, prompt, 2, GREEDY, frozenset())])
        taken, scored = (
            Sequence(i, prompt, 1, s, frozenset()) for i, s in ((1, GREEDY), (2, asking))
        )
        local.answer([taken])
        local.answer([scored])
    assert taken.num_cached == len(prompt) - 1
    assert scored.num_cached == 0
    check_scores(local.scores[2], prompt, range(1, len(prompt)), 0)


def slow_penalties(prompt: list[int], sampling: Sampling, num_tokens: int) -> list[int]:
    """Greedy, on the whole model, from nothing at each token."""
    answer: list[int] = []
    for _ in range(num_tokens):
        logits = np.array(LLAMA()(mx.array([prompt + answer]))[0, -1], dtype=np.float64)
        for token in range(len(logits)):
            if token in prompt + answer:
                positive = logits[token] > 0
                logits[token] *= (1 / 1.3) if positive else 1.3
            logits[token] -= sampling.frequency_penalty * answer.count(token)
            logits[token] -= sampling.presence_penalty * (token in answer)
        answer.append(int(logits.argmax()))
    return answer


def test_penalties_count_earlier_tokens_even_after_a_sequence_begins_again() -> None:
    """There is room for two sequences at a time: the others are sent back again and again."""
    wanted = Sampling(0, frequency_penalty=0.6, presence_penalty=0.4, repetition_penalty=1.3)
    prompts = PROMPTS[2:7]
    with pipeline(2) as local:
        local.scheduler.budget.max_tokens = 36
        sequences = [Sequence(i, p, 14, wanted, frozenset()) for i, p in enumerate(prompts)]
        num_sent_back = count_calls(local.scheduler, "_send_back")
        answers = local.answer(sequences)
    assert num_sent_back() > 2
    assert answers == {i: slow_penalties(p, wanted, 14) for i, p in enumerate(prompts)}
    assert answers != {i: whole_model(p, 14) for i, p in enumerate(prompts)}


def count_calls(owner: object, name: str) -> Callable[[], int]:
    original = getattr(owner, name)
    calls: list[tuple[object, ...]] = []

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return original(*arguments)

    setattr(owner, name, counted)
    return lambda: len(calls)


@pytest.mark.parametrize("name", ["llama", "recurrent_gemma"])
def test_several_choices_begin_as_copies_of_one_prefilled_prompt(name: str) -> None:
    """Also where caches cannot go back, and without a prefix cache."""
    make = LLAMA if name == "llama" else partial(architectures.build, name)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    samplings = [Sampling(1.5, seed=seed, logprobs=0) for seed in (7, 8, 9)]
    with pipeline(2, make) as local:
        alone = [
            local.answer([Sequence(50 + i, prompt, 9, s, frozenset())])[50 + i]
            for i, s in enumerate(samplings)
        ]
        sequences = [Sequence(i, prompt, 9, s, frozenset()) for i, s in enumerate(samplings)]
        for copy in sequences[1:]:
            copy.original = sequences[0]
        together = local.answer(sequences)
    assert [together[i] for i in range(3)] == alone
    assert len(set(map(tuple, alone))) == 3
    assert [s.num_cached for s in sequences] == [0, len(prompt) - 1, len(prompt) - 1]
