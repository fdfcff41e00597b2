"""Other machines of the user, which give parts of what their caches hold (launcher.nodes.weights).

BRIGADE_NEIGHBOURS names a folder with a unix socket for each of them. Nothing that a neighbour
sends is used before it was checked: each answer against its own digest, a small file also against
the digest that the hub gave for it. A neighbour that was wrong once is not asked again; one that
does not answer is asked again after a while. Parts that a neighbour passes on from the hub have no
digest, as parts from the hub itself.
"""

import json
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import httpx2
import msgspec
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from serve.core.errors import ModelError
from serve.hub.access import GatewayRefusal, NoNeighbour, Retry, is_unresolved, wait_seconds
from serve.hub.digests import BLOCK_BYTES, content_digest, matches_etag
from serve.hub.listing import FileListing, HeldRanges, HubRefusal
from serve.hub.ranges import Range, subtract, total, union
from serve.hub.snapshot import RepoFile, Snapshot, is_commit

_TIMEOUT = httpx2.Timeout(20.0, connect=5.0)
# Less than the five seconds after which uvicorn closes an idle connection.
_LIMITS = httpx2.Limits(keepalive_expiry=2.0)
_MAX_LIST_BYTES = 32 << 20
_MAX_REFUSAL_BYTES = 64 << 10
_FRESH_SECONDS = 2.0
_MAX_STILL_SECONDS = 120.0
_FIRST_REST_SECONDS = 1.0
_MAX_REST_SECONDS = 60.0

Result = TypeVar("Result")
_logger = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """A file of a commit."""

    repo: str
    commit: str
    file: RepoFile

    @property
    def place(self) -> str:
        """Returns where the hub serves it."""
        return f"/{self.repo}/resolve/{self.commit}/{quote(self.file.name)}"


class NoGatewayError(Exception):
    """No neighbour can ask the hub, or none is allowed to."""


class _NotHeldError(Exception):
    """The neighbour lacks what it was asked for."""


class _WrongAnswerError(Exception):
    """The answer is not what was asked for, or was damaged on its way."""


