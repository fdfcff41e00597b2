"""The adapters of a stage: puts adapters into its modules, or removes them, between steps.

`serve.lora.reading` checks and reads adapters, `serve.lora.layers` applies them.
"""

import functools
import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from serve.core.errors import AdapterError, EngineError, ModelError
from serve.core.messages import AdapterRead, AdapterRefused, LoadAdapter
from serve.core.types import Row, Step
from serve.lora import copies
from serve.lora.files import (
    CONFIG_FILE,
    AdapterFiles,
    TargetModule,
    read_adapter,
)
from serve.lora.layers import (
    Adapted,
    ModuleMatrices,
    Rows,
    record_routing,
)
from serve.lora.reading import (
    check_fit,
    checksum,
    fetch,
    num_bytes,
    places,
    read_matrices,
)
from serve.model import trace
from serve.model.sharding import Divisions
from serve.model.stage import Stage

if TYPE_CHECKING:
    from serve.hub.partial import PartialModel

_MIN_SLOTS = 4
_MAX_RANK = 512  # the largest rank: it sets the size of all slots


class Adapters:
    """The adapters of a stage, by version, a number that rank 0 assigns. `read` may run in a
    separate thread. cache_dir stores parts of hub adapters; `copies` is a folder that outlives this
    process. divisions are the modules that are divided among shards."""

    def __init__(
        self,
        stage: Stage,
        cache_dir: Path | None = None,
        copies: Path | None = None,
        divisions: Divisions | None = None,
    ) -> None:
        self._cache_dir = cache_dir
        self._copies = copies
        self._places = dict(places(stage, divisions or {}))
        self._division = _digest(divisions or {})
        self._num_layers = len(stage.layers)
        self._read: dict[int, ModuleMatrices] = {}
        self._uncopied: tuple[int, ModuleMatrices, AdapterRead] | None = None
        self._answers: dict[int, AdapterRead] = {}  # for rank 0, by loaded version
        self._slots: dict[int, int] = {}
        self._num_slots = 0
        self._adapted: dict[str, Adapted] = {}
        self._rows = Rows()
        self._has_changed = False  # whether adapters changed since the last step

    @property
    def num_bytes(self) -> int:
        # Another thread may read an adapter meanwhile, and so change the dictionary.
        waiting = list(self._read.values())
        waiting_bytes = sum(num_bytes(matrices) for matrices in waiting)
        installed_bytes = sum(array.nbytes for array in self._arrays())
        return waiting_bytes + installed_bytes

    def read(
        self,
        version: int,
        path: str,
        root: str | None,
        commit: str | None = None,
    ) -> tuple[AdapterFiles, ModuleMatrices]:
        """Checks the whole adapter and reads its matrices for this stage. With a commit, path is
        `org/name` on the hub. If it raises AdapterError, nothing has changed."""
        partial = self._open(path, commit) if commit else None
        folder = str(partial.folder) if partial else path
        files = read_adapter(folder, root, is_whole=partial is None)
        if files.rank > _MAX_RANK:
            raise AdapterError(
                f"The adapter has rank {files.rank}: at most {_MAX_RANK} can be used.",
                code="out_of_range",
            )
        self._check_targets(files)
        targets: dict[str, TargetModule] = {}
        for name, target in files.targets.items():
            place = self._places.get(name)
            if place is None:
                continue  # The module belongs to another stage.
            check_fit(name, place, files, target)
            targets[name] = target
        if partial:
            fetch(partial, targets)
        matrices = read_matrices(files, targets, self._places)
        self._read[version] = matrices
        return files, matrices

    def _check_targets(self, files: AdapterFiles) -> None:
        """Raises AdapterError if the number of layers differs, or a named module has no tensors."""
        num_layers = files.num_layers
        other = (
            f"This adapter was made for another model: it has {num_layers} layers, this model has "
            f"{self._num_layers}."
        )
        if num_layers > self._num_layers:
            raise AdapterError(other, code="other_model")
        for name, place in self._places.items():
            wanted = files.expects(name, place.layer, place.inside, self._num_layers)
            if not wanted or name in files.targets:
                continue
            if num_layers and (place.layer or 0) >= num_layers:
                raise AdapterError(other, code="other_model")
            raise AdapterError(
                f"The adapter has no tensors for {name}, which its {CONFIG_FILE} names: it is "
                "incomplete, or was made for another model.",
                code="missing_tensor",
            )

    def _open(self, repo: str, commit: str) -> "PartialModel":
        # Imported here, because an adapter in a folder does not need it.
        from serve.hub.partial import open_partial
        from serve.hub.snapshot import ADAPTER

        try:
            return open_partial(repo, commit, self._cache_dir, kind=ADAPTER)
        except ModelError as error:
            raise AdapterError(str(error), code=error.code) from error

    def answer(self, asked: LoadAdapter) -> AdapterRead | AdapterRefused:
        """Reads an adapter, and returns the answer to rank 0. The files are not read again if the
        version is loaded here, or an earlier engine has left a copy."""
        version = asked.version
        if version in self._answers:
            return self._answers[version]
        copy = self._copy_of(version, asked.held) if self._copies else None
        if copy:
            matrices, answer = copy
            for own in matrices.values():
                mx.eval(own.a, own.b, own.gain)
            self._read[version] = matrices
            self._answers[version] = answer
            return answer
        try:
            files, matrices = self.read(version, asked.path, asked.root, asked.commit)
        except AdapterError as error:
            return AdapterRefused(version, str(error), error.http_status, error.code)
        targets = files.targets
        scales = {target.scale for target in targets.values()}
        kinds = {name.rpartition(".")[2] for name in targets}
        scale = scales.pop() if len(scales) == 1 else None
        answer = AdapterRead(
            version=version,
            digest=files.digest,
            checksum=checksum(files.digest, matrices),
            targets=sorted(targets),
            own=sorted(matrices),
            kinds=sorted(kinds),
            lora_rank=files.rank,
            scale=scale,
            num_bytes=num_bytes(matrices),
        )
        self._uncopied = version, matrices, answer
        self._answers[version] = answer
        return answer

    def _copy_of(
        self,
        version: int,
        loaded: Collection[int],
    ) -> tuple[ModuleMatrices, AdapterRead] | None:
        """Returns an earlier engine's copy of a version; None if it had other layers or parts."""
        assert self._copies
        copy = copies.read(self._copies, version, loaded, self._division)
        if not copy:
            return None
        _, answer = copy
        targets_here = self._places.keys() & answer.targets
        if answer.own != sorted(targets_here):
            return None
        return copy

    def copy(self) -> None:
        """Writes a copy of the adapter that was read last. Rank 0 already has its answer."""
        if self._copies and self._uncopied:
            copies.write(self._copies, *self._uncopied, self._division)
        self._uncopied = None

    # --- in the step loop

    def install(self, rows: Iterable[Row]) -> list[mx.array]:
        """Installs the versions of the rows of a step. Returns the arrays, if any has changed: if
        they are evaluated before the forward pass, MLX can write the tables in place."""
        needed = {row.adapter_version for row in rows}
        for version in sorted(needed.difference(self._slots, {0})):
            self._install(version)
        arrays = self._arrays() if self._has_changed else []
        self._has_changed = False
        return arrays

    def free_all_but(self, versions: Collection[int]) -> list[mx.array]:
        """Frees all versions but these. Returns the arrays to evaluate, as install does."""
        loaded = self._answers.keys() | self._read.keys() | self._slots.keys()
        for version in sorted(loaded - set(versions)):
            self.unload(version)
        return self._arrays()

    def _install(self, version: int) -> None:
        modules = self._read.pop(version, None)
        if modules is None:
            raise EngineError(
                f"A step names adapter version {version}, which is not loaded.", code="out_of_step"
            )
        taken = set(self._slots.values())
        self._has_changed = True
        free = (number for number in itertools.count(1) if number not in taken)
        slot = next(free)
        if slot >= self._num_slots:
            unchanged = {number: number for number in taken}
            self._move(unchanged, 2 * self._num_slots)
        self._slots[version] = slot
        for name, matrices in modules.items():
            if name not in self._adapted:
                place = self._places[name]
                self._adapted[name] = Adapted(name, place.module, self._rows)
                if place.router:
                    trace.open_seam(place.router, functools.partial(record_routing, self._rows))
            self._adapted[name].write(slot, matrices, self._num_slots)

    def unload(self, version: int) -> None:
        """Frees a version, if it is here."""
        self._answers.pop(version, None)
        self._read.pop(version, None)
        slot = self._slots.pop(version, None)
        if slot is None:
            return
        self._has_changed = True
        for adapted in self._adapted.values():
            adapted.clear(slot)
        num_needed = len(self._slots) + 1  # Slot 0 is never free.
        if self._num_slots > _MIN_SLOTS and self._num_slots >= 4 * num_needed:
            moved: dict[int, int] = {}
            for new, (kept, old) in enumerate(self._slots.items(), start=1):
                moved[old] = new
                self._slots[kept] = new
            self._move(moved, self._num_slots // 2)

    def select(self, step: Step, rows: Sequence[int | None]) -> None:
        """Selects the adapters for the next forward pass of these rows; None is a padding row."""
        if not self._slots:
            return  # Then every module is plain, whatever was selected before.
        slots: list[int] = []
        own: set[int] = set()
        for n in rows:
            version = 0 if n is None else step.rows[n].adapter_version
            slot = self._slots[version] if version else 0
            slots.append(slot)
            if n is not None:
                own.add(slot)
        if len(own) == 1:
            self._rows.alone = min(own)
        else:
            self._rows.alone = None
        if len(own) > 1:
            self._rows.index = mx.array(slots)
        else:
            self._rows.index = None
        self._rows.used = own - {0}

    def _move(self, moved: Mapping[int, int], num_slots: int) -> None:
        """Moves the contents of slots (old number: new number), and resizes the tables to num_slots
        slots. Free slots become zero."""
        self._num_slots = max(_MIN_SLOTS, num_slots)
        sources = [0] * self._num_slots
        for old, new in moved.items():
            sources[new] = old
        for adapted in self._adapted.values():
            adapted.move(sources)

    def _arrays(self) -> list[mx.array]:
        arrays: list[mx.array] = []
        for adapted in list(self._adapted.values()):
            arrays += adapted.arrays()
        return arrays


def _digest(divisions: Divisions) -> str:
    """Identifies the part of each module that a shard has."""
    parts = sorted(divisions.items())
    encoded = repr(parts).encode()
    return hashlib.sha256(encoded).hexdigest()[:16]
