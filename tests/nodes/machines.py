"""Machines of a test: each has its own caches, and the real app behind a unix socket."""

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn
from huggingface_hub import constants
from starlette.types import ASGIApp

from launcher.nodes.weights import app
from serve.hub.fetch import Sizes
from serve.hub.partial import PartialModel, open_partial, pin
from serve.hub.snapshot import MODEL, RepoKind
from tests.hub.server import COMMIT, REPO

SMALL = Sizes(request_bytes=300_000, sync_bytes=50_000, num_connections=4)


@contextmanager
def listening(inner: ASGIApp, listener: socket.socket) -> Iterator[None]:
    server = uvicorn.Server(uvicorn.Config(inner, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.002)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()


class Machine:
    """A machine with the caches in `home`, whose neighbours' sockets are in `neighbours`."""

    def __init__(
        self,
        name: str,
        home: Path,
        neighbours: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.name = name
        self.cache = home / "brigade"
        self.hub_cache = home / "hub"
        self.neighbours = neighbours
        self._monkeypatch = monkeypatch

    def act(self) -> None:
        """This process is this machine from now on."""
        self._monkeypatch.setattr(constants, "HF_HUB_CACHE", str(self.hub_cache))
        self._monkeypatch.setenv("BRIGADE_NEIGHBOURS", str(self.neighbours))

    def pin(self, revision: str | None = None, kind: RepoKind = MODEL) -> PartialModel:
        self.act()
        return pin(REPO, revision, self.cache, kind)

    def open(self, repo: str = REPO, commit: str = COMMIT, sizes: Sizes = SMALL) -> PartialModel:
        self.act()
        return open_partial(repo, commit, self.cache, sizes=sizes)

    def app(self) -> ASGIApp:
        return app(self.cache, self.hub_cache)


class Machines:
    """Makes machines that are neighbours of each other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        # The path of a unix socket has at most 104 bytes on macOS.
        self._sockets = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
        self._made: dict[str, Machine] = {}

    def make(self, *names: str) -> list[Machine]:
        for name in names:
            neighbours = self._sockets / name
            neighbours.mkdir()
            made = Machine(name, self._folder / name, neighbours, self._monkeypatch)
            for other in self._made.values():
                (other.neighbours / f"{name}.sock").symlink_to(self.socket(name))
                (neighbours / f"{other.name}.sock").symlink_to(self.socket(other.name))
            self._made[name] = made
        return [self._made[name] for name in names]

    @contextmanager
    def serving(
        self,
        *machines: Machine,
        wrapped: Callable[[ASGIApp], ASGIApp] = lambda inner: inner,
    ) -> Iterator[None]:
        """These machines serve all others. `wrapped` may spoil what they say."""
        with ExitStack() as stack:
            for each in machines:
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(str(self.socket(each.name)))
                stack.enter_context(listening(wrapped(each.app()), listener))
                stack.callback(self.socket(each.name).unlink)
            yield

    def socket(self, name: str) -> Path:
        return self._sockets / f"{name}.sock"

    def close(self) -> None:
        shutil.rmtree(self._sockets)
