"""Answers with drafts are the same as without: pipelines in one process, with every parameter that
changes how a token is chosen."""

import random
from collections.abc import Sequence as ReadableList
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from serve.core.errors import PlanError
from serve.core.types import Reasoning, Row, Sampling, Sequence, Step
from serve.front.parts.drafts.draft import Draft
from serve.front.parts.drafts.drafting import Drafting
from serve.front.parts.drafts.speculation import Speculation
from serve.model.stage import Stage
from serve.rank.batching import can_batch, is_causal
from serve.rank.cache import GroupCaches
from tests import architectures
from tests.configs import serve_config
from tests.rank.test_pipeline import LLAMA, PROMPTS, pipeline

pytestmark = pytest.mark.uses("drafts")

NUM_TOKENS = 24
Fed = tuple[int, list[int]]
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


class Guessing(Drafting):
    """Guesses the tokens of known answers, and some of them wrong."""

    def __init__(self, answers: dict[int, list[int]], seed: int) -> None:
        super().__init__(serve_config(model=Path("model")))
        self.answers = answers
        self.chance = random.Random(seed)

    def propose(self, sequences: ReadableList[Sequence]) -> list[Draft]:
        return [Draft(self.guess(sequence)) for sequence in sequences]

    def guess(self, sequence: Sequence) -> list[int]:
        if sequence.num_pending or not sequence.num_computed:
            return []
        first = len(sequence.output)
        num_drafts = min(self.chance.randint(0, 5), sequence.num_left - 1)
        drafts = self.answers[sequence.id][first : first + num_drafts]
        return [draft if self.chance.random() < 0.8 else 3 for draft in drafts]

    def is_worth_waiting(self, sequences: ReadableList[Sequence]) -> bool:
        return self.chance.random() < 0.9

    def plan_guesses(self, sequences: ReadableList[Sequence], num_busy_groups: int) -> list[int]:
        return [0 for _ in sequences]


def make_sequences(samplings: ReadableList[Sampling]) -> list[Sequence]:
    sequences = []
    for id, prompt in enumerate(PROMPTS[: len(samplings)]):
        ends = frozenset(samplings[id].end_ids)
        sequences.append(Sequence(id, prompt, NUM_TOKENS, samplings[id], ends))
    return sequences


@pytest.mark.parametrize(
    ("num_ranks", "num_groups", "kv_bits"), [(1, 1, None), (2, None, None), (2, 1, None), (3, 2, 8)]
)
def test_verifying_drafts_changes_no_answer_and_no_score(
    num_ranks: int, num_groups: int | None, kv_bits: int | None
) -> None:
    samplings = [Sampling(**fields) for fields in SAMPLINGS.values()]
    make = LLAMA if kv_bits is None else partial(LLAMA, head_dim=32)
    with pipeline(num_ranks, make, kv_bits) as local:
        expected = local.answer(make_sequences(samplings))
        scores = dict(local.scores)
    guessing = Guessing(expected, num_ranks)
    with pipeline(num_ranks, make, kv_bits, (guessing,), num_groups) as local:
        alone = [local.answer([sequence]) for sequence in make_sequences(samplings)]
        together = local.answer(make_sequences(samplings))
        scores_of_drafts = dict(local.scores)
    counts = guessing.counts
    num_drafted = counts.drafted["suffixes"]
    assert num_drafted > counts.accepted["suffixes"] > 0.4 * num_drafted
    assert together == expected
    assert {id: tokens for answer in alone for id, tokens in answer.items()} == expected
    for id, of_one in scores.items():
        assert of_one.keys() == scores_of_drafts[id].keys()
        for position, score in of_one.items():
            other = scores_of_drafts[id][position]
            assert score.token == other.token
            assert score.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in score.top] == [token for token, _ in other.top]


