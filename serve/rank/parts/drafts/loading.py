"""Loads the model that guesses tokens on rank 0: a draft model, or the model's own prediction
head."""

from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn

from serve.core.checkpoint import read_checkpoint
from serve.core.plan import DraftSource
from serve.model.mtp import HeadInputs, PredictionHead, load_head
from serve.model.stage import Stage
from serve.model.weights import Progress, load_stage, open_model
from serve.rank.batching import can_batch
from serve.rank.parts.drafts.draft_model import Drafter, DraftModel
from serve.rank.parts.drafts.mtp import HeadDrafter


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model or a prediction head with its weights, before the last stage is loaded."""

    model: Stage | PredictionHead
    is_batchable: bool

    def for_logits_of(self, stage: Stage) -> Drafter:
        """Binds the drafter to this last stage. Raises PlanError if it cannot forget guesses."""
        if isinstance(self.model, PredictionHead):
            inputs = HeadInputs(stage, self.model.before_norm)
            return HeadDrafter(self.model, inputs, batchable=self.is_batchable)
        vocabulary_size = stage.logits().shape[-1]
        return DraftModel(self.model, vocabulary_size, batchable=self.is_batchable)


def load_drafter(source: DraftSource, progress: Progress) -> LoadedDraft:
    """Loads a draft model or a prediction head. Raises ModelError or PlanError."""
    model = open_model(source.model, source.commit, source.cache_dir)
    is_batchable = True

    def try_rows(whole: nn.Module) -> None:
        nonlocal is_batchable
        is_batchable = can_batch(whole)

    if source.is_head:
        head = load_head(model, progress, try_rows)
        return LoadedDraft(head, is_batchable)
    folder = model if isinstance(model, Path) else model.folder
    num_layers = read_checkpoint(folder).num_layers
    loaded = load_stage(model, 0, num_layers, progress, try_rows)
    return LoadedDraft(loaded.stage, is_batchable)
