"""One rank's whole run: join the ring, agree, load, train, save. What there is to see goes
to `show`, on rank 0."""

import dataclasses
import functools
import time
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import load as load_tokenizer

from serve.core.checkpoint import read_checkpoint
from serve.core.config import Cluster
from serve.core.errors import DisagreementError, EngineError, UsageError
from serve.hub.partial import PartialModel, open_partial, pin
from serve.rank.transport import Ring
from serve.rank.weights import load_stage
from serve.tune import checkpoint, data
from serve.tune.backward import TrainedStage
from serve.tune.config import FineTuneConfig
from serve.tune.events import Finished, Reported, Saved, Show, Started, Validated
from serve.tune.forecast import Forecast, OpSeconds, Probe, forecast, utilisation
from serve.tune.loop import Trainer, Update
from serve.tune.model import Draw, adapter_config, prepare, split_layers
from serve.tune.schedule import Schedule, Shape
from serve.tune.transport import Links, RingLinks, broadcast, exchange, gather, local_links

_JOIN_SECONDS = 60.0
_MOST_SKIPPED = 10  # updates in a row that may be not finite


def run(config: FineTuneConfig, cluster: Cluster, show: Show) -> None:
    """Raises BrigadeError. After it all ranks have done what they had to."""
    links = join(cluster)
    try:
        Run(config, links, show).run()
        exchange(links, "done")
    finally:
        links.close()


def join(cluster: Cluster) -> Links:
    if cluster.num_ranks == 1:
        return local_links(1)[0]
    nonce = zlib.crc32(cluster.secret.encode()) >> 1
    return RingLinks(Ring(cluster.rank, cluster.hosts, nonce, _JOIN_SECONDS))


