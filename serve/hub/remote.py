"""Reads a file of the hub by byte ranges, from neighbours that hold them and else from the hub. A
machine that may not ask the hub, or has no way to it, asks it through a neighbour.

The hub is asked once for the file's address, and again when the address has expired. The address
may be on another host, which must not get the token. The range, length and etag of every answer
are checked, so that two versions never mix. A part of a file cannot be checked against its sha256;
only neighbours know the digests of parts.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from serve import __version__
from serve.core.errors import ModelError
from serve.hub.access import FAILURES, NoNeighbour, Patience, Retry, wait_seconds
from serve.hub.neighbours import NeighbourCaches, NoGatewayError, Wanted
from serve.hub.repo import LIBRARY
from serve.hub.snapshot import RepoFile, is_published


@dataclass(frozen=True, slots=True)
class _Place:
    """The address of a file's bytes. The token may be sent only if the hub itself serves them."""

    url: str
    headers: dict[str, str]
    at_hub: bool


_AT_NEIGHBOUR = _Place("", {}, at_hub=True)


class RemoteFile:
    """One file of a commit. It is thread-safe; num_bytes counts received bytes, of which
    num_neighbour_bytes did not come from the hub."""

    def __init__(self, repo: str, commit: str, file: RepoFile, neighbours: NeighbourCaches) -> None:
        self.repo = repo
        self.commit = commit
        self.file = file
        self.num_bytes = 0
        self.num_neighbour_bytes = 0
        self._wanted = Wanted(repo, commit, file)
        self._neighbours = neighbours
        self._lock = threading.Lock()
        self._place: _Place | None = None
        self._etags: dict[str, str] = {}

    def read(
        self,
        start: int,
        end: int,
        sleep: Callable[[float], object] = time.sleep,
        max_tries: int = 8,
    ) -> Generator[bytes, None, None]:
        """Yields bytes [start, end), over as many connections as it takes. Raises ModelError after
        max_tries tries without progress."""
        patience = Patience(self.repo, max_tries, sleep)
        position = start
        while position < end:
            verified = self._neighbours.read(self._wanted, position, end)
            if verified:
                position += len(verified)
                self._count(len(verified), len(verified))
                patience.renew()
                yield verified
                continue
            stop = self._neighbours.next_held(self._wanted, position, end)
            try:
                for data in self._answer(position, stop):
                    position += len(data)
                    self._count(len(data))
                    patience.renew()
                    yield data
                if position < stop:
                    early = stop - position
                    raise Retry(f"{self.file.name}: the answer ended {early} bytes early")
            except FAILURES as error:
                patience.wait(error)

    def is_coming(self, start: int, end: int) -> bool:
        """Whether a neighbour is fetching some of these bytes."""
        return self._neighbours.are_coming(self._wanted, start, end)

    def _answer(self, start: int, end: int) -> Iterator[bytes]:
        if is_published(self.repo):
            raise NoNeighbour(f"no neighbour gives byte {start} of {self.file.name}")
        with self._asked({"Range": f"bytes={start}-{end - 1}"}) as (place, response):
            self._check(place, response, start, end)
            left = end - start
            # No chunk size: a partly collected chunk would be lost with the connection.
            for data in response.iter_raw():
                yield data[:left]
                left -= len(data)
                if left < 0:
                    raise self._changed("the server sent more than was requested")

    @contextmanager
    def _asked(self, headers: dict[str, str]) -> Iterator[tuple[_Place, Any]]:
        """The answer to a request with these headers, and where it comes from."""
        place = self._locate()
        if place is None:
            reason = self._neighbours.why_no_hub
            try:
                with self._neighbours.hub(self._wanted.place, headers) as response:
                    yield _AT_NEIGHBOUR, response
            except NoGatewayError as error:
                raise (reason or NoNeighbour("none may ask the hub")) from error
            return
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        asked = {**place.headers, **headers}
        try:
            with get_session().stream("GET", place.url, headers=asked, timeout=timeout) as response:
                yield place, response
        except FAILURES as error:
            if self._neighbours.note_failure(error):
                self._place = None  # The next try asks a neighbour.
            raise

    def _check(self, place: _Place, response: Any, start: int, end: int) -> None:
        """Raises Retry or ModelError if the response does not match the request."""
        self._check_status(place, response, start)
        self._check_range(response, start, end)
        self._check_etag(place, response.headers.get("etag"))

    def _check_status(self, place: _Place, response: Any, start: int) -> None:
        status = response.status_code
        if status == 200:
            raise ModelError(
                f"{constants.ENDPOINT} serves only whole files: run `hf download {self.repo}` on "
                "each host. Brigade then uses the downloaded files."
            )
        if status == 416:
            raise self._changed(f"there is nothing at byte {start}")
        if status in (408, 429) or status >= 500:
            requested_wait = wait_seconds(response.headers)
            raise Retry(f"{self.file.name}: the server answered {status}", requested_wait)
        if status >= 400 and not place.at_hub:
            self._place = None  # The signed address has expired; the hub gives another.
            raise Retry(f"{self.file.name}: its address has expired ({status})")
        hf_raise_for_status(response)

    def _check_range(self, response: Any, start: int, end: int) -> None:
        status = response.status_code
        content_range = response.headers.get("content-range", "")
        where, _, size = content_range.removeprefix("bytes ").partition("/")
        first, _, last = where.partition("-")
        is_within = last.isdigit() and int(last) < end
        if status != 206 or first != str(start) or not is_within:
            raise Retry(
                f"{self.file.name}: requested {start}-{end - 1}, got {status} {content_range!r}"
            )
        if size not in (str(self.file.size), "*"):
            raise self._changed(self._other_size(size))

    def _check_etag(self, place: _Place, etag: str | None) -> None:
        """Raises ModelError if a host's etag changes. A storage host's etags are not the hub's."""
        if etag is None:
            return
        key = place.url.partition("?")[0]
        with self._lock:
            before = self._etags.setdefault(key, etag)
        if before != etag:
            raise self._changed(f"its etag was {before} and is {etag}")

    def _changed(self, how: str) -> ModelError:
        return ModelError(
            f"{self.file.name} of {self.repo} changed while it was fetched ({how}): start again.",
            code="changed_file",
        )

    def _other_size(self, size: object) -> str:
        return f"it has {size} bytes instead of {self.file.size}"

    def _locate(self) -> _Place | None:
        """Returns where the hub has the file, or None if it is asked through a neighbour."""
        with self._lock:
            if self._place is None and not self._neighbours.why_no_hub:
                try:
                    self._place = self._resolve()
                except FAILURES as error:
                    if not self._neighbours.note_failure(error):
                        raise
            return self._place

    def _resolve(self) -> _Place:
        url = hf_hub_url(self.repo, self.file.name, revision=self.commit)
        metadata = get_hf_file_metadata(url)
        if metadata.commit_hash not in (None, self.commit):
            raise self._changed(f"the hub answered with commit {metadata.commit_hash}")
        if metadata.etag not in (None, self.file.etag):
            raise self._changed(f"the hub's etag was {self.file.etag} and is {metadata.etag}")
        if metadata.size not in (None, self.file.size):
            raise self._changed(self._other_size(metadata.size))
        headers = build_hf_headers(library_name=LIBRARY, library_version=__version__)
        headers["Accept-Encoding"] = "identity"
        at_hub = _origin(metadata.location) == _origin(url)
        if not at_hub:
            headers = {k: v for k, v in headers.items() if k.lower() != "authorization"}
        return _Place(metadata.location, headers, at_hub)

    def _count(self, num_bytes: int, num_neighbour_bytes: int = 0) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self.num_neighbour_bytes += num_neighbour_bytes


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
