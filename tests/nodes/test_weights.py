"""Ranks take weights from each other's caches: the right bytes, whatever a neighbour does."""

import os
import random
import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants, hf_hub_download
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.core.errors import ModelError
from serve.hub import access, digests, holdings, neighbours
from serve.hub.access import HubError
from serve.hub.folders import publish
from serve.hub.neighbours import NeighbourCaches
from serve.hub.partial import PartialModel
from serve.hub.remote import RemoteFile
from serve.hub.snapshot import ADAPTER, Snapshot, folder_name
from tests.errors import fails
from tests.hub import checkpoints
from tests.hub.server import COMMIT, REPO, FakeHub
from tests.nodes.damage import ALL, Answer, Wire, digest_of, flip, flipped_body, proxy, spoiling
from tests.nodes.machines import SMALL, Machine, Machines, listening

# httpcore2 leaves a unix socket to the collector if nobody listens there.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


def nobody(done: int, total: int) -> None:
    assert 0 <= done <= total


def fetch(model: PartialModel, names: list[str]) -> tuple[int, int]:
    """Returns the bytes from the hub, and those from neighbours. All bytes are right."""
    before = model.neighbour_bytes
    fetched = model.fetch(names, nobody)
    expected = checkpoints.tensors()
    for name in names:
        place = model.tensors[name]
        with place.file.open("rb") as stream:
            stream.seek(place.start)
            is_right = stream.read(place.num_bytes) == expected[name][1]
            assert is_right, name
    from_neighbours = model.neighbour_bytes - before
    return fetched - from_neighbours, from_neighbours


def owned_bytes(names: list[str]) -> int:
    everything = checkpoints.tensors()
    return sum(len(everything[name][1]) for name in names)


def everything() -> list[str]:
    return list(checkpoints.tensors())


