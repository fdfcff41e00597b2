"""Draws against the slow, obvious way in numpy; keys by seed and position."""

import math
import random
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from serve.core.types import Sampling
from serve.rank.sampling import Sampler, sample, score

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -8.0]


def draws(sampling: Sampling, count: int = 4000) -> Counter[int]:
    """How often each token comes, over many positions."""
    rows = mx.array([LOGITS] * count)
    return Counter(sample(rows, [Sampler(sampling)] * count, range(count)).tolist())


def nucleus(temperature: float, top_p: float) -> np.ndarray:
    """The distribution by definition: the smallest set of tokens with mass top_p."""
    scores = np.array(LOGITS) / temperature
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    kept, mass = np.zeros_like(probabilities), 0.0
    for token in np.argsort(-probabilities):
        if mass >= top_p:
            break
        kept[token] = probabilities[token]
        mass += probabilities[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1, 1), (0.5, 1), (2, 0.9), (1, 0.6), (1, 0.01)]
)
def test_tokens_are_sampled_with_their_probabilities(temperature: float, top_p: float) -> None:
    count = 4000
    found = draws(Sampling(temperature, top_p, seed=3), count)
    for token, probability in enumerate(nucleus(temperature, top_p)):
        spread = 5 * math.sqrt(probability * (1 - probability) / count)
        assert abs(found[token] / count - probability) <= spread, token


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-38, 1e-30, 1e-6])
def test_sampling_at_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert draws(Sampling(temperature, seed=1), 20) == {0: 20}
    assert draws(Sampling(temperature, 0.5, seed=1), 20) == {0: 20}


def test_each_row_is_sampled_with_its_own_parameters() -> None:
    rows = mx.array([LOGITS, LOGITS[::-1], LOGITS])
    samplers = [Sampler(s) for s in (Sampling(0), Sampling(0), Sampling(1, 0.001, 5))]
    assert sample(rows, samplers, [1, 2, 3]).tolist() == [0, 5, 0]


def seeded(seed: int) -> Sampler:
    return Sampler(Sampling(1, 1, seed))


def test_sampled_tokens_depend_only_on_seed_and_position() -> None:
    flat = mx.zeros((3, 1000))
    once = sample(flat, [seeded(seed) for seed in (7, 8, 7)], [4, 4, 4]).tolist()
    assert once[0] == once[2] != once[1]
    alone = sample(flat[:1], [seeded(7)], [4]).tolist()
    assert alone == once[:1]
    assert sample(flat[:1], [seeded(7)], [5]).tolist() != alone
    far = sample(flat, [seeded(s) for s in (-(2**63), 2**63 - 1, 0)], [4, 4, 4]).tolist()
    assert len(set(far)) == 3


def test_sampling_is_compiled_only_once_for_all_values_of_top_p() -> None:
    """mx.compile takes seconds for a number that it has not seen; an array is one of many.
    Two hundred compilations would run into the test's time-out."""
    rows = mx.array([LOGITS] * 200)
    samplers = [Sampler(Sampling(1, 0.5 + n / 1000, n)) for n in range(200)]
    assert len(sample(rows, samplers, range(200)).tolist()) == 200


# --- against definitions


def allowed_scores(
    logits: list[float], sampling: Sampling, prompt: list[int], answer: list[int]
) -> np.ndarray:
    """Logits after all that changes them, token by token."""
    changed = np.array(logits, dtype=np.float64)
    for token in range(len(logits)):
        if token in sampling.bias_ids:
            changed[token] += sampling.biases[sampling.bias_ids.index(token)]
        if token in prompt + answer and sampling.repetition_penalty != 1:
            strong = changed[token] > 0
            penalty = sampling.repetition_penalty
            changed[token] = changed[token] / penalty if strong else changed[token] * penalty
        changed[token] -= sampling.frequency_penalty * answer.count(token)
        changed[token] -= sampling.presence_penalty * (token in answer)
        banned = len(answer) < sampling.min_tokens and token in sampling.end_ids
        for word in sampling.bad_words:
            banned |= tuple([*answer, token][-len(word) :]) == word
        if banned or (sampling.allowed_ids and token not in sampling.allowed_ids):
            changed[token] = -math.inf
    return changed