class _Held:
    """The ranges of one file that a neighbour holds, as it said last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ranges: list[Range] = []
        self.coming: list[Range] = []
        self.asked_at = float("-inf")
        self._changed_at = float("-inf")

    def tell(self, ranges: list[Range], coming: list[Range]) -> None:
        self.asked_at = time.monotonic()
        if (ranges, coming) != (self.ranges, self.coming):
            self._changed_at = self.asked_at
        self.ranges = ranges
        self.coming = coming

    def are_coming(self, start: int, end: int) -> bool:
        """Whether the neighbour is fetching some of these bytes. False if it has got no further for
        a long time, because its rank may be stuck."""
        if time.monotonic() - self._changed_at > _MAX_STILL_SECONDS:
            return False
        return total(subtract([(start, end)], self.coming)) < end - start

    def until(self, position: int) -> int:
        """Returns the end of the range that contains a position, or the position."""
        for start, end in self.ranges:
            if start <= position < end:
                return end
        return position


class _Neighbour:
    """One other machine. It is thread-safe."""

    def __init__(self, socket: Path) -> None:
        self._name = socket.stem
        transport = httpx2.HTTPTransport(uds=str(socket), limits=_LIMITS, trust_env=False)
        self._client = httpx2.Client(
            transport=transport,
            base_url="http://neighbour",
            headers={"Accept-Encoding": "identity"},
            timeout=_TIMEOUT,
            trust_env=False,
        )
        weakref.finalize(self, self._client.close)
        self._lock = threading.Lock()
        self._held: dict[Wanted, _Held] = {}
        self._num_failures = 0
        self._rests_until = 0.0
        self.num_active = 0
        self.was_wrong = False

    def load(self) -> tuple[bool, int]:
        """Returns the key by which neighbours are sorted: the first one is asked first."""
        return self._num_failures > 0, self.num_active

    @property
    def may_be_asked(self) -> bool:
        """Whether it works, as far as is known. If it failed, one thread at a time may try it."""
        if self.was_wrong or time.monotonic() < self._rests_until:
            return False
        return not self._num_failures or not self.num_active

    def snapshot(self, repo: str, revision: str | None) -> Snapshot | None:
        return self._ask(lambda: self._snapshot(repo, revision or "main"))

    def held(self, wanted: Wanted) -> _Held:
        """Returns what it holds of a file, asking it at most every two seconds."""
        with self._lock:
            held = self._held.setdefault(wanted, _Held())
        with held.lock:
            if time.monotonic() - held.asked_at > _FRESH_SECONDS and self.may_be_asked:
                held.tell(*(self._ask(lambda: self._held_ranges(wanted)) or ([], [])))
        return held

    def known(self, wanted: Wanted) -> _Held:
        """Returns what it holds of a file, without asking it."""
        with self._lock:
            return self._held.get(wanted) or _Held()

    def read(self, wanted: Wanted, start: int, end: int) -> bytes | None:
        """Returns these bytes, at most a block; None if it cannot give them."""
        data = self._ask(lambda: self._range(wanted, start, end))
        if data is None and not self._num_failures:
            held = self.known(wanted)
            with held.lock:
                held.ranges = subtract(held.ranges, [(start, end)])
        return data

    def whole(self, wanted: Wanted) -> bytes | None:
        """Returns a whole file, or None if it cannot give it."""
        size = wanted.file.size
        if size and self.held(wanted).until(0) < size:
            return None
        blocks: list[bytes] = []
        for start in range(0, size, BLOCK_BYTES):
            block = self.read(wanted, start, min(start + BLOCK_BYTES, size))
            if block is None:
                return None
            blocks.append(block)
        data = b"".join(blocks)
        if matches_etag(data, wanted.file.etag):
            return data
        self._was_wrong(f"{wanted.file.name} is another file")
        return None

    @contextmanager
    def from_hub(
        self, place: str, headers: Mapping[str, str] | None
    ) -> Iterator[httpx2.Response | None]:
        """The hub's answer, which this neighbour passes on, or None if it may not ask the hub.
        Raises NoNeighbour."""
        with self._active():
            try:
                with self._client.stream("GET", f"/.hub{place}", headers=headers) as response:
                    self._num_failures = 0
                    yield None if response.status_code == 404 else response
            except httpx2.HTTPError as error:
                self._failed(error)
                raise NoNeighbour(f"the one that asked the hub is gone ({error})") from error

    @contextmanager
    def _active(self) -> Iterator[None]:
        with self._lock:
            self.num_active += 1
        try:
            yield
        finally:
            with self._lock:
                self.num_active -= 1

    def _ask(self, call: Callable[[], Result]) -> Result | None:
        """Calls, and returns None if the neighbour cannot give an answer."""
        try:
            with self._active():
                return call()
        except _NotHeldError:
            return None
        except (_WrongAnswerError, msgspec.DecodeError) as error:
            self._was_wrong(str(error))
            return None
        except (Retry, httpx2.HTTPError) as error:
            self._failed(error)
            return None

    def _was_wrong(self, reason: str) -> None:
        with self._lock:
            is_first = not self.was_wrong
            self.was_wrong = True
        if is_first:
            self._warn("neighbour_wrong", reason)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if time.monotonic() < self._rests_until:
                return  # Another thread has noted it.
            self._num_failures += 1
            is_first = self._num_failures == 1
            seconds = min(_FIRST_REST_SECONDS * 2 ** (self._num_failures - 1), _MAX_REST_SECONDS)
            self._rests_until = time.monotonic() + seconds
        if is_first:
            self._warn("neighbour_away", str(error) or type(error).__name__)

    def _warn(self, event: str, reason: str) -> None:
        _logger.warning("event=%s neighbour=%s reason=%s", event, self._name, json.dumps(reason))

    def _snapshot(self, repo: str, revision: str) -> Snapshot:
        place = f"/api/models/{repo}/revision/{quote(revision, safe='')}"
        _, body = self._get(place, _MAX_LIST_BYTES)
        return _decoded(body, repo, revision)

    def _held_ranges(self, wanted: Wanted) -> tuple[list[Range], list[Range]]:
        """Returns which ranges it holds and which it is fetching, once it has checked the file."""
        repo, commit, file = wanted
        place = f"/{repo}/held/{commit}/{quote(file.name)}"
        while True:
            try:
                _, body = self._get(place, _MAX_LIST_BYTES)
            except Retry as error:
                if error.wait_seconds is None:
                    raise
                time.sleep(error.wait_seconds)
                continue
            held = msgspec.json.decode(body, type=HeldRanges)
            if held.etag != file.etag:
                return [], []
            return union(held.ranges), union(held.coming)

    def _range(self, wanted: Wanted, start: int, end: int) -> bytes:
        _, commit, file = wanted
        asked = {"Range": f"bytes={start}-{end - 1}"}
        headers, data = self._get(wanted.place, end - start, asked)
        expected = {
            "content-range": f"bytes {start}-{end - 1}/{file.size}",
            "etag": f'"{file.etag}"',
            "x-repo-commit": commit,
        }
        for name, value in expected.items():
            if headers.get(name) != value:
                raise _WrongAnswerError(f"{file.name}: {name} is {headers.get(name)}, not {value}")
        if len(data) != end - start:
            raise _WrongAnswerError(f"{file.name}: {len(data)} bytes instead of {end - start}")
        return data

    def _get(
        self,
        place: str,
        max_bytes: int,
        headers: dict[str, str] | None = None,
    ) -> tuple[httpx2.Headers, bytes]:
        """Returns the headers and the content of an answer, checked against its digest."""
        with self._client.stream("GET", place, headers=headers) as response:
            status = response.status_code
            if status in (404, 416):
                self._num_failures = 0
                raise _NotHeldError
            if status not in (200, 206):
                raise Retry(f"it answered {status}", wait_seconds(response.headers))
            body = _content(response, max_bytes)
        self._num_failures = 0
        if response.headers.get("content-digest") != content_digest(sha256(body).hexdigest()):
            raise _WrongAnswerError(f"{place}: the content does not match its digest")
        return response.headers, body


class NeighbourCaches:
    """All other machines that a process may ask, during one fetch. It is thread-safe."""

    def __init__(self, sockets: Iterable[Path]) -> None:
        self._all = [_Neighbour(socket) for socket in sockets]
        self._no_name: Exception | None = None

    @classmethod
    def of_environment(cls) -> "NeighbourCaches":
        folder = os.environ.get("BRIGADE_NEIGHBOURS")
        return cls(sorted(Path(folder).glob("*.sock")) if folder else ())

    @property
    def why_no_hub(self) -> Exception | None:
        """Why this machine asks the hub only through a neighbour; None if it asks the hub."""
        return OfflineModeIsEnabled() if constants.HF_HUB_OFFLINE else self._no_name

    def note_failure(self, error: Exception) -> bool:
        """Notes if an error means that the hub's name cannot be resolved, as on a machine whose
        only cable leads to another one. Returns whether to ask the hub through a neighbour from
        now on."""
        if is_unresolved(error) and self._all:
            self._no_name = error
        return self.why_no_hub is not None

    def snapshot(self, repo: str, revision: str | None) -> Snapshot | None:
        """Returns a complete list of the commit's files, or all files that the neighbours' copies
        of the hub's cache contain."""
        found: Snapshot | None = None
        for neighbour in self._usable():
            given = neighbour.snapshot(repo, found.commit if found else revision)
            if given and found:
                found = found.merged(given)
            else:
                found = found or given
            if found and found.complete:
                break
        return found

    def snapshot_of_hub(self, repo: str, revision: str | None) -> Snapshot | None:
        """Returns a commit's files as the hub lists them, or None if no neighbour may ask it.
        Raises ModelError if the hub refuses, and Retry."""
        revision = revision or "main"
        try:
            with self.hub(f"/api/models/{repo}/revision/{quote(revision, safe='')}") as response:
                return _decoded(_content(response, _MAX_LIST_BYTES), repo, revision)
        except NoGatewayError:
            return None
        except (_WrongAnswerError, msgspec.DecodeError) as error:
            raise Retry(f"a neighbour's answer is wrong: {error}") from error

    def whole_of_hub(self, wanted: Wanted) -> bytes | None:
        """Returns a whole small file of the hub, or None if no neighbour may ask it. Raises as
        snapshot_of_hub."""
        try:
            with self.hub(wanted.place) as response:
                data = _content(response, wanted.file.size)
        except NoGatewayError:
            return None
        except _WrongAnswerError as error:
            raise Retry(f"a neighbour's answer is wrong: {error}") from error
        if not matches_etag(data, wanted.file.etag):
            raise Retry(f"a neighbour's answer is wrong: {wanted.file.name} is another file")
        return data

    @contextmanager
    def hub(
        self, place: str, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx2.Response]:
        """The hub's answer, through a neighbour. If one gets nothing, the next is asked: its token
        or its network may be better. Raises NoGatewayError if none may ask the hub, ModelError if
        the hub refuses all of them, and Retry."""
        refusals: list[Exception] = []
        usable = self._usable()
        for neighbour in sorted(usable, key=_Neighbour.load):
            with neighbour.from_hub(place, headers) as response:
                if response is None:
                    continue
                if response.status_code >= 400:
                    refusals.append(_refusal(response))
                    continue
                yield response
                return
        if refusals:
            # An error that may pass goes first: then the hub is asked again.
            raise min(refusals, key=lambda refusal: not isinstance(refusal, Retry))
        self._no_name = None  # The next try asks the hub itself.
        # One that has failed was not asked. It may return, or have answered another thread by now.
        if any(each not in usable and not each.was_wrong for each in self._all):
            raise NoNeighbour("those that may ask the hub do not answer")
        raise NoGatewayError

    def whole(self, wanted: Wanted) -> bytes | None:
        """Returns a whole small file that has the right digest, or None."""
        for neighbour in self._usable():
            data = neighbour.whole(wanted)
            if data is not None:
                return data
        return None

    def read(self, wanted: Wanted, start: int, end: int) -> bytes | None:
        """Returns checked bytes from start on, at most up to end; None if nobody gives any."""
        while True:
            found = self._least_busy(wanted, start)
            if found is None:
                return None
            neighbour, held_end = found
            block_end = (start // BLOCK_BYTES + 1) * BLOCK_BYTES
            data = neighbour.read(wanted, start, min(end, held_end, block_end))
            if data is not None:
                return data

    def next_held(self, wanted: Wanted, position: int, end: int) -> int:
        """Returns where a neighbour's bytes begin after a position, or the end."""
        for neighbour in self._usable():
            for start, _ in neighbour.known(wanted).ranges:
                if position < start < end:
                    end = start
        return end

    def are_coming(self, wanted: Wanted, start: int, end: int) -> bool:
        """Whether a neighbour is fetching some of these bytes."""
        return any(each.held(wanted).are_coming(start, end) for each in self._usable())

    def _usable(self) -> list[_Neighbour]:
        return [each for each in self._all if each.may_be_asked]

    def _least_busy(self, wanted: Wanted, position: int) -> tuple[_Neighbour, int] | None:
        holders: list[tuple[int, float, _Neighbour, int]] = []
        for neighbour in self._usable():
            end = neighbour.held(wanted).until(position)
            if end > position and neighbour.may_be_asked:
                holders.append((neighbour.num_active, random.random(), neighbour, end))
        if not holders:
            return None
        _, _, least_busy, held_end = min(holders, key=lambda holder: holder[:2])
        return least_busy, held_end


def _decoded(body: bytes, repo: str, revision: str) -> Snapshot:
    """Returns the files in a listing of this revision. Raises _WrongAnswerError and DecodeError."""
    listing = msgspec.json.decode(body, type=FileListing)
    snapshot = listing.snapshot()
    is_other = snapshot and is_commit(revision) and snapshot.commit != revision
    if snapshot is None or snapshot.repo != repo or is_other:
        raise _WrongAnswerError(f"asked for {repo} at {revision}, got {listing.sha}")
    return snapshot


def _content(response: httpx2.Response, max_bytes: int) -> bytes:
    """Returns the content of an answer. Raises _WrongAnswerError if it is longer."""
    content = bytearray()
    for data in response.iter_raw():
        content += data
        if len(content) > max_bytes:
            raise _WrongAnswerError("more bytes than asked for")
    return bytes(content)


def _refusal(response: httpx2.Response) -> Exception:
    """Returns a ModelError with the hub's reason, or a Retry if another try may succeed."""
    try:
        refusal = msgspec.json.decode(_content(response, _MAX_REFUSAL_BYTES), type=HubRefusal)
    except (_WrongAnswerError, msgspec.DecodeError):
        refusal = HubRefusal(f"a neighbour answered {response.status_code}", ModelError.code)
    reason = f"A paired machine asked the hub: {refusal.reason}"
    if response.status_code >= 500:
        return GatewayRefusal(reason, wait_seconds(response.headers))
    return ModelError(reason, code=refusal.code)
