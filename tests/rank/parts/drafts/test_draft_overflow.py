"""Drafts whose numbers overflow change no answer."""

from functools import partial

import pytest

from serve.core.types import Sequence
from tests.rank.test_overflow import BAD, PROMPTS, model
from tests.rank.test_pipeline import GREEDY, pipeline
from tests.rank.test_verification import Guessing

pytestmark = pytest.mark.uses("drafts")


class Poisoning(Guessing):
    """Guesses right tokens and then, often, one that overflows."""

    def guess(self, sequence: Sequence) -> list[int]:
        self.state_of(sequence).may_draft = True  # so that each row is spoilt more than once
        drafts = super().guess(sequence)
        return [*drafts[:-1], BAD] if self.chance.random() < 0.8 else drafts


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_overflow_in_a_draft_model_changes_no_answer(num_ranks: int) -> None:
    """Not even that of its own row, once the draft has turned out wrong."""
    make = partial(model, "llama")
    prompts = dict(enumerate(PROMPTS[:8]))

    def sequences() -> list[Sequence]:
        return [Sequence(id, prompt, 24, GREEDY, frozenset()) for id, prompt in prompts.items()]

    with pipeline(num_ranks, make) as local:
        expected = local.answer(sequences())
    poisoning = Poisoning(expected, 0)
    with pipeline(num_ranks, make, None, (poisoning,), 1) as local:
        assert local.answer(sequences()) == expected
    counts = poisoning.counts
    assert counts.drafted["suffixes"] > 2 * counts.accepted["suffixes"] > 0
