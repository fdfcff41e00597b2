"""The updates of one rank: it sums gradients and losses over all ranks, and updates its parameters.
This module does not access files."""

import hashlib
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import mlx.core as mx

from serve.core.errors import UsageError
from serve.core.messages import LossSum, TrainedNames, UpdateNote, WeightTypes
from serve.lora.sharded import TrainedParts
from serve.tune.backward import Arrays, TrainedStage
from serve.tune.config import FineTuneConfig
from serve.tune.data.examples import MicroBatch
from serve.tune.forecast import OpRecord
from serve.tune.layout import check_shares
from serve.tune.mesh import Groups
from serve.tune.model import DropoutKeys
from serve.tune.optimizer import make_optimizer, parts_of, states_of
from serve.tune.pipeline import Pipeline, ScheduleRun, number
from serve.tune.precision import HALF, LossScale, master_weights
from serve.tune.schedule import Schedule, Shape, check, make_schedule
from serve.tune.transport import Links, exchange, sum_arrays

_FORWARD_ROUND = 8  # how many micro-batches for each rank a validation starts at once
_UPDATE_PARTS = 16
_SUMMED_AT_ONCE = 16  # how many arrays one sum over the shards joins from their parts
Named = dict[tuple[str, str], mx.array]
"""Arrays of parameters, by the parameter's name and the array's."""
_MASTER = "master"  # the name of master weights, which no optimizer gives its arrays


def _stages_of(notes: Sequence[TrainedNames]) -> dict[str, list[int]]:
    """Returns the stages that hold each trained parameter, by the parameter's name."""
    stages: dict[str, list[int]] = {}
    for note in notes:
        for stage, names in note.stages.items():
            for name in names:
                stages.setdefault(name, []).append(stage)
    return stages


def _sum_over(links: Links, gradients: Arrays, names: Sequence[str]) -> None:
    """Replaces these gradients by their sums over some ranks, bit-equal on all of them."""
    if links.num_ranks == 1 or not names:
        return
    own = [gradients[name] for name in names]
    sums = sum_arrays(links, own)
    gradients.update(zip(names, sums, strict=True))


def _bytes_of(array: mx.array) -> memoryview:
    flat = array.reshape(-1).view(mx.uint8)
    mx.eval(flat)  # One array at a time: otherwise there would be a second copy of all arrays.
    return memoryview(cast(Any, flat))


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """The metrics of one update, equal on all ranks except for records. loss is the mean over the
    learned tokens. is_skipped says that something was not finite, so no parameter has changed.
    busy_seconds and peak_bytes hold one number for each rank."""

    loss: float
    gradient_norm: float
    num_labels: int
    num_tokens: int
    is_skipped: bool
    seconds: float
    busy_seconds: list[float]
    peak_bytes: list[int]
    records: list[OpRecord]


