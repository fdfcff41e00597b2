"""What rank 0 makes of logits: rows that are not finite, and scores in slices."""

import math
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from serve.core.messages import Result
from serve.core.outputs import Scores
from serve.core.types import LAST_TOKEN, OVERFLOWED_TOKEN, Reasoning, Row, Sampling, Step
from serve.rank.cache import ForwardPass
from serve.rank.chooser import Chooser, scoring_bytes
from serve.rank.sampling import score

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-chat"
VOCABULARY = 50


def run(chooser: Chooser, step: Step, logits: mx.array) -> Result:
    """As the step loop does."""
    outputs: list[mx.array] = []
    passes = [ForwardPass(tuple(range(len(step.rows))), [])]
    for arrays in chooser.choose(step, passes, [logits]):
        mx.eval(arrays)
        outputs += arrays
    return chooser.result(step, outputs)


def decode(samplings: Iterable[Sampling], logits: mx.array) -> Result:
    chooser = Chooser()
    for sequence, sampling in enumerate(samplings):
        chooser.admit(sequence, sampling, 4, [1, 2, 3, 4])
    rows = tuple(Row(sequence, 3, 1) for sequence in range(logits.shape[0]))
    return run(chooser, Step(1, 0, rows, (4,) * len(rows), True), logits[:, None])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(temperature=0, logprobs=2),
        Sampling(temperature=1, top_p=0.5, top_k=3, min_p=0.1),
        Sampling(temperature=0, repetition_penalty=1.5, bad_words=((1,),)),
        Sampling(temperature=1, allowed_ids=(3, 4)),
    ],
)
def test_only_rows_whose_logits_are_not_finite_fail(sampling: Sampling, dtype: mx.Dtype) -> None:
    logits = mx.random.normal((7, VOCABULARY), key=mx.random.key(1)).astype(dtype)
    alone = decode([sampling] * 7, logits)
    logits[0] = mx.nan
    logits[2, VOCABULARY - 1] = mx.nan
    logits[3, 5] = mx.inf
    logits[5] = -mx.inf
    logits[6, 5:] = -mx.inf  # as of tokens that do not exist
    logits[6, 3] = 40
    got = decode([sampling] * 7, logits)
    assert {n for n, token in enumerate(got.tokens) if token == OVERFLOWED_TOKEN} == {0, 2, 3, 5}
    assert [got.tokens[n] for n in (1, 4)] == [alone.tokens[n] for n in (1, 4)]
    assert got.tokens[6] == 3
    bad = {each.sequence for each in got.outputs_of(Scores) if not each.is_finite}
    assert bad == ({0, 2, 3, 5} if sampling.logprobs else set())


def test_rows_with_nan_fail_even_if_argmax_ignores_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where the maximum is looked at."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    logits = mx.zeros((3, VOCABULARY))
    logits[1, 7] = mx.nan
    logits[2, 7] = -mx.inf
    tokens = decode([Sampling(temperature=0)] * 3, logits).tokens
    assert [token == OVERFLOWED_TOKEN for token in tokens] == [False, True, False]


@pytest.mark.parametrize("length", [2, 64, 65, 66, 200])
def test_scores_of_a_long_prompt_are_returned_in_slices(length: int) -> None:
    chooser, prompt = Chooser(), [n % VOCABULARY for n in range(length)]
    chooser.admit(3, Sampling(prompt_logprobs=4), length, prompt)
    logits = mx.random.normal((1, length - 1, VOCABULARY), key=mx.random.key(2))
    step = Step(1, 9, (Row(3, 0, length - 1),), tuple(prompt[:-1]), False)
    scores = run(chooser, step, logits).outputs_of(Scores)
    assert max(len(each.scores) for each in scores) <= 64
    assert [each.position for each in scores] == list(range(1, length, 64))
    every = [score for each in scores for score in each.scores]
    assert [score.token for score in every] == prompt[1:]
    own, ids, values = score(logits[0], mx.array(prompt[1:]), 4)
    assert np.allclose([score.logprob for score in every], own)
    assert [[id for id, _ in score.top] for score in every] == ids.tolist()
    assert np.allclose([[value for _, value in score.top] for score in every], values)


def test_scores_of_a_prompt_that_overflows_are_marked_as_not_finite() -> None:
    chooser, prompt = Chooser(), list(range(40))
    for sequence in (1, 2):
        chooser.admit(sequence, Sampling(prompt_logprobs=0), 40, prompt)
    logits = mx.random.normal((2, 39, VOCABULARY), key=mx.random.key(2))
    logits[0, :, 3] = -mx.inf
    logits[1, 20:, 7] = mx.inf
    rows = (Row(1, 0, 39), Row(2, 0, 39))
    result = run(chooser, Step(1, 9, rows, tuple(prompt[:-1]) * 2, False), logits)
    scores = result.outputs_of(Scores)
    assert {each.sequence: each.is_finite for each in scores} == {1: True, 2: False}
    assert scores[0].scores[2].logprob == -math.inf