def distribution(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Filters one after the other, each on what the one before left."""

    def softmax(scores: np.ndarray) -> np.ndarray:
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    scores = scores / sampling.temperature
    likely = softmax(scores)
    scores = np.where(likely < sampling.min_p * likely.max() * (1 - 1e-6), -math.inf, scores)
    if sampling.top_k:
        limit = np.sort(scores)[::-1][: sampling.top_k][-1]
        scores = np.where(scores < limit, -math.inf, scores)
    probabilities, kept, mass = softmax(scores), np.zeros(len(scores)), 0.0
    for token in np.argsort(-probabilities):
        if mass >= sampling.top_p:
            break
        kept[token], mass = probabilities[token], mass + probabilities[token]
    return kept / kept.sum()


WAYS = [
    Sampling(top_k=2),
    Sampling(top_k=100),
    Sampling(min_p=0.2),
    Sampling(temperature=2, top_k=4, min_p=0.05, top_p=0.8),
    Sampling(presence_penalty=1.5),
    Sampling(frequency_penalty=-1),
    Sampling(repetition_penalty=1.8),
    Sampling(repetition_penalty=0.5, presence_penalty=-0.5, frequency_penalty=0.3),
    Sampling(bias_ids=(4, 0), biases=(3.0, -100.0)),
    Sampling(allowed_ids=(3, 5)),
    Sampling(bad_words=((0,), (2, 1), (1, 2, 3))),
    Sampling(bad_words=((1, 2, 2, 0, 3), (2, 2, 0, 4))),  # the first begins in the prompt
    Sampling(min_tokens=4, end_ids=(0, 1)),
    Sampling(min_tokens=3, end_ids=(0, 1)),
    Sampling(allowed_ids=(0, 1, 2), min_tokens=9, end_ids=(0,), bad_words=((1,),), top_k=2),
    Sampling(bias_ids=(5,), biases=(9.0,), repetition_penalty=1.3, top_p=0.7, min_p=0.1),
]
PROMPT, ANSWER = [5, 5, 1], [2, 2, 0]


@pytest.mark.parametrize("count", [600, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", WAYS)
def test_each_sampling_parameter_follows_its_definition(sampling: Sampling, count: int) -> None:
    """By draws with many seeds at one position, and greedily."""
    scores = allowed_scores(LOGITS, sampling, PROMPT, ANSWER)
    position = len(PROMPT + ANSWER)
    for greedy in (True, False):
        fields = {"temperature": 0.0} if greedy else {}
        samplers = [
            Sampler(replace(sampling, seed=seed, **fields), len(PROMPT), PROMPT + ANSWER)
            for seed in range(1 if greedy else count)
        ]
        rows = mx.array([LOGITS] * len(samplers))
        found = Counter(sample(rows, samplers, [position] * len(samplers)).tolist())
        if greedy:
            assert found == {int(scores.argmax()): 1}
            continue
        for token, probability in enumerate(distribution(scores, sampling)):
            spread = 5 * math.sqrt(probability * (1 - probability) / count)
            assert abs(found[token] / count - probability) <= spread + 1e-9, token


def test_a_sampler_counts_the_tokens_that_it_has_chosen() -> None:
    """It chooses the same tokens as a sampler that gets the whole history at once, as it does when
    a sequence begins again."""
    chance = random.Random(4)
    sampling = Sampling(
        temperature=0, frequency_penalty=0.7, repetition_penalty=1.2, bad_words=((1, 2),)
    )
    sampler, tokens = Sampler(sampling, len(PROMPT), PROMPT), list(PROMPT)
    chosen = []
    for position in range(len(PROMPT), 40):
        logits = [chance.gauss(0, 2) for _ in LOGITS]
        (token,) = sample(mx.array([logits]), [sampler], [position]).tolist()
        rebuilt = Sampler(sampling, len(PROMPT), tokens)
        assert sample(mx.array([logits]), [rebuilt], [position]).tolist() == [token]
        wanted = allowed_scores(logits, sampling, PROMPT, tokens[len(PROMPT) :])
        assert token == int(wanted.argmax())
        sampler.note(token)
        tokens.append(token)
        chosen.append(token)
    assert len(set(chosen)) == len(LOGITS)


def test_banned_tokens_are_sampled_if_no_other_token_is_allowed() -> None:
    sampling = Sampling(0, allowed_ids=(3,), bad_words=((3,),))
    assert sample(mx.array([LOGITS]), [Sampler(sampling)], [0]).tolist() == [3]
    drawn = Sampler(replace(sampling, temperature=1.0, top_p=0.5))
    assert sample(mx.array([LOGITS]), [drawn], [0]).tolist() == [3]


def test_logits_of_a_row_without_parameters_are_not_changed() -> None:
    assert Sampler(Sampling(0)).is_plain
    assert Sampler(Sampling(0, end_ids=(1,), logprobs=5, prompt_logprobs=0)).is_plain
    for sampling in WAYS[4:]:
        assert not Sampler(replace(sampling, temperature=0)).is_plain


@pytest.mark.parametrize("num_top", [0, 1, 3, 6, 20])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_scores_equal_the_log_softmax_of_the_logits(num_top: int, dtype: mx.Dtype) -> None:
    logits = mx.array([LOGITS, LOGITS[::-1], [0.0, -math.inf, 1.0, 2.0, 3.0, 4.0]]).astype(dtype)
    own, ids, values = score(logits, mx.array([4, 0, 1]), num_top)
    exact = np.array(logits.astype(mx.float32), dtype=np.float64)
    exact = exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    assert np.allclose(own, exact[[0, 1, 2], [4, 0, 1]], atol=1e-5)
    best = np.argsort(-exact, axis=-1)[:, :num_top]
    assert ids.shape == (3, min(num_top, 6))
    assert np.array(ids).tolist() == best.tolist()
    assert np.allclose(values, np.take_along_axis(exact, best, axis=-1), atol=1e-5)


def test_extreme_parameters_still_give_an_allowed_token() -> None:
    """Whatever is in range must not break the engine, which all requests share."""
    chance = random.Random(6)
    choose = chance.choice
    samplers, rows = [], []
    for _ in range(300):
        logits = [chance.uniform(-60, 60) for _ in LOGITS]
        logits[chance.randrange(6)] = -math.inf
        sampling = Sampling(
            temperature=choose([0, 1e-5, 1.1e-5, 1, 2]),
            top_p=choose([1e-300, 1e-9, 0.5, 1]),
            seed=choose([-(2**63), 0, 2**63 + 127]),
            top_k=choose([0, 1, 2, 6, 2**31 - 1]),
            min_p=choose([0, 1e-300, 0.5, 1]),
            presence_penalty=choose([-2, 0, 2]),
            frequency_penalty=choose([-2, 0, 2]),
            repetition_penalty=choose([0.01, 1, 100]),
            bias_ids=(0, 5),
            biases=(choose([-100, 100]), 0),
            allowed_ids=choose([(), (2,), (0, 1, 2, 3)]),
            bad_words=choose([(), ((0,), (2,)), ((2, 2, 2), (0,))]),
            min_tokens=choose([0, 99]),
            end_ids=(0, 1),
        )
        samplers.append(Sampler(sampling, len(PROMPT), PROMPT + [2] * 2000))
        rows.append(logits)
    tokens = sample(mx.array(rows), samplers, [len(PROMPT) + 2000] * 300).tolist()
    for token, sampler in zip(tokens, samplers, strict=True):
        assert 0 <= token < 6
        assert token in (sampler.sampling.allowed_ids or range(6))
