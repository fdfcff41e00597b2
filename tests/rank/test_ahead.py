"""On one rank, the next step begins before the tokens of the one before are read."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import mlx.core as mx
import pytest

from serve.core.messages import Result
from serve.core.types import LAST_TOKEN, Row, Sampling, Sequence, Step
from serve.model import stage
from serve.model.stage import Stage
from serve.rank.chooser import Chooser
from serve.ring.transport import local_ring
from tests import architectures
from tests.models import build
from tests.rank.loops import loop_of, surroundings_of
from tests.rank.test_pipeline import (
    GREEDY,
    LLAMA,
    PROMPTS,
    FromPart,
    LocalPipeline,
    pipeline,
    running,
    slow_penalties,
    whole_model,
)

PROMPT = PROMPTS[3]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the loop begins to compute, hidden states or tokens, and which results it reads."""
    log: list[str] = []
    begin, read = mx.async_eval, Chooser.result

    def logged_begin(arrays: list[mx.array], *others: list[mx.array]) -> None:
        log.append("begin tokens" if arrays[0].ndim == 1 else "begin part")
        begin(arrays, *others)

    def logged_read(chooser: Chooser, step: Step, outputs: list[mx.array]) -> Result:
        log.append(f"read {step.number}")
        return read(chooser, step, outputs)

    monkeypatch.setattr(mx, "async_eval", logged_begin)
    monkeypatch.setattr(Chooser, "result", logged_read)
    return log


def tokens_of(steps: list[Step], sampling: Sampling = GREEDY) -> list[int]:
    """Runs steps of sequence 0, which are all there from the beginning."""
    (transport,) = local_ring(1)
    loop = loop_of(surroundings_of(Stage(LLAMA(), 0, 4)), transport)
    loop.chooser.admit(0, sampling, len(PROMPT), PROMPT if sampling.reads_tokens else [])
    for step in steps:
        loop.put(step)
    tokens: list[int] = []
    closing = threading.Event()
    for result in loop.run():
        tokens += result.tokens
        if result.number == steps[-1].number and not closing.is_set():
            closing.set()
            transport.close()
    return tokens


def steps_of(count: int) -> list[Step]:
    """The prompt but its last token, then steps that each feed the token of the one before."""
    *begin, last = PROMPT
    prompt = Step(1, 1, (Row(0, 0, len(begin)),), tuple(begin), sample=False)
    steps = [prompt]
    for n in range(count):
        token = LAST_TOKEN if n else last
        steps.append(Step(2 + n, 0, (Row(0, len(begin) + n, 1),), (token,), sample=True))
    return steps


@pytest.mark.parametrize(("num_layers", "first"), [(1, "begin part"), (8, "begin tokens")])
def test_each_step_begins_before_the_tokens_of_the_previous_step_are_read(
    log: list[str], monkeypatch: pytest.MonkeyPatch, num_layers: int, first: str
) -> None:
    """Of the next step only a part begins, up to the first seam: a CPU would compute it to the end
    before this one is read."""
    monkeypatch.setattr(stage, "_LAYERS_BETWEEN_SEAMS", num_layers)
    tokens = tokens_of(steps_of(3))
    assert log == [
        "read 1",  # of the prompt, which has no tokens
        *("begin tokens", first, "read 2"),
        *("begin tokens", first, "read 3"),
        *("begin tokens", "read 4"),
    ]
    assert tokens == whole_model(PROMPT, 3)


