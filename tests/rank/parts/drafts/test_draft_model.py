"""The draft model guesses what it would say itself, and its guesses change no answer."""

import random
from functools import partial

import mlx.nn as nn
import pytest

from serve.core.errors import PlanError
from serve.core.plan import MAX_DRAFT_ROWS, MAX_DRAFT_TOKENS
from serve.core.types import Sampling, Sequence
from serve.model.stage import Stage
from serve.rank.batching import can_batch
from serve.rank.parts.drafts.draft_model import NUM_TOKENS_READ, DraftModel, GuessRequest
from serve.rank.parts.drafts.loading import LoadedDraft
from tests import architectures
from tests.errors import fails
from tests.models import build
from tests.rank.parts.drafts.guessed_answers import check_that_guesses_change_no_answer
from tests.rank.test_pipeline import LLAMA, pipeline, whole_model

GREEDY = Sampling(temperature=0)
VOCABULARY = 96


def make_draft_model(
    model: nn.Module | None = None, vocabulary_size: int = VOCABULARY
) -> DraftModel:
    whole = model or LLAMA()
    stage = Stage(whole, 0, len(whole.layers))
    return DraftModel(stage, vocabulary_size, batchable=True)


def said(text: list[int], num_tokens: int) -> tuple[int, ...]:
    """What the model says after the end of a text, all of which it reads."""
    return tuple(whole_model(text, num_tokens))


def test_a_draft_model_guesses_its_own_tokens_after_right_and_wrong_drafts() -> None:
    draft_model, chance = make_draft_model(), random.Random(0)
    texts = {id: [1 + id, 2, 3, *range(3 * id)] for id in range(4)}
    for _ in range(12):
        requests = [
            GuessRequest(id, text, GREEDY, chance.randint(0, 4))
            for id, text in texts.items()
            if chance.random() < 0.8
        ]
        guesses = draft_model.guess(chance.randint(0, 1), requests)
        for each, own in zip(requests, guesses, strict=True):
            assert own == said(each.text, each.num_guesses)[: each.num_guesses]
            num_accepted = chance.randint(0, len(own))
            texts[each.sequence] += [*own[:num_accepted], chance.randrange(VOCABULARY)]
    assert {run.num_drafts > 0 for run in draft_model.take_runs()} == {False, True}
    assert not draft_model.take_runs()


def test_a_draft_model_reads_only_the_end_of_a_long_text() -> None:
    chance = random.Random(1)
    text = [chance.randrange(VOCABULARY) for _ in range(3 * NUM_TOKENS_READ)]
    draft_model = make_draft_model()
    (guesses,) = draft_model.guess(0, [GuessRequest(0, text, GREEDY, 2)])
    assert guesses == said(text[-NUM_TOKENS_READ:], 2)
    assert sum(run.num_tokens for run in draft_model.take_runs()) == NUM_TOKENS_READ + 1
    # A text that has grown a lot since is read from its new end, without what lies between.
    text += [chance.randrange(VOCABULARY) for _ in range(NUM_TOKENS_READ + 1)]
    (guesses,) = draft_model.guess(0, [GuessRequest(0, text, GREEDY, 2)])
    assert guesses == said(text[-NUM_TOKENS_READ:], 2)


def test_a_draft_model_keeps_a_limited_number_of_tokens_and_rows() -> None:
    draft_model, chance = make_draft_model(), random.Random(2)
    text = [chance.randrange(VOCABULARY) for _ in range(NUM_TOKENS_READ)]
    while len(text) < MAX_DRAFT_TOKENS + 300:
        (guesses,) = draft_model.guess(0, [GuessRequest(0, text, GREEDY, 3)])
        assert len(guesses) == 3
        text += [chance.randrange(VOCABULARY) for _ in range(100)]
        assert all(len(row.held) <= MAX_DRAFT_TOKENS for row in draft_model._rows.values())
    requests = [GuessRequest(id, [id, 1, 2], GREEDY, 1) for id in range(MAX_DRAFT_ROWS + 2)]
    guesses_of_all = draft_model.guess(0, requests)
    assert [bool(own) for own in guesses_of_all] == [True] * MAX_DRAFT_ROWS + [False] * 2
    assert len(draft_model._rows) == MAX_DRAFT_ROWS
    draft_model.forget(range(MAX_DRAFT_ROWS))
    assert not draft_model._rows
    assert draft_model.guess(0, requests[:1]) == [said([0, 1, 2], 1)]
    assert len(draft_model._caches._batches) == 1


@pytest.mark.parametrize("size", [90, 96, 120])
def test_drafts_are_limited_to_the_smaller_of_two_vocabularies(size: int) -> None:
    """The sizes differ where models round their vocabulary up."""
    draft_model = make_draft_model(vocabulary_size=size)
    sampling = Sampling(temperature=2.0, seed=1)
    (guesses,) = draft_model.guess(0, [GuessRequest(0, [1, 2, 3], sampling, 8)])
    assert len(guesses) == 8
    assert max(guesses) < min(size, VOCABULARY)


def test_drafts_are_sampled_with_the_same_keys_as_the_answer() -> None:
    """So a draft model that agrees with the model is right at any temperature."""
    sampling = Sampling(temperature=1.0, seed=5, top_p=0.95)
    with pipeline(1) as local:
        answer = local.answer([Sequence(0, [1, 2, 3], 8, sampling, frozenset())])[0]
    (guesses,) = make_draft_model().guess(0, [GuessRequest(0, [1, 2, 3], sampling, 8)])
    assert list(guesses) == answer


def test_a_draft_model_stops_where_its_numbers_overflow() -> None:
    model = LLAMA()
    model.lm_head.weight[:, 0] = float("inf")
    (guesses,) = make_draft_model(model).guess(0, [GuessRequest(0, [1, 2, 3], GREEDY, 4)])
    assert guesses == ()


def test_draft_models_that_cannot_forget_tokens_are_refused() -> None:
    model = architectures.build("recurrent_gemma")
    with fails(PlanError, "plan", match="--draft-model"):
        make_draft_model(model)


def first_layers(num_layers: int) -> LoadedDraft:
    """The first layers of LLAMA, and its head. They often say the same."""
    model = build("llama")
    model.layers[num_layers:] = []
    return LoadedDraft(Stage(model, 0, num_layers), is_batchable=can_batch(model))


@pytest.mark.parametrize(
    ("num_ranks", "num_groups", "num_layers"),
    [(1, None, 4), (2, None, 4), pytest.param(2, 1, 3, marks=pytest.mark.long)],
)
def test_a_draft_model_changes_no_answer(
    num_ranks: int, num_groups: int | None, num_layers: int
) -> None:
    make_draft = partial(first_layers, num_layers)
    check_that_guesses_change_no_answer(
        num_ranks,
        LLAMA,
        make_draft,
        num_groups,
        min_accepted=21,
    )
