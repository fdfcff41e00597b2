"""Saves the checkpoints of a run: all ranks send their parts to rank 0, which writes them.

Weights that are not finite never replace good ones.
"""

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from serve.core.errors import EngineError
from serve.core.messages import NotFinite, ResumePoint, RunStart, WeightDigest
from serve.tune.backward import Arrays
from serve.tune.config import FineTuneConfig
from serve.tune.events import Saved
from serve.tune.loop import UpdateMetrics
from serve.tune.model import adapter_config
from serve.tune.optimizer import num_steps
from serve.tune.results import checkpoint, run_folder
from serve.tune.results.history import LossHistory
from serve.tune.session import Session, TrainingProgress
from serve.tune.transport import Links, announce, exchange, gather, share
from serve.tune.window import Window


def has_checkpoint(config: FineTuneConfig, links: Links, *, is_return: bool) -> bool:
    """Whether a run that trains continues from a checkpoint, as rank 0 decides. is_return says that
    the launcher has started its ranks again, so that a checkpoint in the folder is its own."""
    own: RunStart | None = None
    if links.rank == 0:
        is_saved = is_return and bool(run_folder.whole_checkpoints(config.adapter_path))
        own = RunStart(config.resume or is_saved)
    return announce(links, own, RunStart).has_checkpoint


def start(session: Session) -> TrainingProgress:
    """Makes the folder of a new run. Raises UsageError if it contains another run."""
    config = session.config
    adapter: Arrays = {}
    if config.peft:
        adapter = gather_adapter(session)
    if session.is_first:
        if adapter:  # A trial: fails now if PEFT's format cannot express this adapter.
            with TemporaryDirectory() as folder:
                save_adapter(session, Path(folder), adapter)
        checkpoint.make_folder(config.adapter_path, _adapter_config(session))
    return new_progress(session)


def new_progress(session: Session) -> TrainingProgress:
    return TrainingProgress(session.config.num_micro_batches(session.groups.layout))


def resume(session: Session) -> TrainingProgress:
    """Continues from the last checkpoint of a former run. Raises UsageError."""
    links = session.links
    own: ResumePoint | None = None
    adapter: Arrays = {}
    optimizer: Arrays = {}
    if session.is_first:
        last = _load_last(session)
        adapter = last.adapter
        optimizer = last.optimizer
        own = _resume_point(session, last)
    point = announce(links, own, ResumePoint)
    adapter = share(links, adapter)
    optimizer = share(links, optimizer)
    session.trainer.restore(adapter, optimizer, point.step)
    loss_scale = session.trainer.loss_scale
    loss_scale.value, loss_scale.num_finite = point.loss_scale
    return TrainingProgress(
        point.num_parts,
        done=point.iteration,
        history=LossHistory(list(point.losses)),
        saved=point.iteration,
    )


def save(session: Session, progress: TrainingProgress) -> None:
    """Gathers the adapter and the optimizer's state, and writes them on rank 0."""
    check_finite(session, progress, f"after batch {progress.done}")
    check_replicas(session, progress)
    adapter = gather_adapter(session)
    state = gather(session.links, session.trainer.owned_state())
    if session.is_first:
        _write(session, progress, adapter, state)
    progress.saved = progress.done
    progress.has_learned = False


def save_best(session: Session, progress: TrainingProgress) -> None:
    """Writes the adapter with the lowest validation loss so far."""
    check_finite(session, progress, f"after batch {progress.done}")
    adapter = gather_adapter(session)
    if session.is_first:
        save_adapter(session, session.config.adapter_path / run_folder.BEST, adapter)


def gather_adapter(session: Session) -> Arrays:
    """Returns the trained parameters of all ranks, on rank 0."""
    return gather(session.links, session.trainer.owned_parameters())


def save_adapter(session: Session, folder: Path, adapter: Arrays) -> None:
    config = _adapter_config(session)
    checkpoint.save_adapter(folder, config, adapter, peft=session.config.peft)


# --- checks before files are replaced


def check_finite(session: Session, progress: TrainingProgress, moment: str) -> None:
    """Raises EngineError on all ranks if one of them holds a number that is not finite."""
    notes = exchange(session.links, NotFinite(session.trainer.find_not_finite()))
    for rank, note in enumerate(notes):
        if note.name is not None:
            raise EngineError(
                f"Not all numbers of {note.name} on rank {rank} are finite {moment}, so nothing "
                f"was written. {saved_weights(session, progress)}",
                code="not_finite",
            )


