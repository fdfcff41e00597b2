"""A file of the hub read by byte range.

The hub is asked once where a file is (a signed address on another host, which must
not get the token), and again when that address has expired. Every answer is checked:
its place, its length and the file's etag, so that two versions never mix. That a
large file's sha256 is right cannot be checked from a part of it.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from serve import __version__
from serve.core.errors import ModelError
from serve.hub.access import FAILURES, Patience, Retry, wait_seconds
from serve.hub.repo import RepoFile


class NoRanges(Exception):
    """The server answers with the whole file."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes are. at_hub: the hub itself has them, so it may have the token."""

    url: str
    headers: dict[str, str]
    at_hub: bool


class RemoteFile:
    """Thread-safe. num_bytes counts what it has received."""

    def __init__(self, repo: str, commit: str, file: RepoFile) -> None:
        self.repo, self.commit, self.file = repo, commit, file
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._place: _Place | None = None
        self._etags: dict[str, str] = {}

    def read(
        self, start: int, end: int, sleep: Callable[[float], object] = time.sleep
    ) -> Generator[bytes, None, None]:
        """Bytes [start, end) in pieces. A connection that ends early is taken up again
        where it ended. Raises ModelError, or NoRanges if only the whole file is to be had.
        """
        patience = Patience(self.repo, sleep=sleep)
        at = start
        while at < end:
            try:
                for data in self._answer(at, end):
                    at += len(data)
                    self._count(len(data))
                    patience.renew()
                    yield data
                if at < end:
                    raise Retry(f"{self.file.name}: the answer ended {end - at} bytes early")
            except FAILURES as error:
                patience.wait(error)

    def _answer(self, start: int, end: int) -> Iterator[bytes]:
        place = self._locate()
        asked = {**place.headers, "Range": f"bytes={start}-{end - 1}"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", place.url, headers=asked, timeout=timeout) as response:
            self._check(place, response, start, end)
            left = end - start
            # Without a chunk size: what is collected for a chunk is lost with the connection.
            for data in response.iter_raw():
                yield data[:left]
                left -= len(data)
                if left < 0:
                    raise self._changed("the server sent more than was asked for")

    def _check(self, place: _Place, response: Any, start: int, end: int) -> None:
        status = response.status_code
        if status == 200:
            raise NoRanges
        if status == 416:
            raise self._changed(f"there is nothing at byte {start}")
        if status == 429 or status >= 500 or status == 408:
            told = wait_seconds(response.headers)
            raise Retry(f"{self.file.name}: the server answered {status}", told)
        if status >= 400 and not place.at_hub:
            self._place = None  # A signed address that has expired; the hub gives another.
            raise Retry(f"{self.file.name}: its address has expired ({status})")
        hf_raise_for_status(response)
        told = response.headers.get("content-range", "")
        where, _, size = told.removeprefix("bytes ").partition("/")
        first, _, last = where.partition("-")
        if status != 206 or first != str(start) or not last.isdigit() or int(last) >= end:
            raise Retry(f"{self.file.name}: asked for {start}-{end - 1}, got {status} {told!r}")
        if size not in (str(self.file.size), "*"):
            raise self._changed(f"it has {size} bytes instead of {self.file.size}")
        self._check_etag(place, response.headers.get("etag"))

    def _check_etag(self, place: _Place, etag: str | None) -> None:
        """A storage host has etags of its own: they must stay what they were first."""
        if etag is not None:
            key = place.url.partition("?")[0]
            with self._lock:
                before = self._etags.setdefault(key, etag)
            if before != etag:
                raise self._changed(f"its etag was {before} and is {etag}")

    def _changed(self, how: str) -> ModelError:
        return ModelError(
            f"{self.file.name} of {self.repo} changed while it was fetched ({how}): start again."
        )

    def _locate(self) -> _Place:
        with self._lock:
            if self._place is None:
                self._place = self._ask_hub()
            return self._place

    def _ask_hub(self) -> _Place:
        url = hf_hub_url(self.repo, self.file.name, revision=self.commit)
        told = get_hf_file_metadata(url)
        if told.commit_hash not in (None, self.commit):
            raise self._changed(f"the hub answered with commit {told.commit_hash}")
        if told.etag not in (None, self.file.etag):
            raise self._changed(f"the hub's etag was {self.file.etag} and is {told.etag}")
        if told.size not in (None, self.file.size):
            raise self._changed(f"it has {told.size} bytes instead of {self.file.size}")
        headers = build_hf_headers(library_name="mlx-brigade", library_version=__version__)
        headers["Accept-Encoding"] = "identity"
        at_hub = _origin(told.location) == _origin(url)
        if not at_hub:
            headers = {k: v for k, v in headers.items() if k.lower() != "authorization"}
        return _Place(told.location, headers, at_hub)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
