"""The whole run of one rank: join the ring, agree, load, train, save. On rank 0, `show` gets
all events for the user."""

import time
from pathlib import Path

import mlx.core as mx

from serve.core.config import TRAINING_JOIN_SECONDS, Cluster
from serve.core.errors import BrigadeError, ClusterError, EngineError, LostRankError
from serve.core.messages import NumTrained, OpTimes, Probe, Reached
from serve.core.mlx_errors import explained, is_lost_peer
from serve.ring.peers import RingLostError
from serve.tune import saving
from serve.tune.config import FineTuneConfig
from serve.tune.data import examples, packing
from serve.tune.data.examples import MicroBatch
from serve.tune.events import Finished, NothingLeft, Show, Started, Validated, Written
from serve.tune.forecast import OpSpan, TrainingForecast, forecast, probe_of, spans, utilisation
from serve.tune.inputs import Inputs, agree, open_inputs
from serve.tune.loop import UpdateMetrics
from serve.tune.mesh import Groups, join
from serve.tune.precision import HALF
from serve.tune.results import card, run_folder, whole
from serve.tune.results.checkpoint import load_arrays
from serve.tune.schedule import Schedule
from serve.tune.session import (
    Session,
    TrainingProgress,
    emit,
    held_out_batches,
    load,
    update_batches,
)
from serve.tune.transport import exchange, share
from serve.tune.window import Window

_RETURN_SECONDS = 600.0  # how long a rank that was started again waits for the others
_ADVICE = (
    "If no launcher starts the run again, start it yourself, with --resume if it has a checkpoint."
)
# How far rounding may change a loss if its example moves within a row, as a share of the loss.
_ROUNDING = 1e-4
_HALF_ROUNDING = 1e-2


def run(
    config: FineTuneConfig,
    cluster: Cluster,
    show: Show,
    command: str = "",
) -> Path:
    """Runs everything. Returns the folder of the weights to serve. Raises BrigadeError."""
    layout = config.layout(cluster.num_ranks)
    is_return = cluster.num_returns > 0
    patience = _RETURN_SECONDS if is_return else TRAINING_JOIN_SECONDS
    groups = join(cluster, layout, config.stall_timeout, patience)
    failure: BrigadeError | None = ClusterError("It has ended: look at its log.", code="lost_rank")
    try:
        folder = _run_to_the_end(config, groups, show, command, is_return=is_return)
        failure = None
        return folder
    except BrigadeError as error:
        failure = error
        raise
    finally:
        groups.everybody.close(failure)


def _run_to_the_end(
    config: FineTuneConfig,
    groups: Groups,
    show: Show,
    command: str,
    *,
    is_return: bool,
) -> Path:
    """Returns `run`'s folder once all ranks have done their parts. Raises LostRankError."""
    try:
        folder = run_rank(config, groups, show, command, is_return=is_return)
        exchange(groups.everybody, Reached("the end"))
        return folder
    except RingLostError as error:
        raise LostRankError(f"{error} {_ADVICE}") from error
    except RuntimeError as error:
        if is_lost_peer(error):
            raise LostRankError(f"The ring of the shards broke: {error}. {_ADVICE}") from error
        if meaning := explained(error, "This rank"):
            raise meaning from error
        raise


def run_rank(
    config: FineTuneConfig,
    groups: Groups,
    show: Show,
    command: str = "",
    *,
    is_return: bool = False,
) -> Path:
    """Does one rank's part of a run. is_return says that all ranks were started again."""
    links = groups.everybody
    inputs = open_inputs(config, links)
    agree(inputs, links)
    has_checkpoint = saving.has_checkpoint(inputs.config, links, is_return=is_return)
    session = load(inputs, groups, show if links.rank == 0 else lambda _: None)
    progress = saving.new_progress(session)
    ran: list[OpSpan] = []
    if session.config.trains:
        check_packing(session)
        if has_checkpoint:
            progress = saving.resume(session)
        else:
            progress = saving.start(session)
        # A run may have ended after its last batch, before the steps below.
        is_early = progress.history.has_stalled(session.config.early_stop)
        if progress.done < session.config.iters and not is_early:
            ran = train(session, progress)
        else:
            session.show(NothingLeft(progress.done, is_early))
    return finish(session, progress, ran, command)