@pytest.mark.parametrize("num_top", [0, 20])
def test_choosing_tokens_takes_no_more_memory_than_planned(num_top: int) -> None:
    vocabulary, length = 20_000, 513
    chooser, prompt = Chooser(), list(range(length))
    chooser.admit(3, Sampling(prompt_logprobs=num_top), length, prompt)
    logits = mx.zeros((1, length - 1, vocabulary), mx.bfloat16)
    mx.eval(logits)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    step = Step(1, 9, (Row(3, 0, length - 1),), tuple(prompt[:-1]), False)
    scores: tuple[Scores, ...] = run(chooser, step, logits).outputs_of(Scores)
    assert sum(len(each.scores) for each in scores) == length - 1
    small = 2**20
    assert mx.get_peak_memory() - held <= scoring_bytes(logits.shape) + small


def test_the_end_of_reasoning_is_forced_whatever_else_a_row_asks_for() -> None:
    """Forced rows score as the model does; the others draw what they draw without a budget."""
    reasoning = Reasoning((40,), (41, 42), is_open=True, budget=0)
    others = [Sampling(seed=n, temperature=1.2, logprobs=2) for n in range(3)]
    forced = [
        Sampling(temperature=0, logprobs=2),
        Sampling(temperature=1, seed=5, logprobs=2),
        Sampling(temperature=0, logprobs=2, allowed_ids=(3, 4), bad_words=((41,),), min_tokens=9),
        Sampling(temperature=0, logprobs=2, repetition_penalty=1.5, end_ids=(41,), min_tokens=9),
    ]
    limited = [replace(sampling, reasoning=reasoning) for sampling in forced]
    logits = mx.random.normal((7, VOCABULARY), key=mx.random.key(1))
    alone = decode(others, logits[:3])
    got = decode([*others, *limited], logits)
    assert got.tokens == (*alone.tokens, 41, 41, 41, 41)
    exact = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for n, scores in enumerate(got.outputs_of(Scores)):
        token = got.tokens[n]
        assert scores.scores[0].token == token
        assert scores.scores[0].logprob == pytest.approx(exact[n, token].item(), abs=1e-4)


@pytest.mark.parametrize("num_before", range(6))
def test_each_token_of_the_end_mark_is_forced_even_after_a_replay(num_before: int) -> None:
    """The answer is 7 7 41 42 and then free; a new engine gets what there is of it already."""
    reasoning = Reasoning((40,), (41, 42), is_open=True, budget=2)
    sampling = Sampling(temperature=0, reasoning=reasoning)
    logits = mx.zeros((1, 1, VOCABULARY))
    logits[..., 7] = 5
    prompt, expected = [1, 2, 3, 4], [7, 7, 41, 42, 7, 7]
    answer = expected[:num_before]
    chooser = Chooser()
    chooser.admit(0, sampling, len(prompt), [*prompt, *answer])
    while len(answer) < len(expected):
        row = Row(0, len(prompt) + len(answer) - 1, 1)
        answer += run(chooser, Step(1, 0, (row,), (4,), True), logits).tokens
    assert answer == expected


def test_a_row_with_a_forced_token_fails_if_its_logits_are_not_finite() -> None:
    reasoning = Reasoning((40,), (41,), is_open=True, budget=0)
    logits = mx.zeros((1, VOCABULARY))
    logits[0, 3] = mx.nan
    assert decode([Sampling(reasoning=reasoning)], logits).tokens == (OVERFLOWED_TOKEN,)


def test_drafts_are_cut_off_where_a_grammar_forbids_them() -> None:
    """Row 0 has a grammar, row 1 has none."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    red, *others = tokenizer.encode("red green", add_special_tokens=False).ids
    chooser = Chooser(MODEL)
    grammar = LLMatcher.grammar_from_regex("red blue")
    chooser.admit(0, Sampling(grammar=grammar), 1, [1])
    chooser.admit(1, Sampling(), 1, [1])
    drafts = (red, *others, red)
    rows = (Row(0, 0, 1 + len(drafts)), Row(1, 7, 1 + len(drafts)))
    step = Step(1, 0, rows, (1, *drafts, 2, *drafts), True)
    cut = chooser.cut_drafts(step)
    num_left = cut.rows[0].num_tokens
    assert 1 < num_left < 1 + len(drafts)
    assert cut.tokens == (1, *drafts[: num_left - 1], 2, *drafts)
    assert cut.rows[1] == rows[1]
    without = Step(2, 0, (Row(0, 0, 1),), (1,), True)
    assert chooser.cut_drafts(without) is without


def test_cutting_drafts_does_not_wait_for_grammars_of_rows_without_drafts() -> None:
    """An earlier step may still be choosing the token that such a row feeds."""
    chooser = Chooser(MODEL)
    chooser.admit(0, Sampling(grammar=LLMatcher.grammar_from_regex("red blue")), 1, [1])
    chooser.admit(1, Sampling(), 1, [1])
    constraint = chooser._samplers[0]._constraint
    assert constraint is not None
    mask = constraint._mask
    constraint._mask = Future()
    step = Step(1, 0, (Row(0, 5, 1), Row(1, 7, 3)), (LAST_TOKEN, 2, 3, 4), True)
    with ThreadPoolExecutor(1) as threads:
        try:
            assert threads.submit(chooser.cut_drafts, step).result(timeout=60) == step
        finally:
            constraint._mask.set_result(mask.result())