def check_replicas(session: Session, progress: TrainingProgress) -> None:
    """Raises EngineError on all ranks if two replicas no longer have the same weights."""
    layout = session.groups.layout
    if layout.num_replicas == 1:
        return
    notes = exchange(session.links, WeightDigest(session.trainer.digest()))
    for rank, note in enumerate(notes):
        first, *_ = layout.replicas(rank)
        if note.digest != notes[first].digest:
            raise EngineError(
                f"Ranks {first} and {rank} should have the same weights after batch "
                f"{progress.done}, but they differ: check their memory and their versions of MLX. "
                f"Nothing was written. {saved_weights(session, progress)}"
            )


def check_sound(
    session: Session,
    progress: TrainingProgress,
    update: UpdateMetrics,
    window: Window,
) -> None:
    """Raises EngineError if a run would end with weights whose loss is not finite."""
    validated = dict(progress.history.losses).get(progress.done, math.nan)
    is_loss_finite = math.isfinite(update.loss) or math.isfinite(validated)
    if update.is_skipped and not is_loss_finite:
        raise EngineError(f"{window.failure} {saved_weights(session, progress)}", code="not_finite")


def saved_weights(session: Session, progress: TrainingProgress) -> str:
    """Returns a sentence that says which weights are on disk."""
    saved = progress.saved
    if saved is None:
        return "No checkpoint was written."
    kept = f"The last checkpoint and {run_folder.ADAPTERS} are those of batch {saved}."
    if progress.has_learned:
        return kept
    folder = run_folder.folder_of(session.config.adapter_path, saved)
    return (
        f"{kept} No later update was finite: to continue from the checkpoint before it, "
        f"if there is one, remove {folder} and give --resume."
    )


# --- rank 0


def _write(
    session: Session,
    progress: TrainingProgress,
    adapter: Arrays,
    state: Arrays,
) -> None:
    config = session.config
    loss_scale = session.trainer.loss_scale
    whole = checkpoint.TrainingCheckpoint(
        iteration=progress.done,
        step=num_steps(session.trainer.optimizer),
        settings=_settings(session, progress.num_parts),
        adapter=adapter,
        optimizer=state,
        losses=progress.history.losses,
        loss_scale=(loss_scale.value, loss_scale.num_finite),
    )
    published = checkpoint.save(config.adapter_path, whole)
    session.show(Saved(progress.done, published))
    if config.peft:
        checkpoint.export_peft(config.adapter_path)


def _load_last(session: Session) -> checkpoint.TrainingCheckpoint:
    """Returns the last checkpoint, and changes the folder's other files to agree with it."""
    config = session.config
    folder = config.adapter_path
    settings = _settings(session, new_progress(session).num_parts)
    if not config.micro_batches:
        del settings["micro_batches"]  # The former run's number applies on any number of ranks.
    last = checkpoint.load_last(folder, settings)
    checkpoint.remove_metrics_after(folder, last.iteration)
    checkpoint.publish(folder)
    for place in (folder, folder / run_folder.BEST):
        if config.peft and (place / run_folder.ADAPTERS).exists():
            checkpoint.export_peft(place)
    return last


def _resume_point(session: Session, last: checkpoint.TrainingCheckpoint) -> ResumePoint:
    value, num_finite = last.loss_scale
    return ResumePoint(
        iteration=last.iteration,
        step=last.step,
        losses=[(done, loss) for done, loss in last.losses],
        num_parts=last.settings.get("micro_batches", new_progress(session).num_parts),
        loss_scale=(value, num_finite),
    )


def _settings(session: Session, num_parts: int) -> dict[str, Any]:
    """Returns the settings that must not change when a run is resumed."""
    inputs = session.inputs
    settings = {
        **inputs.config.fixed_settings(),
        "model": inputs.checkpoint.digest,
        "data": inputs.train.digest,
        "micro_batches": num_parts,
    }
    if valid := inputs.splits.get("valid"):
        # Losses over other examples cannot be compared, as `best` and --early-stop would do.
        settings["valid.jsonl"] = valid.digest
    return settings


def _adapter_config(session: Session) -> dict[str, Any]:
    num_layers = session.layers[-1][1]
    return adapter_config(session.config, num_layers)
