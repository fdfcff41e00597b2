"""Loads LoRA adapters: asks all ranks, waits for their answers, and restores adapters after faults.

All ranks read and check the files first. If no rank refuses the files, the name gets the new
version: later sequences use it, and running sequences keep their old version until they end.
`serve.front.adapters.registry` knows which name stands for which version.
"""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any, Protocol

from serve.core.config import ServeConfig, hub_id
from serve.core.errors import (
    AdapterError,
    BrigadeError,
    ClusterError,
    ModelError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UsageError,
)
from serve.core.messages import AdapterRead, AdapterRefused, LoadAdapter
from serve.front.adapters.adapter import Adapter, LoadedVersion, Source, checked
from serve.front.adapters.registry import AdapterRegistry, adapter_not_found
from serve.hub.access import FAILURES, is_refusal
from serve.hub.partial import pin
from serve.hub.snapshot import ADAPTER
from serve.parent.engines import Engines

_logger = logging.getLogger(__name__)

# An adapter that crashes the engines would crash the next ones, too.
_MAX_TRIES = 2


class AdapterUsers(Protocol):
    """The methods of `Requests` that loading and freeing adapters needs."""

    adapters: AdapterRegistry

    def identify_adapter(self, version: int, contents: str) -> None:
        """Stores a text that identifies the contents of a version."""

    def retire_adapter(self, version: int) -> None:
        """Frees the version on all stages once its last sequence has ended."""

    def end_with_adapter(self, version: int, error: BrigadeError) -> None:
        """Ends the requests that run or wait with the version."""


class _Late(AdapterError):
    """A rank has not answered in time."""


class _RefusedByAll(AdapterError):
    """Every rank has refused the files, so no rank holds the version."""


class _Interrupted(Exception):
    """The engines that were asked have ended."""