def download(machine: Machine, repo: Path) -> None:
    """Fills the machine's copy of the hub's cache, with whole files."""
    machine.act()
    for path in repo.iterdir():
        if path.suffix in (".json", ".jinja", ".safetensors"):
            hf_hub_download(REPO, path.name)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the files of the test large ones: they have several blocks."""
    for module in (holdings, digests):
        monkeypatch.setattr(module, "BLOCK_BYTES", 10_000)


# --- who has what


def test_a_rank_takes_what_a_neighbour_fetched_and_the_rest_from_the_hub(
    hub: FakeHub, machines: Machines
) -> None:
    first, second = machines.make("first", "second")
    lower, upper = checkpoints.owned_by(1, 2), checkpoints.owned_by(0, 2)
    fetch(first.pin(), lower)
    hub.served.clear()
    hub.requests.clear()
    with machines.serving(first):
        model = second.open()
        assert hub.requests.total() == 0, "small files and headers came from the neighbour"
        assert fetch(model, lower) == (0, owned_bytes(lower))
        assert fetch(model, everything()) == (owned_bytes(upper), 0)
    assert (model.folder / "tokenizer.json").read_text() == "{}"


def test_whole_files_of_the_cache_of_hugging_face_are_given(
    hub: FakeHub, machines: Machines, repo: Path, offline: Callable[[], None]
) -> None:
    first, second = machines.make("first", "second")
    download(first, repo)
    offline()
    with machines.serving(first):
        model = second.pin()
        assert fetch(model, everything()) == (0, owned_bytes(everything()))


def test_several_neighbours_give_their_parts(
    hub: FakeHub, machines: Machines, offline: Callable[[], None]
) -> None:
    *others, last = machines.make("a", "b", "c", "last")
    for rank, machine in enumerate(others):
        fetch(machine.open(), checkpoints.owned_by(rank, 3))
    offline()
    with machines.serving(*others):
        assert fetch(last.open(), everything()) == (0, owned_bytes(everything()))


def test_all_neighbours_that_hold_a_range_are_asked(
    hub: FakeHub, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Among idle neighbours, chance decides which is asked. With many blocks, both are asked.
    monkeypatch.setattr(neighbours, "BLOCK_BYTES", 20_000)
    *others, last = machines.make("a", "b", "last")
    for machine in others:
        fetch(machine.open(), everything())
    asked: list[set[str]] = []

    def noting(inner: ASGIApp) -> ASGIApp:
        seen: set[str] = set()
        asked.append(seen)

        async def outer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and "/resolve/" in scope["path"]:
                seen.add(scope["path"])
            await inner(scope, receive, send)

        return outer

    with machines.serving(*others, wrapped=noting):
        assert fetch(last.open(), everything()) == (0, owned_bytes(everything()))
    assert len(asked) == 2
    assert all(asked)


def test_three_ranks_that_start_together_fetch_the_model_from_the_hub_once(
    hub: FakeHub, machines: Machines, repo: Path
) -> None:
    ranks = machines.make("rank-0", "rank-1", "rank-2")
    with machines.serving(*ranks):
        models = [ranks[0].pin()]
        models += [machine.open() for machine in ranks[1:]]
        for rank, model in enumerate(models):
            fetch(model, checkpoints.owned_by(rank, 3))
        weights = sum(path.stat().st_size for path in repo.glob("*.safetensors"))
        assert sum(served.end - served.start for served in hub.served) == weights
        assert hub.num_bytes <= 1.01 * weights, "small files and lists included"
        hub.served.clear()
        requests = hub.requests.total()
        # Another layout: each rank has the layers of another one.
        for rank, machine in enumerate(ranks):
            fetch(machine.open(), checkpoints.owned_by((rank + 1) % 3, 3))
        assert not hub.served
        assert hub.requests.total() == requests


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
@pytest.mark.parametrize("how", ["offline", "refused", "no name"])
def test_a_rank_starts_without_the_hub(
    hub: FakeHub,
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    revision: str | None,
    how: str,
) -> None:
    first, second = machines.make("first", "second")
    fetch(first.pin(), everything())
    first.pin("v1")
    requests = hub.requests.total()
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "refused":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:

        def no_name(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", no_name)
        monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with machines.serving(first):
        assert fetch(second.pin(revision), everything()) == (0, owned_bytes(everything()))
    assert hub.requests.total() == requests


def test_a_branch_is_looked_up_at_the_hub(hub: FakeHub, machines: Machines) -> None:
    first, second = machines.make("first", "second")
    fetch(first.pin(), everything())
    hub.requests.clear()
    with machines.serving(first):
        second.pin()
        assert [asked for asked in hub.requests if "/api/" in asked] == [f"GET /api/models/{REPO}"]
        assert not [asked for asked in hub.requests if "/resolve/" in asked]


def test_a_known_commit_needs_no_hub(hub: FakeHub, machines: Machines) -> None:
    (only,) = machines.make("only")
    only.open()
    hub.requests.clear()
    only.pin(COMMIT)
    assert not hub.requests


def test_an_adapter_comes_from_a_neighbour(
    hub: FakeHub, machines: Machines, repo: Path, offline: Callable[[], None]
) -> None:
    for path in repo.glob("model*"):
        path.unlink()
    (repo / "adapter_config.json").write_text("{}")
    part = {"layers.0.lora_a": ([8, 8], bytes(range(256)))}
    checkpoints.write_file(repo / "adapters.safetensors", part)
    first, second = machines.make("first", "second")
    first.pin(kind=ADAPTER).fetch(part, nobody)
    offline()
    with machines.serving(first):
        model = second.pin(kind=ADAPTER)
        before = model.neighbour_bytes
        assert model.fetch(part, nobody) == model.neighbour_bytes - before == 256
    mine = (model.folder / "adapters.safetensors").read_bytes()
    assert mine == (repo / "adapters.safetensors").read_bytes()


def test_the_library_of_the_hub_reads_from_a_neighbour(
    hub: FakeHub, machines: Machines, repo: Path, tmp_path: Path
) -> None:
    """The app speaks the hub's own HTTP."""
    (first,) = machines.make("first")
    download(first, repo)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listening(first.app(), listener):
        for path in repo.glob("model-*"):
            mine = hf_hub_download(
                REPO, path.name, revision=COMMIT, endpoint=url, cache_dir=tmp_path / "other"
            )
            assert Path(mine).read_bytes() == path.read_bytes()
            assert Path(mine).resolve().name == hub.etag(path.name)
        info = HfApi(endpoint=url).model_info(REPO, revision=COMMIT, files_metadata=True)
    assert info.sha == COMMIT
    sizes = {each.rfilename: each.size for each in info.siblings or ()}
    assert sizes["config.json"] == (repo / "config.json").stat().st_size


