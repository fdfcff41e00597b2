"""A hub on this machine: the routes and headers that huggingface_hub reads, a second
server on another address as its storage, and faults that can be switched on.

It counts what goes over the wire, for bytes are what these tests are about.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx2
from huggingface_hub import close_session

REPO = "org/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_a_test"
CHUNK_BYTES = 16 << 10


@dataclass
class Faults:
    """Counts say how many answers of the storage are spoiled, from now on."""

    gated: int | None = None  # this status, unless the right token comes
    busy: int = 0  # answers 503, or 429 with Retry-After
    busy_status: int = 429
    retry_after: str = "0"
    busy_api: int = 0
    cut: int = 0  # connections that end after cut_bytes
    cut_bytes: int = 10_000
    expired: int = 0  # signed addresses that are refused
    change_after: int | None = None  # after this many answers the stored file changes
    moved_commit: bool = False  # the hub tells another etag than in its listing
    wrong_length: int = 0  # the hub reports files as longer by this many bytes
    no_ranges_after: int | None = None
    wrong_place: int = 0  # answers with another range than asked for
    delay_seconds: float = 0.0  # before each chunk
    no_sizes: bool = False  # the listing has neither sizes nor etags
    is_silent: bool = False  # sends nothing more, and keeps its connections open
    silent_after: int | None = None  # is_silent from this number of bytes of the storage on
    busy_data: bool = False  # answers busy_status for tensors, but not for headers


@dataclass
class Served:
    file: str
    start: int
    end: int


@dataclass
class FakeHub:
    folder: Path
    faults: Faults = field(default_factory=Faults)
    served: list[Served] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    leaked_tokens: list[str] = field(default_factory=list)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": COMMIT})
    sizes: dict[str, int] = field(default_factory=dict)  # wrong sizes that it reports
    refused: set[str] = field(default_factory=set)  # addresses that have expired
    url: str = ""
    storage_url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_answers: int = 0
    num_bytes: int = 0  # of all contents, lists of files included
    num_connections: int = 0  # to hub and storage that are open

    def data_bytes(self, headers: dict[str, int], file: str | None = None) -> int:
        """Bytes of tensors that went out: of safetensors files, what is behind the header."""
        return sum(
            max(0, s.end - max(s.start, headers[s.file]))
            for s in self.served
            if s.file in headers and file in (None, s.file)
        )

    def num_sent(self) -> int:
        """The bytes that went out of the storage, or just go."""
        return sum(served.end - served.start for served in list(self.served))

    def wait_while_silent(self) -> None:
        faults = self.faults
        with self.lock:
            if faults.silent_after is not None and self.num_sent() >= faults.silent_after:
                faults.is_silent = True
        while self.faults.is_silent:
            time.sleep(0.01)

    def speak(self) -> None:
        """Ends the silence, or cancels one that has not begun."""
        with self.lock:
            self.faults.silent_after = None
            self.faults.is_silent = False

    def wait_until_left(self) -> None:
        """Waits until `served` counts all requests of clients that have ended."""
        close_session()  # This process is no client, either.
        # Connections are accepted in turn, so that those before this one are known.
        httpx2.get(f"{self.storage_url}/blobs/none")
        deadline = time.monotonic() + 60
        while self.num_connections:
            assert time.monotonic() < deadline, "a client is still there"
            time.sleep(0.002)

    def take(self, fault: str) -> bool:
        with self.lock:
            left = getattr(self.faults, fault)
            setattr(self.faults, fault, max(0, left - 1))
            return left > 0

    def etag(self, name: str) -> str:
        data = (self.folder / name).read_bytes()
        if name.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def listing(self) -> dict:
        siblings = []
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            name = path.relative_to(self.folder).as_posix()
            entry: dict = {"rfilename": name}
            if not self.faults.no_sizes:
                entry |= {"size": path.stat().st_size, "blobId": self.etag(name)}
                if path.suffix == ".safetensors":
                    sha256 = self.etag(name)
                    entry["lfs"] = {"sha256": sha256, "size": entry["size"], "pointerSize": 134}
            siblings.append(entry)
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings, "tags": []}


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits for an acknowledgement
    hub: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with self.hub.lock:
                self.hub.num_bytes += len(body)
            self.wfile.write(body)


class _HubAnswer(_Answer):
    def answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests[self.command + " " + path] += 1
        hub.wait_while_silent()
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if hub.faults.gated and not allowed:
            return self.say(hub.faults.gated, X_Error_Code="GatedRepo", X_Error_Message="gated")
        if path.startswith("/api/models/"):
            return self.api(path)
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo != REPO:
            return self.say(401, X_Error_Code="RepoNotFound")
        if revision not in hub.revisions and revision != COMMIT:
            return self.say(404, X_Error_Code="RevisionNotFound")
        if not (hub.folder / name).is_file():
            return self.say(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        return self.resolve(name)

    def api(self, path: str) -> None:
        repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
        if self.hub.take("busy_api"):
            return self.say(503)
        if repo != REPO:
            return self.say(401, X_Error_Code="RepoNotFound", X_Error_Message="not found")
        if revision and revision not in self.hub.revisions and revision != COMMIT:
            return self.say(404, X_Error_Code="RevisionNotFound")
        return self.say(200, json.dumps(self.hub.listing()).encode())

    def resolve(self, name: str) -> None:
        hub = self.hub
        data = (hub.folder / name).read_bytes()
        common = {"X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if not name.endswith(".safetensors"):
            return self.say(200, data, ETag=f'"{hub.etag(name)}"', **common)
        etag = "f" * 64 if hub.faults.moved_commit else hub.etag(name)
        size = str(hub.sizes.get(name, len(data)) + hub.faults.wrong_length)
        place = f"{hub.storage_url}/blobs/{name}?Signature=abc&n={hub.requests.total()}"
        return self.say(
            302, X_Linked_ETag=f'"{etag}"', X_Linked_Size=size, Location=place, **common
        )


class _StorageAnswer(_Answer):
    def answer(self) -> None:
        hub, faults, parts = self.hub, self.hub.faults, urlsplit(self.path)
        name = parts.path.rpartition("/")[2]
        hub.wait_while_silent()
        if self.headers.get("Authorization"):
            hub.leaked_tokens.append(self.path)
        if hub.take("expired"):
            hub.refused.add(self.path)
        if "Signature" not in parse_qs(parts.query) or self.path in hub.refused:
            return self.say(403, b"<Error><Code>AccessDenied</Code></Error>")
        if hub.take("busy"):
            return self.say(faults.busy_status, Retry_After=faults.retry_after)
        with hub.lock:
            num_answers = hub.num_answers
            hub.num_answers += 1
        data, etag = (hub.folder / name).read_bytes(), "first"
        if faults.change_after is not None and num_answers >= faults.change_after:
            data, etag = bytes(byte ^ 255 for byte in data), "second"
        no_ranges = faults.no_ranges_after is not None and num_answers >= faults.no_ranges_after
        asked = self.headers.get("Range")
        if asked is None or no_ranges:
            return self.stream(200, name, data, 0, len(data), {"ETag": f'"{etag}"'})
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(data))
        if faults.busy_data and start >= 8 + int.from_bytes(data[:8], "little"):
            return self.say(faults.busy_status, Retry_After=faults.retry_after)
        if hub.take("wrong_place"):
            start += 1
        if start >= len(data):
            return self.say(416, Content_Range=f"bytes */{len(data)}")
        where = f"bytes {start}-{end - 1}/{len(data)}"
        return self.stream(
            206, name, data, start, end, {"ETag": f'"{etag}"', "Content-Range": where}
        )

    def stream(
        self, status: int, name: str, data: bytes, start: int, end: int, headers: dict[str, str]
    ) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(end - start)}.items():
            self.send_header(header, value)
        self.end_headers()
        cut = end - start > self.hub.faults.cut_bytes and self.hub.take("cut")
        stop = start + self.hub.faults.cut_bytes if cut else end
        sent = Served(name, start, start)
        with self.hub.lock:
            self.hub.served.append(sent)
        for offset in range(start, stop, CHUNK_BYTES):
            if self.hub.faults.delay_seconds:
                time.sleep(self.hub.faults.delay_seconds)
            self.hub.wait_while_silent()
            # Before they go: a client may have them, and be done, before this thread goes on.
            sent.end = min(offset + CHUNK_BYTES, stop)
            with self.hub.lock:
                self.hub.num_bytes += min(CHUNK_BYTES, stop - offset)
            self.wfile.write(data[offset : sent.end])
        if cut:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: FakeHub

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.hub.lock:
            self.hub.num_connections += 1
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        super().process_request_thread(request, client_address)
        with self.hub.lock:
            self.hub.num_connections -= 1

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has been killed is no error of the server."""


def _serve(answer: type[_Answer], hub: FakeHub, host: str) -> _Server:
    server = _Server((host, 0), type(answer.__name__, (answer,), {"hub": hub}))
    server.hub = hub
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


@contextmanager
def running(folder: Path, change: Callable[[Faults], None] | None = None) -> Iterator[FakeHub]:
    hub = FakeHub(folder)
    servers = [_serve(_HubAnswer, hub, "127.0.0.1"), _serve(_StorageAnswer, hub, "127.0.0.1")]
    hub.url, hub.storage_url = (f"http://127.0.0.1:{s.server_address[1]}" for s in servers)
    if change:
        change(hub.faults)
    try:
        yield hub
    finally:
        hub.speak()
        for server in servers:
            server.shutdown()
            server.server_close()