class Run:
    def __init__(self, config: FineTuneConfig, links: Links, show: Show) -> None:
        self.config, self.links = config, links
        self._is_first = links.rank == 0
        self._show = show if self._is_first else lambda _: None
        self.model = self._open_model()
        self.folder = self.model.folder if isinstance(self.model, PartialModel) else self.model
        self.model_checkpoint = read_checkpoint(self.folder)
        self._read_data()
        self._agree()
        self._load()

    def run(self) -> None:
        config, start = self.config, 0
        if config.trains:
            start = self._begin()
            self._train(start)
        if config.test:
            chosen = self._validation("test", config.test_batches)
            self._validate(config.iters if config.trains else 0, "test", chosen)

    # --- before training

    def _open_model(self) -> Path | PartialModel:
        """The folder. Of a model on the hub rank 0 finds the commit, and each rank fetches
        its own part."""
        config = self.config
        if not config.hub_id:
            return config.model
        pinned = pin(config.hub_id, config.revision, config.cache_dir) if self._is_first else None
        commit, _ = broadcast(self.links, (pinned and pinned.snapshot.commit, []))
        return pinned or open_partial(config.hub_id, commit, config.cache_dir)

    def _read_data(self) -> None:
        """Every rank reads the examples: all need their shapes and the number of labels."""
        config, folder = self.config, self.config.data
        if not folder.is_dir():
            raise UsageError(
                f"--data {folder} is no folder: give one with train.jsonl (and valid.jsonl)."
            )
        tokenizer = load_tokenizer(self.folder)
        wanted = {"train": config.trains, "test": config.test}
        wanted["valid"] = config.trains and (folder / "valid.jsonl").exists()
        self.splits = {
            name: data.read_split(folder / f"{name}.jsonl", tokenizer, config)
            for name, is_wanted in wanted.items()
            if is_wanted
        }
        self.num_parts = config.num_micro_batches(self.links.num_ranks)
        if config.trains:
            data.batch_at(self.splits["train"], 0, config.batch_size, config.seed)

    def _agree(self) -> None:
        """Raises DisagreementError if a rank has other settings, another model or other data."""
        mine = {"model": self.model_checkpoint.digest, "settings": str(self.config)}
        mine |= {f"{name}.jsonl": split.digest for name, split in self.splits.items()}
        everyone = exchange(self.links, mine)
        names = sorted({name for facts in everyone for name in facts})
        rows = {name: {r: each.get(name, "") for r, each in enumerate(everyone)} for name in names}
        if different := {name: row for name, row in rows.items() if len(set(row.values())) > 1}:
            raise DisagreementError(different)

    def _load(self) -> None:
        config, links = self.config, self.links
        shape = Shape(links.num_ranks, 1, config.num_chunks())
        self.layers = split_layers(config, self.folder, shape.num_stages)
        draw = Draw(config.seed)
        tuned = functools.partial(prepare, config, draw)
        stages = {}
        for number in shape.stages(links.rank):
            loaded = load_stage(self.model, *self.layers[number], lambda *_: None, tuned)
            stages[number] = TrainedStage(loaded.stage, config.grad_checkpoint)
        self.trainer = Trainer(config, stages, links, draw)

    def _begin(self) -> int:
        """A new folder for the run, or the last state of a former one; the batches done."""
        config = self.config
        if not config.resume:
            if self._is_first:
                checkpoint.begin(config.adapter_path, adapter_config(config, self.layers[-1][1]))
            return 0
        note: Any = None
        arrays: list[mx.array] = []
        if self._is_first:
            last = checkpoint.load_last(config.adapter_path, self._settings())
            checkpoint.forget_metrics_after(config.adapter_path, last.iteration)
            note = last.iteration, last.step, list(last.adapter), list(last.optimizer)
            arrays = [*last.adapter.values(), *last.optimizer.values()]
        (iteration, step, names, state), arrays = broadcast(self.links, (note, arrays))
        adapter = dict(zip(names, arrays[: len(names)], strict=True))
        optimizer = dict(zip(state, arrays[len(names) :], strict=True))
        self.trainer.restore(adapter, optimizer, step)
        if iteration >= config.iters:
            raise UsageError(f"--resume: {iteration} batches are done: give more --iters.")
        return int(iteration)

    def _settings(self) -> dict[str, Any]:
        """What must be the same for a run to be the same when it is resumed."""
        facts = {"model": self.model_checkpoint.digest, "data": self.splits["train"].digest}
        return self.config.decides_numbers() | facts

    # --- training

    def _train(self, start: int) -> None:
        config, trainer, split = self.config, self.trainer, self.splits["train"]
        accumulated = config.grad_accumulation_steps
        schedule = trainer.schedule(accumulated * self.num_parts)
        before = self._probe(schedule)
        num_trained = sum(exchange(self.links, self._num_owned()))
        counts = len(split.examples), split.num_cut, split.num_dropped
        self._show(Started(schedule, self.layers, num_trained, before, *counts, start))
        chosen = self._validation("valid", config.val_batches)
        if not start:
            self._validate(0, "valid", chosen)
        window = _Window(self.links.num_ranks)
        for number in range(start // accumulated, config.iters // accumulated):
            window.add(trainer.update(number, self._batches(number), schedule))
            done = (number + 1) * accumulated
            is_last = done == config.iters

            def due(every: int, done: int = done, is_last: bool = is_last) -> bool:
                return is_last or done // every > (done - accumulated) // every

            if due(config.steps_per_report):
                self._report(done, window)
            if due(config.steps_per_eval):
                self._validate(done, "valid", chosen)
            if due(config.save_every):
                self._save(done)
        means = [mean for each in exchange(self.links, window.ops.means()) for mean in each]
        expected = utilisation(schedule, means)
        self._show(Finished(before, window.utilisation, expected, window.peak_bytes))

    def _batches(self, update: int) -> list[data.MicroBatch]:
        """The micro-batches of all batches of an update."""
        config, split = self.config, self.splits["train"]
        num_rows = config.batch_size // self.num_parts
        first = update * config.grad_accumulation_steps
        return [
            micro_batch
            for n in range(first, first + config.grad_accumulation_steps)
            for micro_batch in data.micro_batches(
                split, data.batch_at(split, n, config.batch_size, config.seed), num_rows
            )
        ]

    def _probe(self, schedule: Schedule) -> Forecast:
        """Runs the largest micro-batches and forgets the gradients, to tell what a step will
        take. Twice, because the first time everything is cold."""
        num_rows = self.config.batch_size // self.num_parts
        batch = data.largest(self.splits["train"], num_rows)
        trainer, ranks = self.trainer, self.links.num_ranks
        kind = "interleaved" if schedule.shape.num_chunks > 1 else "naive"
        small = trainer.schedule(ranks, kind)
        for _ in range(2):
            ran = trainer.pipeline.run(small, [batch] * ranks, 1.0)
            ran.gradients.clear()
            exchange(self.links, "warm")  # All are done before one begins again.
        state = sum(array.nbytes for array in dict(tree_flatten(trainer.optimizer.state)).values())
        trained = sum(array.nbytes for array in trainer.parameters().values())
        clips = self.config.max_grad_norm is not None
        probe = Probe.of(ran.records, mx.get_active_memory(), trained, state, clips=clips)
        notes = exchange(self.links, probe.to_json())
        return forecast(schedule, [Probe(**note) for note in notes])

    def _num_owned(self) -> int:
        parameters = self.trainer.parameters()
        return sum(int(parameters[name].size) for name in self.trainer.owned)

    def _validation(self, name: str, num_batches: int) -> list[data.MicroBatch]:
        if name not in self.splits or not num_batches:
            return []
        most = None if num_batches == -1 else num_batches * self.config.batch_size
        chosen = data.some_examples(self.splits[name], most, self.config.seed)
        return data.micro_batches(
            self.splits[name], chosen, self.config.batch_size // self.num_parts
        )

    def _validate(self, iteration: int, name: str, batches: list[data.MicroBatch]) -> None:
        if not batches:
            return
        began = time.perf_counter()
        loss = self.trainer.loss_of(batches)
        event = Validated(iteration, name, loss, time.perf_counter() - began)
        self._keep(event)

    def _report(self, iteration: int, window: "_Window") -> None:
        rate = float(self.trainer.optimizer.learning_rate.item())
        self._keep(window.report(iteration, rate, self.config.grad_accumulation_steps))

    def _keep(self, event: Reported | Validated) -> None:
        if self._is_first and self.config.trains:
            checkpoint.add_metrics(self.config.adapter_path, dataclasses.asdict(event))
        self._show(event)

    def _save(self, iteration: int) -> None:
        """Gathers the adapter and the optimizer's state, and writes them on rank 0."""
        trainer, links = self.trainer, self.links
        step = int(trainer.optimizer.step.item())
        parameters = trainer.parameters()
        adapter = gather(links, {name: parameters[name] for name in sorted(trainer.owned)})
        state = gather(links, trainer.owned_state())
        if self._is_first:
            whole = checkpoint.Checkpoint(iteration, step, self._settings(), adapter, state)
            self._show(Saved(iteration, checkpoint.save(self.config.adapter_path, whole)))


class _Window:
    """Updates since the last report, and what the whole run adds up to."""

    def __init__(self, num_ranks: int) -> None:
        self.peak_bytes = [0] * num_ranks
        self.ops = OpSeconds()
        self._busy = self._seconds = 0.0
        self._skipped_in_row = 0
        self._updates: list[Update] = []
        self._began = time.perf_counter()

    @property
    def utilisation(self) -> float:
        return self._busy / (len(self.peak_bytes) * self._seconds)

    def add(self, update: Update) -> None:
        self._updates.append(update)
        self._busy += sum(update.busy_seconds)
        self._seconds += update.seconds
        self.ops.add(update.records)
        peaks = zip(self.peak_bytes, update.peak_bytes, strict=True)
        self.peak_bytes = [max(pair) for pair in peaks]
        self._skipped_in_row = self._skipped_in_row + 1 if update.is_skipped else 0
        if self._skipped_in_row == _MOST_SKIPPED:
            raise EngineError(
                f"{_MOST_SKIPPED} updates in a row were not finite: lower --learning-rate, or "
                "set --max-grad-norm. The last checkpoint is whole."
            )

    def report(self, iteration: int, learning_rate: float, accumulated: int) -> Reported:
        """And begins a new window."""
        updates, seconds = self._updates, time.perf_counter() - self._began
        good = [update for update in updates if not update.is_skipped]
        num_labels = sum(update.num_labels for update in good)
        loss = sum(update.loss * update.num_labels for update in good)
        reported = Reported(
            iteration=iteration,
            loss=loss / num_labels if num_labels else float("nan"),
            learning_rate=learning_rate,
            gradient_norm=updates[-1].gradient_norm,
            tokens_per_second=sum(update.num_tokens for update in updates) / seconds,
            iterations_per_second=len(updates) * accumulated / seconds,
            utilisation=sum(update.utilisation for update in updates) / len(updates),
            peak_bytes=[max(peaks) for peaks in zip(*(u.peak_bytes for u in updates), strict=True)],
            num_skipped=len(updates) - len(good),
        )
        self._updates, self._began = [], time.perf_counter()
        return reported
