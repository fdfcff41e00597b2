"""A machine that may not ask the hub reads it through a paired one that may."""

import gc
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import close_session, constants, hf_hub_download

from serve.core.errors import ModelError
from serve.hub import access, neighbours
from serve.hub.access import HubError, Retry
from serve.hub.partial import PartialModel
from serve.hub.remote import RemoteFile
from serve.hub.snapshot import ADAPTER
from tests.errors import fails
from tests.hub import checkpoints
from tests.hub.server import COMMIT, REPO, TOKEN, FakeHub
from tests.nodes.machines import Machine, Machines
from tests.test_launcher import ROOT, wait_until

# httpcore2 leaves a unix socket to the collector if nobody listens there.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

SERVER = """
import asyncio
import signal
import sys
from pathlib import Path
from launcher.nodes.serving import serving
from launcher.nodes.weights import app
cache, hub_cache, socket = map(Path, sys.argv[1:])

async def serve():
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with serving(app(cache, hub_cache), str(socket)):
        await over.wait()

asyncio.run(serve())
"""


@pytest.fixture
def serving(machines: Machines, hub: FakeHub) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts the weights server of a machine as a process of its own, which may ask the hub."""
    with ExitStack() as stack:

        def serve(machine: Machine, **variables: str) -> "subprocess.Popen[bytes]":
            path = machines.socket(machine.name)
            home = {"HF_HOME": str(machine.cache.parent), "HF_ENDPOINT": hub.url}
            folders = [str(machine.cache), str(machine.hub_cache)]
            process = subprocess.Popen(
                [sys.executable, "-c", SERVER, *folders, str(path)],
                env={**os.environ, "PYTHONPATH": str(ROOT), **home, **variables},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until(lambda: answers(path))
            return process

        yield serve
    with warnings.catch_warnings():
        # httpcore2 leaves a unix socket to the collector if nobody listens there. It must not be
        # found during another test.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as tried:
        return tried.connect_ex(str(path)) == 0


@contextmanager
def without_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No host's name can be resolved."""

    def no_name(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", no_name)
        patched.setattr(constants, "ENDPOINT", "http://hub.invalid")
        template = "http://hub.invalid/{repo_id}/resolve/{revision}/{filename}"
        patched.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield


def asked(machines: Machines, place: str, headers: Mapping[str, str] | None = None) -> int:
    """Returns the status of the answer of the machine that is called only."""
    transport = httpx2.HTTPTransport(uds=str(machines.socket("only")))
    with httpx2.Client(transport=transport, base_url="http://neighbour") as client:
        return client.get(f"/.hub{place}", headers=headers).status_code


def nobody(done: int, total: int) -> None:
    assert 0 <= done <= total


def fetch_all(model: PartialModel) -> int:
    """Returns the bytes that came from the hub. All bytes are right."""
    expected = checkpoints.tensors()
    before = model.neighbour_bytes
    fetched = model.fetch(expected, nobody)
    for name, (_, data) in expected.items():
        place = model.tensors[name]
        with place.file.open("rb") as stream:
            stream.seek(place.start)
            is_right = stream.read(place.num_bytes) == data
            assert is_right, name
    return fetched - (model.neighbour_bytes - before)


def num_bytes() -> int:
    return sum(len(data) for _, data in checkpoints.tensors().values())


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_a_machine_that_is_offline_fetches_a_model_that_nobody_has(
    hub: FakeHub,
    machines: Machines,
    repo: Path,
    serving: Callable[..., object],
    offline: Callable[[], None],
    revision: str | None,
) -> None:
    first, second = machines.make("first", "second")
    serving(first)
    offline()
    model = second.pin(revision)
    assert fetch_all(model) == num_bytes()
    assert hub.data_bytes(checkpoints.header_sizes(repo)) == num_bytes(), "each byte once"
    names = {path.name for path in model.folder.iterdir() if path.is_file()}
    assert names == {path.name for path in repo.iterdir() if path.suffix not in (".py", ".bin")}
    assert (model.folder / "chat_template.jinja").read_text() == "{{ messages }}"
    requests = hub.requests.total()
    assert fetch_all(second.pin(revision)) == 0
    assert hub.requests.total() == requests


def test_a_machine_without_a_way_to_the_hub_needs_no_variable(
    machines: Machines, serving: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machines.make("first", "second")
    serving(first)
    with without_names(monkeypatch):
        assert fetch_all(second.pin()) == num_bytes()


def test_a_machine_that_loses_its_way_to_the_hub_meanwhile_asks_a_neighbour(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "_FIRST_WAIT_SECONDS", 0.0)
    first, second = machines.make("first", "second")
    serving(first)
    second.act()
    model = second.pin()
    with without_names(monkeypatch):
        close_session()
        assert fetch_all(model) == num_bytes()


def test_an_adapter_comes_through_a_neighbour(
    hub: FakeHub,
    machines: Machines,
    repo: Path,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    for path in repo.glob("model*"):
        path.unlink()
    checkpoints.write_file(repo / "adapters.safetensors", checkpoints.tensors())
    (repo / "adapter_config.json").write_text("{}")
    first, second = machines.make("first", "second")
    serving(first)
    offline()
    assert fetch_all(second.pin(kind=ADAPTER)) == num_bytes()


def test_what_a_neighbour_holds_is_not_fetched_again(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    first, second = machines.make("first", "second")
    lower = checkpoints.owned_by(1, 2)
    first.pin().fetch(lower, nobody)
    serving(first)
    offline()
    given = sum(len(checkpoints.tensors()[name][1]) for name in lower)
    assert fetch_all(second.pin()) == num_bytes() - given


@pytest.mark.parametrize("fault", ["cut", "busy", "expired", "wrong_place"])
def test_faults_of_the_hub_are_overcome_through_a_neighbour(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
    fault: str,
) -> None:
    first, second = machines.make("first", "second")
    serving(first)
    offline()
    model = second.pin()
    setattr(hub.faults, fault, 5)
    assert fetch_all(model) == num_bytes()
    assert getattr(hub.faults, fault) == 0


def test_the_refusal_of_the_hub_is_told(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    first, second = machines.make("first", "second")
    hub.faults.gated = 403
    serving(first)
    offline()
    with fails(ModelError, "licence", "A paired machine asked the hub: .*accept its licence"):
        second.pin()
    hub.faults.gated = None
    with fails(ModelError, "not_on_hub", "no/such"):
        second.act()
        access.patiently("no/such", lambda: caches().snapshot_of_hub("no/such", None))


def caches() -> neighbours.NeighbourCaches:
    return neighbours.NeighbourCaches.of_environment()


def test_a_file_that_changed_can_be_fetched_by_starting_again(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    """The error says so. The node runs on, and must forget the file as it was."""
    first, second = machines.make("first", "second")
    serving(first)
    offline()
    model = second.pin()
    hub.faults.change_after = 0
    with fails(ModelError, "changed_file", "start again"):
        model.fetch(checkpoints.tensors(), nobody)
    model = second.pin()
    assert model.fetch(checkpoints.tensors(), nobody) == num_bytes()


def test_a_wait_that_the_hub_asks_for_is_told(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    """The machine that asks does the waiting: it would give up on a gateway that waits so long."""
    first, second = machines.make("first", "second")
    serving(first)
    offline()
    file = second.pin().snapshot.files["model-00001-of-00003.safetensors"]
    remote = RemoteFile(REPO, COMMIT, file, caches())
    hub.faults.busy = 1
    hub.faults.retry_after = "250"
    waits: list[float] = []
    assert b"".join(remote.read(0, 100, waits.append))
    assert waits == [250]


def test_the_reason_why_the_hub_gives_nothing_now_is_told_once(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "_FIRST_WAIT_SECONDS", 0.0)
    first, second = machines.make("first", "second")
    serving(first)
    offline()
    hub.faults.busy_api = 100
    with pytest.raises(HubError, match="A paired machine asked the hub") as caught:
        second.pin()
    assert str(caught.value).count("check the path and the network") == 1


def test_a_neighbour_that_the_hub_refuses_is_replaced(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    first, second, third = machines.make("first", "second", "third")
    hub.faults.gated = 403
    serving(first)
    serving(third, HF_TOKEN=TOKEN)
    offline()
    assert fetch_all(second.pin()) == num_bytes()


def test_a_neighbour_uses_its_own_token(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    first, second = machines.make("first", "second")
    hub.faults.gated = 403
    serving(first, HF_TOKEN=TOKEN)
    offline()
    assert fetch_all(second.pin()) == num_bytes()
    assert not hub.leaked_tokens


def test_a_neighbour_that_may_not_ask_the_hub_does_not(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    first, second = machines.make("first", "second")
    serving(first, HF_HUB_OFFLINE="1")
    offline()
    with fails(ModelError, "hub_offline", "paired"):
        second.pin()
    assert not hub.requests
    (third,) = machines.make("third")
    serving(third)
    assert fetch_all(second.pin()) == num_bytes()


def test_a_model_that_the_cache_of_hugging_face_lacks_in_part_is_completed(
    hub: FakeHub,
    machines: Machines,
    repo: Path,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    first, second = machines.make("first", "second")
    second.act()
    for name in ("config.json", "model-00001-of-00003.safetensors"):
        hf_hub_download(REPO, name)
    serving(first)
    offline()
    size = (repo / "model-00001-of-00003.safetensors").stat().st_size
    held = size - checkpoints.header_sizes(repo)["model-00001-of-00003.safetensors"]
    assert fetch_all(second.pin()) == num_bytes() - held


@pytest.mark.parametrize(
    "place",
    [
        f"/api/models/{REPO}/revision/main",
        f"/{REPO}/resolve/{COMMIT}/config.json",
        f"/{REPO}/resolve/{COMMIT}/model-00001-of-00003.safetensors",
    ],
)
def test_a_node_ends_while_the_hub_is_silent(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., "subprocess.Popen[bytes]"],
    place: str,
) -> None:
    (only,) = machines.make("only")
    very_long = "100000"
    process = serving(
        only, HF_HUB_ETAG_TIMEOUT=very_long, HF_HUB_DOWNLOAD_TIMEOUT=very_long, HF_HUB_OFFLINE="0"
    )
    assert asked(machines, f"/api/models/{REPO}/revision/{COMMIT}") == 200
    before = hub.requests.total()
    hub.faults.silent_after = 0
    hub.faults.is_silent = not place.endswith("safetensors")
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(machines.socket("only")))) as client:
        request = client.build_request(
            "GET", f"http://x/.hub{place}", headers={"Range": "bytes=0-9"}
        )
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.send, request)
            wait_until(lambda: hub.requests.total() > before)
            process.terminate()
            process.wait(60)
            assert answer.exception() or answer.result().status_code >= 500


@pytest.mark.slow
def test_a_silent_hub_is_told_before_the_machine_that_asks_gives_up(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = machines.make("first", "second")
    serving(first, HF_HUB_ETAG_TIMEOUT="100000")
    offline()
    second.act()
    hub.faults.is_silent = True
    with pytest.raises(Retry, match="hub"):
        caches().snapshot_of_hub(REPO, "main")
    assert "neighbour_away" not in caplog.text


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_neighbour_that_is_killed_meanwhile_is_replaced_or_waited_for(
    hub: FakeHub,
    machines: Machines,
    serving: Callable[..., "subprocess.Popen[bytes]"],
    offline: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    is_replaced: bool,
) -> None:
    monkeypatch.setattr(neighbours, "_FIRST_REST_SECONDS", 0.0)
    monkeypatch.setattr(access, "_FIRST_WAIT_SECONDS", 0.2)
    first, second, third = machines.make("first", "second", "third")
    process = serving(first)
    if is_replaced:
        serving(third)
    offline()
    model = second.open()

    def kill(done: int, total: int) -> None:
        if done > total // 3 and process.poll() is None:
            process.kill()
            process.wait()
            machines.socket("first").unlink()
            if not is_replaced:
                serving(first)

    assert model.fetch(checkpoints.tensors(), kill) == num_bytes()
    assert fetch_all(model) == 0, "all bytes are right"


def test_the_error_when_a_neighbour_does_not_come_back_says_so(
    machines: Machines,
    serving: Callable[..., "subprocess.Popen[bytes]"],
    offline: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours, "_FIRST_REST_SECONDS", 0.0)
    first, second = machines.make("first", "second")
    process = serving(first)
    offline()
    model = second.open()
    process.kill()
    process.wait()
    with fails(HubError, "no_hub", "other machines"):
        model.fetch(checkpoints.tensors(), nobody)


@pytest.mark.parametrize(
    ("place", "status"),
    [
        (f"/{REPO}/resolve/{COMMIT}/modeling_evil.py", 403),
        (f"/{REPO}/resolve/{COMMIT}/pytorch_model.bin", 403),
        (f"/{REPO}/resolve/main/config.json", 403),
        (f"/{REPO}/resolve/{COMMIT}/..%2f..%2fetc%2fpasswd", 403),
        (f"/{REPO}/resolve/{COMMIT}/model-00001-of-00003.safetensors", 403),
        (f"/..%2f{REPO}/resolve/{COMMIT}/config.json", 403),
        (f"/{REPO}/held/{COMMIT}/config.json", 404),
        (f"/{REPO}/resolve/{COMMIT}/config.json", 200),
    ],
)
def test_a_neighbour_passes_on_only_what_ranks_need(
    machines: Machines, serving: Callable[..., object], place: str, status: int
) -> None:
    (only,) = machines.make("only")
    serving(only)
    assert asked(machines, place) == status


@pytest.mark.parametrize(
    ("wanted", "status"), [("bytes=0-0", 206), ("bytes=10-5", 416), (f"bytes=0-{10**9}", 416)]
)
def test_a_neighbour_checks_the_range(
    machines: Machines, serving: Callable[..., object], wanted: str, status: int
) -> None:
    (only,) = machines.make("only")
    serving(only)
    place = f"/{REPO}/resolve/{COMMIT}/model-00001-of-00003.safetensors"
    assert asked(machines, place, {"Range": wanted}) == status


def test_the_hub_cache_of_a_neighbour_gets_only_small_files(
    machines: Machines,
    serving: Callable[..., object],
    offline: Callable[[], None],
) -> None:
    first, second = machines.make("first", "second")
    serving(first)
    offline()
    fetch_all(second.pin())
    kept = {path.name for path in first.hub_cache.rglob("*") if path.is_symlink()}
    assert kept == {
        *("config.json", "tokenizer.json", "chat_template.jinja"),
        "model.safetensors.index.json",
    }