class AdapterLoader:
    """Loads adapters on all ranks, and then changes the registry."""

    hears = (AdapterRead, AdapterRefused)

    def __init__(self, config: ServeConfig, engines: Engines, requests: AdapterUsers) -> None:
        self._config = config
        self._engines, self._requests = engines, requests
        self.registry = requests.adapters
        self._last_version = 0
        self._answers: dict[int, dict[int, AdapterRead | AdapterRefused]] = {}
        self._answered = asyncio.Event()
        self._broken: BrigadeError | None = None
        self._num_interrupted = 0
        self._can_ask = asyncio.Event()  # Set while the engines accept messages about adapters.
        self._could_ask = False  # whether the engines have ever accepted such messages
        self._lock = asyncio.Lock()

    # --- for requests

    async def version(self, name: str) -> int:
        """Returns the adapter version for a new sequence of this model; 0 without an adapter.
        Submit the sequence before awaiting anything else, because the version may change. Raises
        RequestError."""
        self.registry.served.check(name)
        if name == self._config.model_name:
            return 0
        try:
            adapter = await self._loaded(name)
        except AdapterError as error:
            _logger.error("event=adapter_lost name=%s reason=%s", name, json.dumps(str(error)))
            raise UnavailableError(f"The adapter {name!r} cannot be read again.") from error
        adapter.used_at = time.monotonic()
        self.registry.statistics.num_requests[name] += 1
        return adapter.version

    async def _loaded(self, name: str) -> Adapter:
        """Returns the adapter called name, which is read again if it was evicted. Raises
        NotFoundError, also if the name is removed meanwhile."""
        while True:
            self.registry.served.check(name)
            adapter = self.registry.by_name[name]
            if adapter.version:
                return adapter
            async with self._lock:
                if adapter is self.registry.by_name.get(name) and not adapter.version:
                    adapter.version, adapter.loaded = await self._load(name, adapter.source)
                    adapter.loaded_at = time.time()
                    adapter.used_at = time.monotonic()

    # --- for administrators

    async def load_at_start(self) -> None:
        for word in self._config.lora_modules:
            name, _, path = word.partition("=")
            if name in self.registry.by_name:
                continue  # The adapter was loaded in an earlier life.
            try:
                commit = await self._commit(path, Path())
                await self._add(name, Source(path, commit=commit), in_place=False)
            except AdapterError as error:
                raise UsageError(f"--lora-modules {name}: {error}") from error

    async def load(self, name: str, path: str, in_place: bool) -> bool:
        """Loads an adapter for clients, and returns whether it replaced an adapter of this name.
        After an AdapterError, nothing has changed."""
        root = self._config.adapter_root
        commit = await self._commit(path, root)
        if root is None and commit is None:
            raise AdapterError(
                "This server loads no adapters over HTTP: start it with --adapter-root "
                "for folders, or with --allow-hub-adapters for adapters on the hub.",
                403,
                code="not_allowed",
            )
        source = Source(path, None if commit else str(root), commit)
        return await self._add(name, source, in_place)

    async def _commit(self, path: str, root: Path | None) -> str | None:
        """Returns the commit of `org/name` on the hub, so that all ranks get the same files now and
        later. Returns None for a folder. Raises AdapterError."""
        repo = hub_id(Path(path), root or Path())
        if repo is None or not self._config.allow_hub_adapters:
            return None
        try:
            pinned = await asyncio.to_thread(pin, repo, None, self._config.cache_dir, ADAPTER)
        except ModelError as error:
            cause = error.__cause__
            if is_refusal(cause):
                status = 404
            elif isinstance(cause, FAILURES):
                status = 503
            else:
                status = 400
            raise AdapterError(str(error), status, code=error.code) from error
        return pinned.snapshot.commit

    async def _add(self, name: str, source: Source, in_place: bool) -> bool:
        """Adds an adapter. Returns whether it replaced an adapter of the same name."""
        async with self._lock:
            old = self.registry.check_new(name, in_place)
            version, loaded = await self._load(name, source, old)
            self.registry.put(Adapter(name, version, loaded))
            if old:
                self.registry.statistics.num_swapped += 1
                self._retire(old)
            return old is not None

    async def unload(self, name: str) -> None:
        async with self._lock:
            adapter = self.registry.remove(name)
        self._retire(adapter)
        if self.registry.default == name:
            self.registry.default = self._config.model_name

    async def change(
        self,
        name: str,
        pin: bool | None,
        default: bool | None,
        preload: bool,
    ) -> dict[str, Any]:
        """Pins an adapter, makes it the default or loads it again, where asked. Returns all
        adapters. Raises RequestError."""
        registry = self.registry
        is_model = name == self._config.model_name
        if not is_model and name not in registry.by_name:
            raise adapter_not_found(name)
        if is_model and (preload or pin is not None):
            raise RequestError(
                f"{name!r} is the base model: it is always loaded.",
                param="lora_name",
            )
        if preload or pin:
            await self._loaded(name)
        adapter = registry.by_name.get(name)
        if adapter and pin is not None:
            adapter.is_pinned = pin
        if default is not None:
            registry.default = name if default else self._config.model_name
        return {"default": registry.default, "data": registry.described()}

    # --- loading

    async def _load(
        self, name: str, source: Source, instead_of: Adapter | None = None
    ) -> tuple[int, LoadedVersion]:
        """Makes all ranks read the files as a new version of an adapter. Raises AdapterError."""
        started = time.monotonic()
        self._last_version += 1
        version = self._last_version
        try:
            answers = await self._ask_until_answered(version, source)
            loaded = LoadedVersion(source, answers)
            if not self._evict(loaded.num_bytes, instead_of):
                raise OverloadedError(
                    "All adapters in --adapter-memory are pinned or in use: try later, or unpin "
                    "or unload one.",
                    code="adapters_in_use",
                )
        except BaseException as error:
            if isinstance(error, _RefusedByAll):
                # No rank has read files under this number.
                self._last_version -= 1
            else:
                # A rank may hold the version, or still read it: the number is not used again.
                self._requests.retire_adapter(version)
            # The name and the error's message come from the call, so they are not logged.
            kind = type(error).__name__.lstrip("_")
            _logger.warning("event=adapter_refused version=%d error=%s", version, kind)
            raise
        seconds = time.monotonic() - started
        self._hold(version, loaded)
        self.registry.statistics.num_loaded += 1
        self.registry.statistics.load_seconds += seconds
        _logger.info(
            "event=adapter_loaded name=%s version=%d bytes=%d seconds=%.3f",
            *(name, version, sum(loaded.num_bytes), seconds),
        )
        return version, loaded

    async def _ask_until_answered(self, version: int, source: Source) -> dict[int, AdapterRead]:
        for _ in range(_MAX_TRIES):
            await self._until_ready()
            try:
                return await self._ask(version, source)
            except _Interrupted:
                continue
        raise AdapterError(
            f"The engines ended {_MAX_TRIES} times while they read the adapter.",
            503,
            code="engines_ended",
        )

    async def _until_ready(self) -> None:
        """Waits until the engines accept messages, which may take some seconds after a fault.
        Raises UnavailableError before the first start has succeeded."""
        if not self._could_ask:
            raise UnavailableError("The cluster is not ready: try again later.")
        await self._can_ask.wait()

    async def _ask(self, version: int, source: Source) -> dict[int, AdapterRead]:
        """Asks every rank to read and check the files, and returns their answers. Raises
        AdapterError, or _Interrupted if the engines end meanwhile."""
        answers: dict[int, AdapterRead | AdapterRefused] = {}
        self._answers[version] = answers
        message = LoadAdapter(
            version=version,
            path=source.path,
            root=source.root,
            commit=source.commit,
            held=list(self.registry.versions),
        )
        num_interrupted = self._num_interrupted
        deadline = time.monotonic() + self._config.constants.load_timeout
        try:
            self._engines.send_to_all(message)
            while len(answers) < len(self._engines.ring):
                if self._broken:
                    raise self._broken
                self._answered.clear()
                await asyncio.wait_for(self._answered.wait(), deadline - time.monotonic())
                # Even if all ranks have answered: new engines hold only registered versions.
                if self._num_interrupted != num_interrupted:
                    raise _Interrupted
        except TimeoutError as error:
            late = [rank for rank in self._engines.ring if rank not in answers]
            raise _Late(f"Rank {late[0]} does not answer.", 503, code="silent_rank") from error
        finally:
            del self._answers[version]
        try:
            return checked(answers)
        except AdapterError as error:
            if all(isinstance(answer, AdapterRefused) for answer in answers.values()):
                raise _RefusedByAll(str(error), error.http_status, code=error.code) from error
            raise

    def on_message(self, rank: int, answer: AdapterRead | AdapterRefused) -> None:
        """Takes a rank's answer. After a late answer, the rank frees the files that it has read."""
        if answer.version in self._answers:
            self._answers[answer.version][rank] = answer
            self._answered.set()
        elif answer.version not in self.registry.versions:  # an answer from before a fault
            self._requests.retire_adapter(answer.version)

    # --- engines that restart

    def wanted_versions(self) -> tuple[int, ...]:
        """Returns the versions that engines keep if they stay for the next life."""
        return tuple(filter(self.registry.is_wanted, self.registry.versions))

    def interrupt(self) -> None:
        """Stops waiting for answers: the engines have ended."""
        self._can_ask.clear()
        self._num_interrupted += 1
        self._answered.set()

    async def restore(self) -> None:
        """Makes every rank read the wanted versions again, under the same numbers."""
        for version, loaded in list(self.registry.versions.items()):
            if not self.registry.is_wanted(version):
                self.registry.versions.pop(version, None)
                self._requests.retire_adapter(version)  # An engine that has stayed may hold it.
                continue
            try:
                answers = await self._ask(version, loaded.source)
                if not loaded.is_same(answers):
                    raise AdapterError(f"The files in {loaded.source} have changed.")
                self._hold(version, LoadedVersion(loaded.source, answers))
            except _Late as error:
                raise ClusterError(
                    str(error), code=error.code
                ) from error  # A new engine may answer in time.
            except AdapterError as error:
                self._lose(version, error)
            if not self.registry.is_wanted(version):  # A client has unloaded it.
                self._requests.retire_adapter(version)
        # On fewer ranks, each has more layers of every adapter.
        nothing_more = [0] * len(self._engines.ring)
        if not self._evict(nothing_more, None):
            _logger.warning('event=over_adapter_memory reason="all are pinned or in use"')

    def resume(self) -> None:
        """Lets loads continue: the engines hold the current versions again."""
        self._could_ask = True
        self._can_ask.set()

    def _hold(self, version: int, loaded: LoadedVersion) -> None:
        self.registry.hold(version, loaded)
        self._requests.identify_adapter(version, loaded.contents)

    def _lose(self, version: int, error: AdapterError) -> None:
        _logger.error("event=adapter_lost version=%d reason=%s", version, json.dumps(str(error)))
        self.registry.lose(version)
        lost = UnavailableError("The adapter of this request cannot be read again.")
        self._requests.end_with_adapter(version, lost)
        self._requests.retire_adapter(version)

    def fail(self, error: BrigadeError) -> None:
        """Fails all loads that wait for an answer, because the cluster has failed."""
        self._broken = error
        self._can_ask.set()
        self._answered.set()

    # --- memory

    def _retire(self, adapter: Adapter) -> None:
        version = self.registry.release(adapter)
        if version:
            self._requests.retire_adapter(version)

    def _evict(self, num_bytes: list[int], old: Adapter | None) -> bool:
        """Evicts idle adapters until each rank has room for these bytes. Returns False if evicting
        all of them is not enough."""
        eviction = self.registry.evictions(num_bytes, old, self._engines.ring)
        for adapter in eviction.adapters:
            _logger.info("event=adapter_evicted name=%s version=%d", adapter.name, adapter.version)
            self._retire(adapter)
        return eviction.is_enough