def test_a_gpu_begins_a_step_while_its_graph_is_built(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a step before, and in a prompt."""
    monkeypatch.setattr(stage, "_LAYERS_BETWEEN_SEAMS", 2)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    tokens = tokens_of(steps_of(2))
    assert log == [
        *("begin part", "begin part", "read 1"),
        *("begin part", "begin part", "begin tokens"),
        *("begin part", "read 2", "begin tokens", "read 3"),
    ]
    assert tokens == whole_model(PROMPT, 2)


def test_a_step_whose_sampling_needs_earlier_tokens_waits_for_them(log: list[str]) -> None:
    sampling = Sampling(0, frequency_penalty=0.6, presence_penalty=0.4, repetition_penalty=1.3)
    tokens = tokens_of(steps_of(4), sampling)
    assert log == [f"read {number}" for number in range(1, 6)]
    assert tokens == slow_penalties(PROMPT, sampling, 4)


@contextmanager
def counting(local: LocalPipeline) -> Iterator[list[str]]:
    """Runs a pipeline, and lists its steps that begin behind another. A step loop looks for one
    when the scheduler has seen all results and sent what it can: else it depends on the machine
    whether a step comes in time."""
    ahead: list[str] = []
    num_put, num_wanted = 0, 0
    all_seen = threading.Condition()
    is_over = False
    built, put, get = local._built, local.results.put, local.results.get

    def counted_put(result: Result | FromPart) -> None:
        nonlocal num_put
        with all_seen:
            num_put += 1
        put(result)

    def counted_get(timeout: float) -> Result | FromPart:
        nonlocal num_wanted
        with all_seen:
            num_wanted += 1
            all_seen.notify()
        return get(timeout=timeout)

    def counted(loop: object) -> None:
        built(loop)  # type: ignore[arg-type]
        following = loop._following  # type: ignore[attr-defined]

        def count(step: Step, seconds: float) -> Step | None:
            with all_seen:
                assert all_seen.wait_for(lambda: is_over or num_wanted > num_put, 60)
            found: Step | None = following(step, seconds)
            if found:
                ahead.append("step")
            return found

        loop._following = count  # type: ignore[attr-defined]

    local._built = counted  # type: ignore[method-assign]
    local.results.put = counted_put  # type: ignore[method-assign,assignment]
    local.results.get = counted_get  # type: ignore[method-assign,assignment]
    with running(local):
        try:
            yield ahead
        finally:
            with all_seen:
                is_over = True
                all_seen.notify()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4_text", "recurrent_gemma"])
def test_sequences_can_end_and_join_while_steps_run_ahead(name: str) -> None:
    """Answers end at an end token or by their lengths, and new prompts take their places."""
    make = LLAMA if name == "llama" else partial(architectures.build, name)
    expected = {i: whole_model(prompt, 12, make) for i, prompt in enumerate(PROMPTS)}
    sequences: list[Sequence] = []
    for i, prompt in enumerate(PROMPTS):
        ends = frozenset({expected[i][5]}) if i % 3 == 0 else frozenset[int]()
        sequences.append(Sequence(i, prompt, 12 - i % 5, GREEDY, ends))
    local = LocalPipeline(1, make)
    local.scheduler._num_at_once = 5
    with counting(local) as ahead:
        answers = local.answer(sequences)
    for sequence in sequences:
        wanted = expected[sequence.id][: sequence.max_tokens]
        for end in sequence.end_ids:
            wanted = wanted[: wanted.index(end) + 1]
        assert answers[sequence.id] == wanted
    assert len(ahead) > 5


def test_kept_prefixes_do_not_contain_tokens_after_the_end_of_an_answer() -> None:
    """The step behind an end token has fed it. A second turn begins with what is held."""
    prompt = [*range(1, 30)]
    first_answer = whole_model(prompt, 12)
    end = first_answer[7]
    with pipeline(1) as local:
        local.scheduler.reuse = "any"
        first = Sequence(0, prompt, 12, GREEDY, frozenset({end}))
        local.answer([first])
        assert first.output == first_answer[: first_answer.index(end) + 1]
        prompt = [*first.tokens, 7, 8]
        second = Sequence(1, prompt, 9, GREEDY, frozenset())
        local.answer([second])
    assert second.output == whole_model(prompt, 9)
    assert second.num_cached >= len(first.tokens) - 1


def test_running_ahead_changes_no_sampled_token_and_no_score() -> None:
    def sequences() -> list[Sequence]:
        samplings = [Sampling(1.5, 0.95, seed, logprobs=2) for seed in range(4)]
        return [Sequence(i, PROMPTS[i], 10, s, frozenset()) for i, s in enumerate(samplings)]

    one = LocalPipeline(1)
    with counting(one) as ahead:
        answers = one.answer(sequences())
    with pipeline(2) as two:
        assert two.answer(sequences()) == answers
    assert ahead
    assert one.scores == two.scores


def test_an_overflow_ends_only_its_own_row() -> None:
    """The step behind it is fed some token, and its output is dropped."""

    def make() -> object:
        model = build("llama")
        model.model.embed_tokens.weight[90] = mx.inf
        return model

    with pipeline(1, make) as local:  # type: ignore[arg-type]
        good = Sequence(0, PROMPT, 8, GREEDY, frozenset())
        bad = Sequence(1, [4, 90], 8, GREEDY, frozenset())
        answers = local.answer([good, bad])
    assert answers == {0: whole_model(PROMPT, 8), 1: []}