class Trainer:
    """Makes the updates of a run. All ranks make the same updates, each to its own parameters.

    shared are the parameters that several ranks of a pipeline hold. Every parameter has one owner,
    which saves it: the first shard of a stage in the first replica. `counted` are the parameters,
    or their parts, that this rank counts, so that each number is counted once over all ranks. parts
    says how the shards of a stage divide parameters; None without shards.
    """

    def __init__(
        self,
        config: FineTuneConfig,
        stages: dict[int, TrainedStage],
        groups: Groups,
        draw: DropoutKeys,
        parts: TrainedParts | None = None,
    ) -> None:
        self.config = config
        self.parts = parts or TrainedParts({}, set())
        self.stages = stages
        self.groups = groups
        self.links = groups.everybody
        self._draw = draw
        self.pipeline = Pipeline(stages, groups, draw)
        own_names = {number: stage.names for number, stage in stages.items()}
        notes = exchange(groups.pipeline, TrainedNames(own_names))
        holders = _stages_of(notes)
        if not holders:
            raise UsageError(
                "Nothing is trained: see num_layers, and keys of lora_parameters.",
                code="wrong_setting",
            )
        first_trained = min(min(numbers) for numbers in holders.values())
        self.shape = Shape(groups.layout.pipeline_size, 1, len(stages), first_trained)
        self.shared: set[str] = set()
        self.counted: set[str] = set()
        for name, numbers in holders.items():
            ranks = {self.shape.rank(number) for number in numbers}
            if len(ranks) > 1:
                self.shared.add(name)
            is_first = self.shape.rank(min(numbers)) == groups.pipeline.rank
            is_own = groups.shard == 0 or name in self.parts.divided
            if is_first and is_own and groups.replica == 0:
                self.counted.add(name)
        self.masters = master_weights(self.parameters())
        self.optimizer = make_optimizer(config)
        self.optimizer.init(self.parameters() | self.masters)
        mx.eval(self.masters, self.optimizer.state)
        self.dtypes = self._shared_dtypes()
        self.loss_scale = LossScale.of_model(is_float16=mx.float16 in self.dtypes)
        self._update_peak = 0  # the previous update's peak, exchanged before the next

    def parameters(self) -> Arrays:
        """Returns the trained parameters of this rank, by their names."""
        parameters: Arrays = {}
        for stage in self.stages.values():
            parameters |= stage.parameters()
        return parameters

    def set_whole(self, parameters: Arrays) -> None:
        """Sets this rank's parameters from the trained parameters of the whole model."""
        own = {name: self._part_of(name, array) for name, array in parameters.items()}
        self._set_parameters(own)

    def _part_of(self, name: str, array: mx.array) -> mx.array:
        """Returns this shard's part of a parameter, or of an array with the same shape."""
        part = self.parts.divided.get(name)
        return part.own_part(array) if part else array

    def _set_parameters(self, parameters: Arrays) -> None:
        for stage in self.stages.values():
            stage.update(parameters)

    @property
    def gradient_bytes(self) -> int:
        """The size of the gradients, summed over all micro-batches in float32."""
        sizes = (array.size for array in self.parameters().values())
        return sum(sizes) * mx.float32.size

    @property
    def updated_bytes(self) -> int:
        """The bytes that an update allocates before it frees the old arrays: all weights in the
        model's type, and one part of the master weights."""
        masters = sum(array.nbytes for array in self.masters.values())
        weights = sum(array.nbytes for array in self.parameters().values())
        return weights + masters // _UPDATE_PARTS

    def owned_parameters(self) -> Arrays:
        """Returns the whole parameters that this rank saves. All shards have to call this."""
        parameters = self.parameters()
        counted = {(name, ""): parameters[name] for name in sorted(self.counted)}
        return {name: array for (name, _), array in self._whole(counted).items()}

    def owned_state(self) -> Arrays:
        """Returns whole arrays, named PARAMETER.ARRAY: the optimizer's and the master weights, for
        the parameters that this rank saves. All shards of a stage have to call this."""
        whole = self._whole(self._state(self.counted))
        return {f"{name}.{part}": array for (name, part), array in whole.items()}

    def _state(self, names: Set[str]) -> Named:
        """Returns this rank's arrays of the optimizer and master weights, by parameter and name."""
        states = states_of(self.optimizer)
        own: Named = {}
        for name in sorted(names):
            for part, array in states[name].items():
                own[name, part] = array
        for name in sorted(names & self.masters.keys()):
            own[name, _MASTER] = self.masters[name]
        return own

    def _whole(self, own: Named) -> Named:
        """Joins the parts of all shards, on the first shard. The other shards get nothing."""
        whole = dict(own)
        keys = [key for key in own if key[0] in self.parts.divided]
        for start in range(0, len(keys), _SUMMED_AT_ONCE):
            some = keys[start : start + _SUMMED_AT_ONCE]
            padded = [self.parts.divided[key[0]].among_zeros(own[key]) for key in some]
            mx.eval(padded)  # A lazy array cannot leave the thread that made it.
            sums = sum_arrays(self.groups.shards, padded)
            whole |= zip(some, sums, strict=True)
        return {} if self.groups.shard else whole

    def restore(self, adapter: Arrays, state: Arrays, step: int) -> None:
        """Restores this rank's part of the state that all ranks saved after `step` updates."""
        self.set_whole(adapter)
        self.masters = master_weights(self.parameters())
        states = states_of(self.optimizer)
        for key, array in state.items():
            name, _, part = key.rpartition(".")
            own = self._part_of(name, array)
            if part == _MASTER and name in self.masters:
                self.masters[name] = own
            elif name in states and part in states[name]:
                states[name][part] = own
        for optimizer in parts_of(self.optimizer):
            optimizer.state["step"] = mx.array(step, mx.uint64)

    def find_not_finite(self) -> str | None:
        """Returns the name of a trained array on this rank that contains an infinity or a NaN."""
        arrays = self.parameters()
        for (name, part), array in self._state(arrays.keys()).items():
            arrays[f"{name}.{part}"] = array
        for name, array in arrays.items():
            # One array at a time, because the results of isfinite take memory too.
            if not mx.issubdtype(array.dtype, mx.floating):
                continue
            is_finite = mx.isfinite(array).all()
            if not is_finite.item():
                return name
        return None

    def digest(self) -> str:
        """Returns a digest of this rank's trained weights, master weights and optimizer's state."""
        digest = hashlib.sha256()
        states = states_of(self.optimizer)
        for name, array in sorted(self.parameters().items()):
            named = {"": array, _MASTER: self.masters.get(name), **states.get(name, {})}
            for part, each in named.items():
                if each is not None:
                    digest.update(f"{name} {part}".encode())
                    digest.update(_bytes_of(each))
        return digest.hexdigest()

    def schedule(self, num_micro_batches: int, kind: str | None = None) -> Schedule:
        """Makes a schedule and proves that it can be run."""
        shape = replace(self.shape, num_micro_batches=num_micro_batches)
        schedule = make_schedule(kind or self.config.schedule, shape)
        check(schedule)
        return schedule

    def update_schedule(self, num_micro_batches: int) -> Schedule:
        """Makes this replica's schedule of an update. Raises UsageError if the replicas cannot
        divide its micro-batches evenly."""
        num_replicas = self.groups.layout.num_replicas
        check_shares(num_micro_batches, num_replicas)
        return self.schedule(num_micro_batches // num_replicas)

    def update(
        self,
        number: int,
        batches: Sequence[MicroBatch],
        schedule: Schedule,
    ) -> UpdateMetrics:
        """Makes the update with this number. The schedule is for this replica's share."""
        self._draw.update = number
        num_labels = sum(batch.num_labels for batch in batches)
        ran, notes, loss, norm = self._gradients(batches, num_labels, schedule)
        # All ranks see the same notes, so either all of them skip the update or none does.
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite:
            mx.reset_peak_memory()
            self._apply(ran.gradients, norm)
            self._update_peak = mx.get_peak_memory()
            self.loss_scale.count_finite()
        ran.gradients.clear()
        if mx.get_cache_memory() > self.config.clear_cache_bytes:
            mx.clear_cache()
        return UpdateMetrics(
            loss=loss,
            gradient_norm=norm,
            num_labels=num_labels,
            num_tokens=sum(batch.num_tokens for batch in batches),
            is_skipped=not is_finite,
            seconds=max(note.seconds for note in notes),
            busy_seconds=[note.busy_seconds for note in notes],
            peak_bytes=[note.peak_bytes for note in notes],
            records=ran.records,
        )

    def _gradients(
        self,
        batches: Sequence[MicroBatch],
        num_labels: int,
        schedule: Schedule,
    ) -> tuple[ScheduleRun, list[UpdateNote], float, float]:
        """Returns this rank's result, all ranks' notes, the loss, and the norm of all ranks'
        gradients. Gradients that overflow in float16 are computed again with a lower loss scale, so
        the batch is not lost. If no scale helps, the scale is restored."""
        before = self.loss_scale.value
        while True:
            ran = self.pipeline.run(
                schedule,
                self._share(batches),
                scale=1 / num_labels,
                loss_scale=self.loss_scale.value,
            )
            self._sum_shared(ran.gradients)
            partial = sorted(self.parts.partial & ran.gradients.keys())
            _sum_over(self.groups.shards, ran.gradients, partial)
            _sum_over(self.groups.replicas, ran.gradients, sorted(ran.gradients))
            own_note = self._update_note(ran)
            notes = exchange(self.links, own_note)
            loss = sum(note.loss for note in notes)
            # fsum is exact, so the norm does not depend on how many ranks share the parameters.
            squares = chain.from_iterable(note.squares for note in notes)
            norm = math.sqrt(math.fsum(squares))
            if math.isfinite(norm) or not math.isfinite(loss):
                return ran, notes, loss, norm
            if not self.loss_scale.lower():
                self.loss_scale.value = before
                return ran, notes, loss, norm
            ran.gradients.clear()

    def _update_note(self, ran: ScheduleRun) -> UpdateNote:
        peaks = [record.peak for record in ran.records]
        return UpdateNote(
            loss=self._counted_loss(ran),
            squares=self._squares(ran.gradients),
            busy_seconds=ran.busy_seconds,
            seconds=ran.seconds,
            peak_bytes=max(self._update_peak, *peaks),
        )

    def _counted_loss(self, ran: ScheduleRun) -> float:
        """Returns the loss on the first shard, and 0 on the others, which compute the same."""
        return 0.0 if self.groups.shard else ran.loss

    def loss_of(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the mean loss over the learned tokens. Runs only forward passes."""
        self._set_training(False)
        total = 0.0
        layout = self.groups.layout
        size = _FORWARD_ROUND * layout.pipeline_size * layout.num_replicas
        for start in range(0, len(batches), size):
            part = self._share(batches[start : start + size])
            schedule = self.schedule(len(part), "forward")
            ran = self.pipeline.run(schedule, part, 1.0)
            # After each round all ranks wait for each other: otherwise the first would run ahead.
            notes = exchange(self.links, LossSum(self._counted_loss(ran)))
            total += sum(note.loss for note in notes)
        self._set_training(True)
        num_labels = sum(batch.num_labels for batch in batches)
        return total / num_labels

    def _share(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Returns this replica's share of micro-batches, a mix of short and long ones."""
        return batches[self.groups.replica :: self.groups.layout.num_replicas]

    def _shared_dtypes(self) -> set[mx.Dtype]:
        """Returns the types of all weights on all ranks."""
        own: set[str] = set()
        for stage in self.stages.values():
            for array in stage.stage.weights().values():
                own.add(str(array.dtype))
        names: set[str] = set()
        for note in exchange(self.groups.pipeline, WeightTypes(list(own))):
            names.update(note.names)
        dtypes = (*HALF, mx.float32)
        return {dtype for dtype in dtypes if str(dtype) in names}

    def _set_training(self, mode: bool) -> None:
        self._draw.is_on = mode
        for stage in self.stages.values():
            stage.stage.model.train(mode)

    def _sum_shared(self, gradients: Arrays) -> None:
        """Adds up the gradients of each parameter that several ranks hold, such as an adapter of
        a tied embedding. Every rank passes the sum on, even a rank without this parameter."""
        for name in sorted(self.shared):
            # An integer 0, because a float32 zero would turn a bfloat16 sum into float32.
            zero = mx.array(0)
            own = gradients.get(name, zero)
            (total,) = sum_arrays(self.groups.pipeline, [own])
            if name in gradients:
                gradients[name] = total

    def _squares(self, gradients: Arrays) -> list[float]:
        squares = [
            gradients[name].astype(mx.float32).square().sum()
            for name in sorted(self.counted & gradients.keys())
        ]
        mx.eval(squares)  # One number for each parameter, which ranks sum.
        return [number(square) for square in squares]

    def _apply(self, gradients: Arrays, norm: float) -> None:
        max_norm = self.config.max_grad_norm
        if max_norm is not None and norm > max_norm:
            factor = max_norm / (norm + 1e-6)
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        before = self.parameters()
        made = self.optimizer.apply_gradients(gradients, before | self.masters)
        parameters: Arrays = {}
        states = states_of(self.optimizer)
        names = list(made)
        size = len(names) // _UPDATE_PARTS + 1
        for start in range(0, len(names), size):
            part = names[start : start + size]
            # In parts: each part frees the arrays that it replaces before the next takes memory.
            for name in part:
                wide = made.pop(name)
                parameters[name] = wide.astype(before[name].dtype)
                if name in self.masters:
                    self.masters[name] = wide
            updated = [parameters[name] for name in part]
            masters = [self.masters.get(name) for name in part]
            mx.eval(updated, masters, [states.get(name) for name in part])
        mx.eval(self.optimizer.state)  # Else the graphs of all updates would grow.
        self._set_parameters(parameters)
