"""Answers with drafts are the same as without: pipelines in one process, with every parameter that
changes how a token is chosen."""

import random
from collections.abc import Sequence as ReadableList
from functools import partial
from typing import Any

import pytest

from serve.core.types import Reasoning, Sampling, Sequence
from serve.front.drafts.speculation import Speculation
from tests.rank.test_pipeline import LLAMA, PROMPTS, pipeline

NUM_TOKENS = 24
# Most answers of this model repeat a token soon, so that random ones show more.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 3},
    "cold": {"temperature": 0.2, "seed": 4, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    "penalties": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "seed": 5,
    },
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.5},
    "biases": {"bias_ids": (3, 7), "biases": (2.0, -5.0), "seed": 6},
    "allowed": {"allowed_ids": (3, 7, 9, 11), "seed": 7},
    "bad words": {
        "allowed_ids": (3, 7, 9),
        "bad_words": ((3, 7), (9, 9), (3, 9, 7)),
        "seed": 8,
    },
    "minimum": {"min_tokens": 12, "end_ids": (3, 7), "allowed_ids": (3, 7, 9), "seed": 9},
    "scores": {"logprobs": 3, "seed": 10},
    "scores of penalties": {"logprobs": 2, "temperature": 0, "presence_penalty": 1.0},
    "budget": {
        "seed": 11,
        "allowed_ids": (3, 7, 9),
        "reasoning": Reasoning(start=(3,), end=(7, 9), budget=2),
    },
}


class Guessing:
    """Guesses the tokens of known answers, and some of them wrong."""

    def __init__(self, answers: dict[int, list[int]], seed: int) -> None:
        self.answers = answers
        self.chance = random.Random(seed)
        self.num_drafts = 0
        self.num_accepted = 0

    def propose(self, sequences: ReadableList[Sequence]) -> list[list[int]]:
        return [self.guess(sequence) for sequence in sequences]

    def guess(self, sequence: Sequence) -> list[int]:
        if sequence.num_pending or not sequence.num_computed:
            return []
        first = len(sequence.output)
        num_drafts = min(self.chance.randint(0, 5), sequence.num_left - 1)
        drafts = self.answers[sequence.id][first : first + num_drafts]
        return [draft if self.chance.random() < 0.8 else 3 for draft in drafts]

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        return self.chance.random() < 0.9

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def forget(self, sequence_id: int) -> None:
        """It knows answers by their number."""


def make_sequences(samplings: ReadableList[Sampling]) -> list[Sequence]:
    sequences = []
    for id, prompt in enumerate(PROMPTS[: len(samplings)]):
        ends = frozenset(samplings[id].end_ids)
        sequences.append(Sequence(id, prompt, NUM_TOKENS, samplings[id], ends))
    return sequences


@pytest.mark.parametrize(
    ("num_ranks", "num_groups", "kv_bits"), [(1, 1, None), (2, None, None), (2, 1, None), (3, 2, 8)]
)
def test_drafts_change_no_answer_and_no_score(
    num_ranks: int, num_groups: int | None, kv_bits: int | None
) -> None:
    samplings = [Sampling(**fields) for fields in SAMPLINGS.values()]
    make = LLAMA if kv_bits is None else partial(LLAMA, head_dim=32)
    with pipeline(num_ranks, make, kv_bits) as local:
        expected = local.answer(make_sequences(samplings))
        scores = dict(local.scores)
    guessing = Guessing(expected, num_ranks)
    with pipeline(num_ranks, make, kv_bits, guessing, num_groups) as local:
        alone = [local.answer([sequence]) for sequence in make_sequences(samplings)]
        together = local.answer(make_sequences(samplings))
        scores_of_drafts = dict(local.scores)
    assert guessing.num_drafts > guessing.num_accepted > 0.4 * guessing.num_drafts
    assert together == expected
    assert {id: tokens for answer in alone for id, tokens in answer.items()} == expected
    for id, of_one in scores.items():
        assert of_one.keys() == scores_of_drafts[id].keys()
        for position, score in of_one.items():
            other = scores_of_drafts[id][position]
            assert score.token == other.token
            assert score.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in score.top] == [token for token, _ in other.top]


def test_drafts_of_the_real_drafters_are_right_often() -> None:
    """The model repeats itself, and one client predicts its answer."""
    samplings = [Sampling(temperature=0), Sampling(temperature=0.2, seed=1), Sampling(seed=2)]
    with pipeline(2) as local:
        expected = local.answer(make_sequences(samplings))
    speculation = Speculation()
    speculation.is_possible = True
    with pipeline(2, drafting=speculation) as local:
        sequences = make_sequences(samplings)
        sequences[2].prediction = tuple(expected[2])
        assert local.answer(sequences) == expected
    assert speculation.counts["suffixes"].accepted > 0
    assert speculation.counts["prediction"].accepted > NUM_TOKENS / 2
    assert not speculation._guesses