def check_packing(session: Session) -> None:
    """Raises PlanError if packing would change the loss."""
    inputs = session.inputs
    if not inputs.config.packing or inputs.unpacked is None:
        return
    name = inputs.checkpoint.model_type
    trainer = session.trainer
    for stage in trainer.stages.values():
        packing.check_stage(stage.stage, name)
    is_half = not trainer.dtypes.isdisjoint(HALF)
    rounding = _HALF_ROUNDING if is_half else _ROUNDING
    longest = int(inputs.train.lengths.max())
    packing.check_exact(inputs.unpacked, longest, name, trainer.loss_of, rounding)


# --- training


def train(session: Session, progress: TrainingProgress) -> list[OpSpan]:
    """Trains until the last batch, or until the validation loss no longer falls. Returns the times
    of all ops of the last update, on all ranks. Raises BrigadeError."""
    config = session.config
    num_micro_batches = config.grad_accumulation_steps * progress.num_parts
    schedule = session.trainer.update_schedule(num_micro_batches)
    expected = measure(session, progress.num_parts, schedule)
    _tell_start(session, progress, schedule, expected)
    saving.check_finite(session, progress, "before training")
    held_out = held_out_batches(session, progress.num_parts, "valid")
    if not progress.done:
        _validate(session, progress, held_out)
    is_float16 = mx.float16 in session.trainer.dtypes
    window = Window(session.links.num_ranks, is_float16=is_float16)
    is_last = False
    must_save = False
    while not is_last:
        update = _update(session, progress, schedule, window)
        is_last = progress.done == config.iters
        if is_last or _is_due(config, progress, config.steps_per_report):
            _report(session, progress, window)
        if is_last or _is_due(config, progress, config.steps_per_eval):
            _validate(session, progress, held_out)
            is_last = is_last or progress.history.has_stalled(config.early_stop)
        if is_last and window.updates:
            _report(session, progress, window)
        must_save = must_save or is_last or _is_due(config, progress, config.save_every)
        # An update may be skipped because of its weights, so saving waits.
        if must_save and (is_last or not update.is_skipped):
            saving.check_sound(session, progress, update, window)
            saving.save(session, progress)
            must_save = False
    return _tell_end(session, progress, schedule, expected, window)


def _is_due(config: FineTuneConfig, progress: TrainingProgress, every: int) -> bool:
    """Whether the last update has completed another `every` batches."""
    num_since_due = progress.done % every
    return num_since_due < config.grad_accumulation_steps


def _update(
    session: Session,
    progress: TrainingProgress,
    schedule: Schedule,
    window: Window,
) -> UpdateMetrics:
    """Makes the next update. Raises EngineError after too many that were not finite."""
    num_accumulated = session.config.grad_accumulation_steps
    began = time.perf_counter()
    batches = update_batches(session, progress)
    number = progress.done // num_accumulated
    update = session.trainer.update(number, batches, schedule)
    window.add(update, time.perf_counter() - began)
    progress.has_learned = progress.has_learned or not update.is_skipped
    if window.has_failed:
        raise EngineError(
            f"{window.failure} {saving.saved_weights(session, progress)}", code="not_finite"
        )
    progress.done += num_accumulated
    return update


def measure(session: Session, num_parts: int, schedule: Schedule) -> TrainingForecast:
    """Runs the largest micro-batches twice, because the first run includes one-time costs."""
    trainer = session.trainer
    pipeline_size = session.groups.layout.pipeline_size
    num_rows = session.config.batch_size // num_parts
    largest = examples.largest(session.inputs.train, num_rows)
    kind = "interleaved" if schedule.shape.num_chunks > 1 else "naive"
    small = trainer.schedule(pipeline_size, kind)
    for _ in range(2):
        ran = trainer.pipeline.run(small, [largest] * pipeline_size, 1.0)
        ran.gradients.clear()
        exchange(session.links, Reached("warm"))  # Waits until all ranks have finished.
    probe: Probe = probe_of(
        ran.records,
        base=mx.get_active_memory(),
        gradients=trainer.gradient_bytes,
        updated=trainer.updated_bytes,
        clips=session.config.max_grad_norm is not None,
        sums=session.groups.replicas.num_ranks > 1,
    )
    probes = exchange(session.links, probe)
    return forecast(schedule, probes, session.groups.layout)


