"""One rank of a run: the state that training does not change, and its progress."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field

import mlx.nn as nn

from serve.core import facts
from serve.core.messages import SameFacts
from serve.core.plan import LayerRange
from serve.lora.sharded import TrainedParts, set_magnitudes
from serve.model.sharding import Sharding, without_sums
from serve.model.weights import load_stage
from serve.tune.backward import TrainedStage
from serve.tune.config import FineTuneConfig
from serve.tune.data.examples import MicroBatch, batch_at, micro_batches, some_examples
from serve.tune.events import Finished, Reported, Show, Validated
from serve.tune.inputs import Inputs
from serve.tune.loop import Trainer
from serve.tune.mesh import Groups
from serve.tune.model import DropoutKeys, divide, has_adapter_file, prepare, split_layers
from serve.tune.results import checkpoint
from serve.tune.results.history import LossHistory
from serve.tune.schedule import Shape
from serve.tune.transport import Links, exchange


@dataclass(frozen=True, slots=True)
class Session:
    """A rank that has loaded its stages. Only rank 0 shows events and writes files."""

    inputs: Inputs
    groups: Groups
    show: Show
    layers: list[LayerRange]
    trainer: Trainer

    @property
    def config(self) -> FineTuneConfig:
        return self.inputs.config

    @property
    def links(self) -> Links:
        """The links to all ranks."""
        return self.groups.everybody

    @property
    def is_first(self) -> bool:
        return self.links.rank == 0


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a run.

    `done` counts batches; `saved` is its value at the last checkpoint. A batch is divided into
    num_parts micro-batches. has_learned says whether an update since the last checkpoint has
    changed a parameter.
    """

    num_parts: int
    done: int = 0
    history: LossHistory = field(default_factory=LossHistory)
    saved: int | None = None
    has_learned: bool = False


def load(inputs: Inputs, groups: Groups, show: Show) -> Session:
    """Loads this rank's stages. Raises BrigadeError."""
    config = inputs.config
    shape = Shape(groups.layout.pipeline_size, 1, config.num_chunks())
    layers = split_layers(config, inputs.folder, shape.num_stages)
    draw = DropoutKeys(config.seed)
    parts = TrainedParts({}, set())

    def make_trainable(model: nn.Module) -> Sharding | None:
        prepare(config, draw, model)
        if groups.ring is None:
            return None
        return divide(config, parts, groups.ring, model)

    stages = {}
    digests: list[str] = []
    for number in shape.stages(groups.pipeline.rank):
        start, end = layers[number]
        loaded = load_stage(inputs.model, start, end, lambda *_: None, make_trainable)
        # Nothing here may wait for other shards, because one of them may fail to load.
        with without_sums() if groups.ring is not None else nullcontext():
            stages[number] = TrainedStage(loaded.stage, config.grad_checkpoint)
        digests.append(loaded.sharding_digest)
    _agree_on_sharding(digests, groups)
    if groups.ring is not None and not has_adapter_file(config):
        for stage in stages.values():
            set_magnitudes(stage.stage.model)
    trainer = Trainer(config, stages, groups, draw, parts)
    return Session(inputs, groups, show, layers, trainer)


def _agree_on_sharding(digests: Sequence[str], groups: Groups) -> None:
    """Raises DisagreementError if shards of a stage divided its layers differently."""
    own = SameFacts({"division among shards": " ".join(digests)})
    notes = exchange(groups.shards, own)
    ranks = groups.layout.shards(groups.rank)
    by_rank = {rank: note.facts for rank, note in zip(ranks, notes, strict=True)}
    difference = facts.compare(by_rank)
    if difference:
        raise difference


def emit(session: Session, event: Reported | Validated | Finished) -> None:
    """Shows an event. A run that trains also adds it to its metrics."""
    if session.is_first and session.config.trains:
        checkpoint.add_metrics(session.config.adapter_path, asdict(event))
    session.show(event)


def update_batches(session: Session, progress: TrainingProgress) -> list[MicroBatch]:
    """Returns the micro-batches of all batches of the next update."""
    config = session.config
    split = session.inputs.train
    end = progress.done + config.grad_accumulation_steps
    chosen: list[int] = []
    for number in range(progress.done, end):
        chosen += batch_at(split, number, config.batch_size, config.seed)
    num_rows = config.batch_size // progress.num_parts
    return micro_batches(split, chosen, num_rows)


def held_out_batches(session: Session, num_parts: int, name: str) -> list[MicroBatch]:
    """Returns the micro-batches on which the loss of `valid` or `test` is computed."""
    config = session.config
    split = session.inputs.splits.get(name)
    if name == "valid":
        num_batches = config.val_batches
    else:
        num_batches = config.test_batches
    if split is None or num_batches == 0:
        return []
    max_examples = None
    if num_batches != -1:
        max_examples = num_batches * config.batch_size
    chosen = some_examples(split, max_examples, config.seed)
    num_rows = config.batch_size // num_parts
    return micro_batches(split, chosen, num_rows)