# --- what goes wrong


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/api/models/{repo}/revision/x%2f..%2f..%2f..%2fsecret", 404),
        ("/api/models/{repo}/revision/{commit}%2f..", 404),
        ("/api/models/../../revision/main", 404),
        ("/{repo}/resolve/{commit}/.brigade/snapshot.json", 404),
        ("/{repo}/resolve/{commit}/../../secret.json", 404),
        ("/{repo}/resolve/{commit}/..%2f..%2fsecret.json", 404),
        ("/{repo}/resolve/{commit}/{secret}", 404),
        ("/{repo}/resolve/{commit}/%2f{secret}", 404),
        ("/{repo}/resolve/{commit}/secret.json", 404),
        ("/{repo}/resolve/{commit}/config.json%00", 404),
        ("/{repo}/resolve/%ff/config.json", 404),
        ("/../resolve/{commit}/config.json", 404),
        ("/{repo}/held/{commit}/..%2f..%2fsecret.json", 404),
        ("/{repo}/resolve/{commit}/config.json", 200),
    ],
)
def test_no_request_leads_out_of_the_caches(
    hub: FakeHub, machines: Machines, target: str, status: int
) -> None:
    (first,) = machines.make("first")
    first.pin()
    secret = first.cache / "secret.json"
    secret.write_text("{}")
    # A file that somebody has put into the folder, but that does not belong to the commit.
    (first.cache / folder_name(REPO) / COMMIT / "secret.json").write_text("{}")
    path = target.format(repo=REPO, commit=COMMIT, secret=secret)
    assert asked(first, path) == status


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("bytes=0-3", 206),
        ("bytes=3-1", 416),
        ("bytes=99999999-", 416),
        # Other forms of the header may be ignored.
        ("bytes=-5", 200),
        ("bytes=0-1,3-4", 200),
        (f"bytes={'9' * 5000}-", 200),
    ],
)
def test_ranges_that_cannot_be_given_are_refused_or_ignored(
    hub: FakeHub, machines: Machines, value: str, status: int
) -> None:
    (first,) = machines.make("first")
    first.pin()
    assert asked(first, f"/{REPO}/resolve/{COMMIT}/config.json", {"Range": value}) == status


