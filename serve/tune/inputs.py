"""The inputs of a run: its settings, its model and its examples, the same on all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serve.core import facts
from serve.core.checkpoint import Checkpoint, read_checkpoint
from serve.core.errors import UsageError
from serve.core.messages import PinnedCommit, SameFacts
from serve.hub.partial import PartialModel, open_partial, pin
from serve.tune.config import FineTuneConfig
from serve.tune.data.examples import Split, batch_at, read_split, read_tokenizer
from serve.tune.data.packing import pack
from serve.tune.model import of_adapter
from serve.tune.transport import Links, announce, exchange


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one rank. splits are the examples of each file, by its name. With packing, each
    row of `train` contains several examples, and unpacked lists the single examples."""

    config: FineTuneConfig
    model: Path | PartialModel
    checkpoint: Checkpoint
    splits: Mapping[str, Split]
    unpacked: Split | None

    @property
    def folder(self) -> Path:
        """The folder with the model's files."""
        return folder_of(self.model)

    @property
    def train(self) -> Split:
        return self.splits["train"]


def folder_of(model: Path | PartialModel) -> Path:
    if isinstance(model, PartialModel):
        return model.folder
    return model


def open_inputs(config: FineTuneConfig, links: Links) -> Inputs:
    """Opens the model and reads the examples. Raises BrigadeError.

    Every rank reads the examples, because it needs their shapes and the number of labels.
    """
    if not config.trains:
        config = of_adapter(config)
    model = _open_model(config, links)
    folder = folder_of(model)
    checkpoint = read_checkpoint(folder)
    splits = _read_splits(config, folder)
    unpacked = splits.get("train")
    if unpacked is not None:
        if config.early_stop and "valid" not in splits:
            raise UsageError(
                f"--early-stop needs {config.data / 'valid.jsonl'}.", code="needs_flag"
            )
        train = unpacked
        if config.packing:
            train = pack(unpacked, config.max_seq_length)
        batch_at(train, 0, config.batch_size, config.seed)  # Raises if too few
        config = config.for_examples(len(train.examples))
        splits["train"] = train
    return Inputs(config, model, checkpoint, splits, unpacked)


def agree(inputs: Inputs, links: Links) -> None:
    """Raises DisagreementError if ranks have different settings, models or data."""
    own = {"model": inputs.checkpoint.digest, "settings": str(inputs.config)}
    for name, split in inputs.splits.items():
        own[f"{name}.jsonl"] = split.digest
    notes = exchange(links, SameFacts(own))
    by_rank = {rank: note.facts for rank, note in enumerate(notes)}
    difference = facts.compare(by_rank)
    if difference:
        raise difference


def _open_model(config: FineTuneConfig, links: Links) -> Path | PartialModel:
    """Opens a folder, or a model on the hub at the commit that rank 0 finds."""
    if not config.hub_id:
        return config.model
    if links.rank == 0:
        pinned = pin(config.hub_id, config.revision, config.cache_dir)
        announce(links, PinnedCommit(pinned.snapshot.commit), PinnedCommit)
        return pinned
    commit = announce(links, None, PinnedCommit).commit
    return open_partial(config.hub_id, commit, config.cache_dir)


def _read_splits(config: FineTuneConfig, folder: Path) -> dict[str, Split]:
    tokenizer = read_tokenizer(folder)
    names = []
    if config.trains:
        names.append("train")
    if config.test:
        names.append("test")
    if config.trains and (config.data / "valid.jsonl").exists():
        names.append("valid")
    splits = {}
    for name in names:
        path = config.data / f"{name}.jsonl"
        splits[name] = read_split(path, tokenizer, config)
    return splits
