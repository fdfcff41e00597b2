"""Compares the answers of a pipeline with and without guesses, with all sampling parameters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from serve.core.plan import DraftSource
from serve.core.types import Sampling
from serve.front.parts.drafts.model_guesses import ModelCosts
from serve.front.parts.drafts.speculation import Speculation
from serve.model.stage import Stage
from serve.rank.parts.drafts.loading import LoadedDraft
from serve.rank.parts.interface import Surroundings
from tests.configs import serve_config
from tests.rank.test_pipeline import LocalPipeline, Make, pipeline, running
from tests.rank.test_verification import SAMPLINGS, make_sequences

_MIN_DRAFTED = 20

MakeDraft = Callable[[], LoadedDraft]


class DraftPipeline(LocalPipeline):
    """Rank 0 has a draft model or a prediction head."""

    def __init__(self, make_draft: MakeDraft, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.make_draft = make_draft

    def _surroundings(self, rank: int, stage: Stage, batchable: bool) -> Surroundings:
        made = super()._surroundings(rank, stage, batchable)
        if rank:
            return made
        order = msgspec.structs.replace(made.order, draft=DraftSource("draft", None, None))
        return replace(made, order=order, leftovers=[self.make_draft()])


def check_that_guesses_change_no_answer(
    num_ranks: int,
    make: Make,
    make_draft: MakeDraft,
    num_groups: int | None = None,
    min_accepted: int = 0,
) -> None:
    """Sequences run one by one and together. Many guesses have to be made, and min_accepted of them
    have to be right."""
    samplings = [Sampling(**fields) for fields in SAMPLINGS.values()]
    with pipeline(num_ranks, make) as local:
        expected = local.answer(make_sequences(samplings))
    speculation = Speculation(serve_config(model=Path("model")))
    speculation.is_possible = True
    speculation.token_cost = 0.01
    speculation.model_costs = ModelCosts(guess=0.01, reading=0.001)
    drafting = DraftPipeline(
        make_draft,
        num_ranks,
        make,
        parts=(speculation,),
        num_groups=num_groups,
    )
    with running(drafting) as local:
        alone: dict[int, Any] = {}
        for sequence in make_sequences(samplings):
            alone |= local.answer([sequence])
        together = local.answer(make_sequences(samplings)[:6])
    counts = speculation.counts
    assert alone == expected
    assert together == {id: expected[id] for id in range(6)}
    assert counts.drafted["model"] > _MIN_DRAFTED
    assert counts.drafted["model"] >= counts.accepted["model"] >= min_accepted
    assert not speculation.drafted