def _validate(session: Session, progress: TrainingProgress, batches: list[MicroBatch]) -> None:
    """Computes the validation loss, and saves the weights if it is the lowest so far."""
    if not batches:
        return
    loss = _held_out_loss(session, progress.done, "valid", batches)
    if progress.history.add(progress.done, loss):
        saving.save_best(session, progress)


def _held_out_loss(
    session: Session,
    iteration: int,
    name: str,
    batches: list[MicroBatch],
) -> float:
    began = time.perf_counter()
    loss = session.trainer.loss_of(batches)
    validated = Validated(iteration, name, loss, time.perf_counter() - began)
    emit(session, validated)
    return loss


def _report(session: Session, progress: TrainingProgress, window: Window) -> None:
    learning_rate = float(session.trainer.optimizer.learning_rate.item())
    accumulated = session.config.grad_accumulation_steps
    reported = window.report(progress.done, learning_rate, accumulated)
    emit(session, reported)


def _tell_start(
    session: Session,
    progress: TrainingProgress,
    schedule: Schedule,
    expected: TrainingForecast,
) -> None:
    split = session.inputs.train
    trainer = session.trainer
    parameters = trainer.parameters()
    num_counted = sum(parameters[name].size for name in trainer.counted)
    notes = exchange(session.links, NumTrained(num_counted))
    num_trained = sum(note.count for note in notes)
    started = Started(
        schedule=schedule,
        layout=session.groups.layout,
        layers=session.layers,
        num_trained=num_trained,
        forecast=expected,
        size=split.size,
        num_cut=split.num_cut,
        num_dropped=split.num_dropped,
        iteration=progress.done,
        num_iterations=session.config.iters,
    )
    session.show(started)


def _tell_end(
    session: Session,
    progress: TrainingProgress,
    schedule: Schedule,
    expected: TrainingForecast,
    window: Window,
) -> list[OpSpan]:
    own = OpTimes([], [])
    if session.links.rank in session.groups.layout.pipeline(0):
        # One pipeline's times stand for those of the others, which do the same.
        own_spans = spans(window.last_records)
        own = OpTimes(window.ops.means(), [*own_spans])
    notes = exchange(session.links, own)
    means = [mean for note in notes for mean in note.means]
    finished = Finished(
        iteration=progress.done,
        is_early=progress.done < session.config.iters,
        forecast=expected,
        utilisation=window.utilisation,
        expected_utilisation=utilisation(schedule, means),
        peak_bytes=window.peak_bytes,
        best=progress.history.best,
    )
    emit(session, finished)
    return [OpSpan(*span) for note in notes for span in note.spans]


# --- after training


def finish(
    session: Session,
    progress: TrainingProgress,
    ran: list[OpSpan],
    command: str,
) -> Path:
    """Tests the best weights, and writes card and charts. Returns the folder of these weights."""
    config = session.config
    iteration, folder = _best(config, progress)
    if config.test:
        if folder != config.adapter_path:
            read = load_arrays(folder / run_folder.ADAPTERS) if session.is_first else {}
            best = share(session.links, read)
            session.trainer.set_whole(best)
        batches = held_out_batches(session, progress.num_parts, "test")
        if batches:
            _held_out_loss(session, iteration, "test", batches)
    if config.trains and session.is_first:
        facts = _card_facts(session.inputs, session.links.num_ranks, command)
        written = card.write(config, facts, ran)
        session.show(written)
        if config.fine_tune_type == "full":
            trained = folder / run_folder.ADAPTERS
            model = whole.write(session.inputs.model, trained, config.whole_path)
            session.show(Written([model], None))
    return folder


def _best(config: FineTuneConfig, progress: TrainingProgress) -> tuple[int, Path]:
    """Returns the batches and the folder of the weights with the lowest validation loss."""
    best = progress.history.best
    if best:
        iteration, _ = best
        if 0 < iteration < progress.done:
            return iteration, config.adapter_path / run_folder.BEST
    return progress.done, config.adapter_path


def _card_facts(inputs: Inputs, num_ranks: int, command: str) -> card.Facts:
    data = {name: (split.size, split.digest) for name, split in inputs.splits.items()}
    return card.Facts(
        command=command,
        model_digest=inputs.checkpoint.digest,
        data=data,
        num_ranks=num_ranks,
    )