def test_drafts_from_suffixes_and_predictions_are_often_accepted() -> None:
    """The model repeats itself, and one client predicts its answer."""
    samplings = [Sampling(temperature=0), Sampling(temperature=0.2, seed=1), Sampling(seed=2)]
    with pipeline(2) as local:
        expected = local.answer(make_sequences(samplings))
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    with pipeline(2, parts=(speculation,)) as local:
        sequences = make_sequences(samplings)
        speculation.state_of(sequences[2]).prediction = tuple(expected[2])
        assert local.answer(sequences) == expected
    counts = speculation.counts
    assert counts.accepted["suffixes"] > 0
    assert counts.accepted["prediction"] > NUM_TOKENS / 2
    assert not speculation.drafted


def fed(caches: GroupCaches, stage: Stage, number: int, feeds: dict[int, Fed]) -> list[mx.array]:
    """Runs a step, and returns the logits of each row. feeds has a position and tokens by
    sequence."""
    rows = tuple(Row(id, position, len(tokens)) for id, (position, tokens) in feeds.items())
    tokens = tuple(token for _, own in feeds.values() for token in own)
    step = Step(number, 0, rows, tokens, sample=number > 1)
    outputs: dict[int, mx.array] = {}
    for part in caches.arrange(step):
        (logits,) = stage(part.tokens(step), part.caches, [])
        outputs |= part.outputs_of_rows(step, logits)
    mx.eval(outputs, caches.states(step))
    return [outputs[n] for n in range(len(rows))]


def check_architecture(name: str) -> bool:
    """Whether rows of a model are speculated. If so, it is checked that they can go back."""
    model = architectures.build(name)
    if not is_causal(model):
        return False
    together = can_batch(model)
    stage = Stage(model, 0, architectures.NUM_LAYERS)
    with_drafts = GroupCaches(stage.make_cache, together)
    if not with_drafts.can_rewind:
        return False
    without = GroupCaches(stage.make_cache, together)
    long, short = [5, 9, 2, 6, 5, 3, 5, 8, 9], [3, 1, 4, 1]
    for caches in (with_drafts, without):
        fed(caches, stage, 1, {0: (0, long), 1: (0, short)})
    expected = []
    for n, (a, b) in enumerate([(7, 11), (12, 13), (14, 15), (16, 17)]):
        feeds = {0: (9 + n, [a]), 1: (4 + n, [b])}
        expected.append(fed(without, stage, 2 + n, feeds))
    drafted = fed(with_drafts, stage, 2, {0: (9, [7, 12, 30, 31]), 1: (4, [11])})
    close(drafted[0][:2], mx.concatenate([expected[0][0], expected[1][0]]))
    close(drafted[1], expected[0][1])
    drafted = fed(with_drafts, stage, 3, {0: (11, [14]), 1: (5, [13, 15, 17])})
    close(drafted[0], expected[2][0])
    close(drafted[1], mx.concatenate([expected[n][1] for n in (1, 2, 3)]))
    drafted = fed(with_drafts, stage, 4, {0: (12, [16, 33]), 1: (7, [17])})
    close(drafted[0][:1], expected[3][0])
    close(drafted[1], expected[3][1])
    return True


def close(got: mx.array, wanted: mx.array) -> None:
    assert mx.allclose(got, wanted, rtol=1e-3, atol=1e-4), mx.abs(got - wanted).max()


@pytest.mark.parametrize(
    ("name", "can_go_back"),
    [
        ("deepseek_v3", True),
        ("gpt2", True),
        ("cohere2", False),
        ("recurrent_gemma", False),
        ("phi3small", False),
    ],
)
def test_rows_of_listed_architectures_can_rewind_or_not_as_expected(
    name: str, can_go_back: bool
) -> None:
    assert check_architecture(name) == can_go_back


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.architectures())
def test_rows_of_every_architecture_can_rewind_or_get_no_drafts(name: str) -> None:
    try:
        check_architecture(name)
    except PlanError as error:
        pytest.skip(str(error))
