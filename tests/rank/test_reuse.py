"""A second turn that begins at a checkpoint of the first, on the stages of every architecture: its
answer is that of a computation from nothing."""

from functools import partial

import pytest

from serve.core.types import Sampling, Sequence
from serve.front.pipeline.scheduler import Scheduler
from serve.model.stage import Stage
from serve.rank.cache import GroupCaches
from tests import architectures
from tests.model.comparison import possible_cuts
from tests.models_page import reuse_of
from tests.rank.test_pipeline import LocalPipeline, Make, pipeline

# One or more of each kind of cache, alone and beside others.
QUICK = {
    "deepseek_v32",
    "deepseek_v41",
    "falcon_h1",
    "gemma3_text",
    "llama4",
    "longcat_flash_ngram",
    "mamba2",
    "qwen3_next",
    "recurrent_gemma",
}
ALL = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in architectures.architectures()
]
# In mlx-lm too, its logits depend on how a prompt is divided into chunks.
DEPENDS_ON_CHUNKS = {"plamo3"}
SHARED = [3 + i % 40 for i in range(75)] + [5, 4, 3, 2, 1]  # longer than all windows
SCORED = Sampling(temperature=0, logprobs=3)


def turns(first_id: int) -> list[tuple[Sequence, tuple[int, ...]]]:
    """A prompt; a second one that leaves the first answer out; one that differs before the last
    boundary, and one that repeats the second prompt. Each has its boundaries beside it."""
    prompts = [
        ([*SHARED, 7, 8, 9], (66, len(SHARED))),
        ([*SHARED, *range(10, 20)], (len(SHARED) + 8,)),
        ([*SHARED[:70], *range(20, 30)], ()),
        ([*SHARED, *range(10, 20)], (len(SHARED) + 8,)),
    ]
    return [
        (Sequence(id, prompt, 4, SCORED, frozenset()), boundaries)
        for id, (prompt, boundaries) in enumerate(prompts, first_id)
    ]


def answers(local: LocalPipeline, reuse: str, first_id: int) -> tuple[list[Sequence], list[float]]:
    """The sequences after one turn after another, and the scores of all tokens."""
    local.scheduler.reuse = reuse  # type: ignore[assignment]
    sequences: list[Sequence] = []
    logprobs: list[float] = []
    for sequence, boundaries in turns(first_id):
        sequences.append(sequence)
        local.boundaries[sequence.id] = boundaries
        local.answer([sequence])
        for position in sorted(local.scores[sequence.id]):
            score = local.scores[sequence.id][position]
            logprobs += [score.logprob, *(logprob for _, logprob in score.top)]
    return sequences, logprobs


def make_in_two_stages(name: str, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Returns a function that builds an architecture, which pipelines of two ranks then cut in the
    middle. Skips the test of an architecture that cannot be built or cut."""
    try:
        model = architectures.build(name)
    except Exception as error:  # A newer mlx-lm may want a config that nobody has written.
        pytest.skip(f"{name} cannot be built: {type(error).__name__}: {error}")
    cuts = list(possible_cuts(model)[0])
    if not cuts:
        pytest.skip("cannot be split")
    cut = cuts[len(cuts) // 2]
    layers = {1: [(0, len(model.layers))], 2: [(cut, len(model.layers)), (0, cut)]}
    monkeypatch.setattr("tests.rank.test_pipeline.even_split", lambda _, ranks: layers[ranks])
    return partial(architectures.build, name)


@pytest.mark.parametrize("name", ALL)
def test_a_second_turn_begins_at_a_checkpoint_of_the_first_turn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline(2, make_in_two_stages(name, monkeypatch)) as local:
        local.scheduler = Scheduler(2, max_num_sequences=32, max_queue=64, prefill_chunk=32)
        computed, expected = answers(local, "none", 0)
        reused, got = answers(local, reuse_of(name), 10)
    if name not in DEPENDS_ON_CHUNKS:
        assert [sequence.output for sequence in reused] == [s.output for s in computed]
        assert got == pytest.approx(expected, rel=1e-4, abs=2e-4)
    assert not any(sequence.num_cached for sequence in computed)
    shared = [0, len(SHARED), 70, len(SHARED) + 9]
    for sequence, num_shared in zip(reused, shared, strict=True):
        assert sequence.num_cached >= 0.9 * num_shared


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", "qwen3_moe"])
def test_an_answer_whose_client_has_left_can_be_continued_later(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reuse = reuse_of(name)
    with pipeline(2, make_in_two_stages(name, monkeypatch)) as local:
        local.scheduler = Scheduler(2, max_num_sequences=32, max_queue=64, prefill_chunk=32)
        local.scheduler.reuse = reuse  # type: ignore[assignment]
        left = Sequence(0, SHARED, 40, SCORED, frozenset())
        local.leave(left, 5)
        prompt = [*left.tokens[: left.num_computed], 7, 8, 9]
        continued = Sequence(1, prompt, 4, SCORED, frozenset())
        got = local.answer([continued])[1]
        local.scheduler.reuse = "none"
        computed = local.answer([Sequence(2, prompt, 4, SCORED, frozenset())])[2]
    assert len(left.output) > 5, "nothing was under way when the client left"
    assert continued.num_cached == left.num_computed > len(SHARED)
    assert got == computed
    for position, score in local.scores[2].items():
        expected = pytest.approx(score.logprob, rel=1e-4, abs=2e-4)
        assert local.scores[1][position].logprob == expected


@pytest.mark.parametrize(
    ("name", "reuse", "can_rewind"),
    [
        ("llama", "checkpoints", False),
        ("qwen3_moe", "any", True),
        ("deepseek_v32", "any", False),
        ("mamba2", "checkpoints", False),
    ],
)
def test_caches_report_how_they_can_be_reused_and_whether_they_can_rewind(
    name: str, reuse: str, can_rewind: bool
) -> None:
    """In a batch, only rows in slots can forget tokens one by one."""
    model = architectures.build(name)
    caches = GroupCaches(Stage(model, 0, len(model.layers)).make_cache, can_batch=True)
    assert (caches.reuse, caches.can_rewind) == (reuse, can_rewind)