def asked(machine: Machine, target: str, headers: Mapping[str, str] | None = None) -> int:
    """Returns the status of an answer to a request whose target is sent as it is."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listening(machine.app(), listener):
        connection = HTTPConnection(*listener.getsockname())
        connection.request("GET", target, headers=dict(headers or {}))
        status = connection.getresponse().status
        connection.close()
    return status


def damaged(machine: Machine, name: str) -> Path:
    """Returns the file that contains a tensor, with one bit of it flipped."""
    place = machine.open().tensors[name]
    with place.file.open("r+b") as stream:
        stream.seek(place.start)
        byte = stream.read(1)[0]
        stream.seek(place.start)
        stream.write(bytes([byte ^ 1]))
    return place.file


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_damaged_file_is_not_given(
    hub: FakeHub, machines: Machines, repo: Path, is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = machines.make("first", "second")
    name = "model.layers.3.q.weight"
    if is_whole:
        download(first, repo)
    fetch(first.pin(), everything())
    file = damaged(first, name)
    with machines.serving(first):
        from_hub, from_neighbours = fetch(second.open(), everything())
    assert 0 < from_hub <= file.stat().st_size
    assert from_neighbours == owned_bytes(everything()) - from_hub
    if not is_whole:
        assert "event=damaged_file" in caplog.text


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_file_that_was_cut_short_is_not_given(
    hub: FakeHub, machines: Machines, repo: Path, is_whole: bool
) -> None:
    first, second = machines.make("first", "second")
    if is_whole:
        download(first, repo)
    fetch(first.pin(), everything())
    path = first.open().tensors["model.norm"].file
    os.truncate(path.resolve(), 100_000)
    with machines.serving(first):
        from_hub, from_neighbours = fetch(second.open(), everything())
    assert from_hub > 0
    assert from_neighbours > 0


def test_a_file_that_changes_after_it_was_checked_is_not_given(
    hub: FakeHub, machines: Machines, repo: Path, small_blocks: None
) -> None:
    """Its size and time stay the same, so only the digests of its blocks can tell."""
    first, second = machines.make("first", "second")
    download(first, repo)
    name = "model.layers.3.q.weight"
    with machines.serving(first):
        file = second.open().tensors[name].file
        file = (first.open().folder / file.name).resolve()
        status = file.stat()
        damaged(first, name)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        from_hub, from_neighbours = fetch(second.open(), everything())
    assert 0 < from_hub <= SMALL.request_bytes
    assert from_neighbours == owned_bytes(everything()) - from_hub


def test_pieces_without_a_digest_are_not_given(hub: FakeHub, machines: Machines) -> None:
    """An earlier version of Brigade fetched them."""
    first, second = machines.make("first", "second")
    model = first.pin()
    fetch(model, everything())
    for path in (model.folder / ".brigade").glob("*.journal"):
        content = f"{hub.etag(path.stem)} {(model.folder / path.stem).stat().st_size}"
        size = (model.folder / path.stem).stat().st_size
        check = zlib.crc32(f"{content} 0 {size}".encode())
        path.write_text(f"\n0 {size} {check:08x}\n")
    with machines.serving(first):
        assert fetch(first.open(), everything()) == (0, 0)
        assert fetch(second.open(), everything()) == (owned_bytes(everything()), 0)


def test_a_wrong_small_file_is_not_taken(
    hub: FakeHub, machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = machines.make("first", "second")
    first.open()

    def other_file(answer: Answer, source: random.Random) -> None:
        answer.body = b"[]"
        answer.headers["content-digest"] = digest_of(answer.body)

    def spoiled(inner: ASGIApp) -> ASGIApp:
        return spoiling(inner, other_file, random.Random(), "tokenizer.json")

    with machines.serving(first, wrapped=spoiled):
        model = second.open()
    assert (model.folder / "tokenizer.json").read_text() == "{}"
    assert caplog.text.count("event=neighbour_wrong") == 1


def test_a_neighbour_that_was_wrong_is_not_asked_again(
    hub: FakeHub, machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = machines.make("first", "second")
    fetch(first.open(), everything())
    asked: list[str] = []
    models: list[PartialModel] = []

    def spoil(answer: Answer, source: random.Random) -> None:
        if models:
            asked.append("")
            flipped_body(answer, source)

    def spoiled(inner: ASGIApp) -> ASGIApp:
        return spoiling(inner, spoil, random.Random(), "/resolve/")

    with machines.serving(first, wrapped=spoiled):
        models.append(second.open())
        assert fetch(models[0], everything())[1] == 0
    assert caplog.text.count("event=neighbour_wrong") == 1
    assert 1 <= len(asked) <= SMALL.num_connections


def test_a_neighbour_that_stops_is_replaced_by_the_hub(
    hub: FakeHub, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machines.make("first", "second")
    fetch(first.open(), everything())
    with machines.serving(first):
        model = second.open()
        fetch(model, ["model.norm"])
    from_hub, from_neighbours = fetch(model, everything())
    assert from_hub == owned_bytes(everything()) - 384
    assert from_neighbours == 0


def test_a_transfer_that_breaks_goes_on_where_it_stopped(
    hub: FakeHub,
    machines: Machines,
    offline: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offline, the same neighbour is asked again."""
    block_bytes = 20_000
    monkeypatch.setattr(neighbours, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(neighbours, "_FIRST_REST_SECONDS", 0.0)
    first, second = machines.make("first", "second")
    fetch(first.open(), everything())
    offline()
    sent = 0

    def count(answer: Answer, source: random.Random) -> None:
        nonlocal sent
        sent += len(answer.body)

    def counted(inner: ASGIApp) -> ASGIApp:
        return spoiling(inner, count, random.Random(), "/resolve/")

    place = second.neighbours / "first.sock"
    place.unlink()
    name = "model.layers.3.up.weight"
    wire = Wire()
    with (
        machines.serving(first, wrapped=counted),
        proxy(machines.socket("first"), place, wire),
    ):
        model = second.open()
        sent = 0
        wire.cut_at = 30_000
        assert fetch(model, [name]) == (0, owned_bytes([name]))
    assert wire.num_spoiled == 1
    assert sent <= owned_bytes([name]) + block_bytes


@pytest.mark.parametrize("how", ["silent", "cut"])
def test_a_hub_that_is_cut_off_is_replaced_by_a_neighbour_that_has_the_rest(
    hub: FakeHub, machines: Machines, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(neighbours, "_FIRST_REST_SECONDS", 0.0)
    monkeypatch.setattr(neighbours, "_FRESH_SECONDS", 0.0)
    first, second = machines.make("first", "second")
    fetch(first.open(), everything())
    model = second.open()
    with ExitStack() as stack:

        def cut_off(done: int, total: int) -> None:
            if done < total // 3 or hub.faults.is_silent or hub.faults.cut:
                return
            stack.enter_context(machines.serving(first))
            if how == "silent":
                hub.faults.is_silent = True
            else:
                hub.faults.cut, hub.faults.cut_bytes = 1000, -1

        fetched = model.fetch(everything(), cut_off)
    assert fetched == owned_bytes(everything())
    assert 0 < model.neighbour_bytes < fetched
    assert fetch(model, everything()) == (0, 0), "all bytes are right"


def test_offline_a_rank_says_what_nobody_has_and_goes_on_when_a_neighbour_has_it(
    hub: FakeHub, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first machine may ask the hub."""
    first, second = machines.make("first", "second")
    lower = checkpoints.owned_by(1, 2)
    fetch(first.pin(), lower)
    with machines.serving(first):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        model = second.open()
        with fails(ModelError, "hub_offline"):
            model.fetch(everything(), nobody)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        fetch(first.open(), everything())
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        from_hub, from_neighbours = fetch(second.open(), everything())
    assert from_hub == 0
    assert from_neighbours > 0


def read_once(
    machine: Machine, snapshot: Snapshot, source: random.Random
) -> tuple[bytes, str, int, int]:
    """Reads a random range, from neighbours first; returns the bytes, and where they are."""
    names = [name for name in snapshot.files if name.endswith(".safetensors")]
    file = snapshot.files[source.choice(names)]
    start = source.randrange(file.size)
    end = min(file.size, start + source.randrange(1, 60_000))
    machine.act()
    remote = RemoteFile(REPO, COMMIT, file, NeighbourCaches.of_environment())
    return b"".join(remote.read(start, end)), file.name, start, end


@pytest.mark.parametrize("num_transfers", [110, pytest.param(500, marks=pytest.mark.slow)])
def test_no_wrong_answer_of_a_neighbour_is_accepted(
    hub: FakeHub, machines: Machines, repo: Path, num_transfers: int
) -> None:
    first, second = machines.make("first", "second")
    fetch(first.open(), everything())
    snapshot = first.pin().snapshot
    source = random.Random(1)
    num_spoiled = 0

    def spoil(answer: Answer, source: random.Random) -> None:
        nonlocal num_spoiled
        num_spoiled += 1
        ALL[num_spoiled % len(ALL)](answer, source)

    def spoiled(inner: ASGIApp) -> ASGIApp:
        return spoiling(inner, spoil, source, "/resolve/")

    num_wrong = 0
    with machines.serving(first, wrapped=spoiled):
        for _ in range(num_transfers):
            got, name, start, end = read_once(second, snapshot, source)
            num_wrong += got != (repo / name).read_bytes()[start:end]
    assert num_spoiled == num_transfers
    assert num_wrong == 0


@pytest.mark.parametrize("num_transfers", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_no_byte_that_changes_on_its_way_is_accepted(
    hub: FakeHub, machines: Machines, repo: Path, num_transfers: int
) -> None:
    first, second = machines.make("first", "second")
    fetch(first.open(), everything())
    snapshot = first.pin().snapshot
    source = random.Random(2)
    wire = Wire()
    place = second.neighbours / "first.sock"
    place.unlink()
    num_wrong = 0
    with machines.serving(first), proxy(machines.socket("first"), place, wire):
        for number in range(num_transfers):
            where = source.randrange(30_000) if number % 2 else source.randrange(900)
            wire.flip_at, wire.cut_at = (where, None) if number % 3 else (None, where)
            wire.bit = 1 << source.randrange(8)
            got, name, start, end = read_once(second, snapshot, source)
            num_wrong += got != (repo / name).read_bytes()[start:end]
    assert wire.num_spoiled > num_transfers / 2
    assert num_wrong == 0


# --- a folder that only one machine has


def test_a_folder_is_read_by_all_machines(
    hub: FakeHub, machines: Machines, repo: Path, tmp_path: Path
) -> None:
    shutil.copytree(repo, tmp_path / "My model (4 bit)")
    first, second = machines.make("first", "second")
    name, commit = publish(tmp_path / "My model (4 bit)", first.cache)
    assert name == "folder/My-model-4-bit"
    mine = first.open(name, commit)
    assert fetch(mine, everything()) == (0, 0)
    assert all((mine.folder / path.name).is_symlink() for path in repo.glob("*.safetensors"))
    with machines.serving(first):
        model = second.open(name, commit)
        assert fetch(model, everything()) == (0, owned_bytes(everything()))
    assert (model.folder / "config.json").read_bytes() == (repo / "config.json").read_bytes()
    assert not (model.folder / "modeling_evil.py").exists()
    assert hub.requests.total() == 0


def test_a_folder_is_hashed_once(
    machines: Machines, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = machines.make("only")
    monkeypatch.setattr(digests, "BLOCK_BYTES", 100_000)
    first = publish(repo, only.cache)
    read: list[Path] = []
    compute = digests._compute

    def noting(path: Path, *rest: Any) -> Any:
        read.append(path)
        return compute(path, *rest)

    monkeypatch.setattr(digests, "_compute", noting)
    assert publish(repo, only.cache) == first
    assert not [path for path in read if path.suffix == ".safetensors"]
    path = next(repo.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert publish(repo, only.cache)[1] != first[1]
    assert path in read


def test_a_folder_that_has_changed_is_not_given(
    hub: FakeHub, machines: Machines, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_FIRST_WAIT_SECONDS", 0.0)
    first, second = machines.make("first", "second")
    name, commit = publish(repo, first.cache)
    with machines.serving(first):
        model = second.open(name, commit)
        path = repo / model.tensors["model.norm"].file.name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with fails(HubError, "no_hub", match="cannot be fetched from other machines"):
            fetch(model, everything())
    assert hub.requests.total() == 0


def test_the_error_for_a_folder_that_nobody_offers_says_what_to_do(machines: Machines) -> None:
    (only,) = machines.make("only")
    with fails(HubError, "no_hub", match="brigade up"):
        only.open("folder/my-model", "a" * 40)


def test_a_folder_that_has_changed_is_not_read_under_its_old_commit(
    machines: Machines, repo: Path
) -> None:
    """Other ranks may have taken bytes of the old files."""
    (only,) = machines.make("only")
    name, commit = publish(repo, only.cache)
    path = next(repo.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with fails(ModelError, "changed_file", match="brigade up"):
        only.open(name, commit)
    only.open(*publish(repo, only.cache))


@pytest.mark.parametrize("num_transfers", [60, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_whole", [False, True])
def test_no_byte_that_changed_on_a_disk_is_accepted(
    hub: FakeHub,
    machines: Machines,
    repo: Path,
    num_transfers: int,
    is_whole: bool,
    small_blocks: None,
) -> None:
    """Bits flip, and files are cut short, behind the back of the machine that checked them."""
    # A file of several blocks is not read again as long as its size and time stay the same.
    first, second = machines.make("first", "second")
    if is_whole:
        download(first, repo)
    model = first.pin()
    fetch(model, everything())
    source = random.Random(3)
    num_wrong = 0
    with machines.serving(first):
        assert fetch(second.open(), everything())[1] > 0, "all files are checked"
        for number in range(num_transfers):
            path = source.choice(sorted(model.folder.glob("*.safetensors")))
            file = path.resolve()
            data = file.read_bytes()
            start = source.randrange(len(data))
            end = min(len(data), start + 60_000)
            if number % 4:
                where = source.randrange(start, end)
                damaged_data = data[:where] + flip(data[where:end], source) + data[end:]
            else:
                damaged_data = data[: source.randrange(start, end)]
            status = file.stat()
            file.write_bytes(damaged_data)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            second.act()
            original = (repo / path.name).read_bytes()
            wanted = model.snapshot.files[path.name]
            remote = RemoteFile(REPO, COMMIT, wanted, NeighbourCaches.of_environment())
            num_wrong += b"".join(remote.read(start, end)) != original[start:end]
            file.write_bytes(data)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert num_wrong == 0


def test_a_neighbour_that_still_checks_a_file_is_awaited(
    hub: FakeHub,
    machines: Machines,
    repo: Path,
    small_blocks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checking a file of 5 GB for the first time takes longer than a request may."""
    first, second = machines.make("first", "second")
    download(first, repo)
    compute = digests._compute
    answers = threading.Event()
    asked: list[Path] = []

    def slow(path: Path, *rest: Any) -> Any:
        if path.stat().st_size > 10_000:
            asked.append(path)
            assert answers.wait(60)
        return compute(path, *rest)

    monkeypatch.setattr(digests, "_compute", slow)
    hub.served.clear()
    statuses: list[int] = []

    def note(answer: Answer, source: random.Random) -> None:
        statuses.append(answer.status)
        if answer.status == 503:
            answers.set()

    def noting(inner: ASGIApp) -> ASGIApp:
        return spoiling(inner, note, random.Random(), "/held/")

    with machines.serving(first, wrapped=noting):
        assert fetch(second.open(), everything()) == (0, owned_bytes(everything()))
    assert 503 in statuses
    assert len(asked) == 3, "each large file once"
    assert not hub.served
