"""A rank gets its own tensors from the hub: exactly them, right, and once."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from serve.core.checkpoint import read_checkpoint, read_header
from serve.core.errors import EngineError, ModelError
from serve.front.text.pooling import pooling_of
from serve.hub import fetch, journal, partial
from serve.hub.access import HubError, explain
from serve.hub.fetch import Sizes
from serve.hub.partial import FetchOrder, PartialModel, open_partial, pin
from serve.hub.ranges import subtract, total
from serve.hub.repo import resolve
from serve.hub.snapshot import default_cache
from tests.errors import fails
from tests.hub import checkpoints
from tests.hub.server import COMMIT, REPO, TOKEN, FakeHub

SMALL = Sizes(request_bytes=300_000, sync_bytes=50_000, num_connections=4)


def nobody(done: int, total: int) -> None:
    assert 0 <= done <= total


def opened(cache: Path, sizes: Sizes = SMALL) -> PartialModel:
    return open_partial(REPO, COMMIT, cache, sizes=sizes)


def assert_right(model: PartialModel, names: Iterable[str]) -> None:
    """The bytes in the folder are those of the repository."""
    expected = checkpoints.tensors()
    for name in names:
        place = model.tensors[name]
        with place.file.open("rb") as stream:
            stream.seek(place.start)
            is_right = stream.read(place.num_bytes) == expected[name][1]
            assert is_right, name  # pytest would take minutes to show the difference


def owned_bytes(names: Iterable[str]) -> int:
    everything = checkpoints.tensors()
    return sum(len(everything[name][1]) for name in names)


def missing_bytes(model: PartialModel, names: Iterable[str]) -> int:
    wanted = model._wanted(names).items()
    return sum(total(subtract(ranges, shard.present())) for shard, ranges in wanted)


# --- the folder


def test_sparse_files_have_the_digest_and_sizes_of_the_whole_model(
    hub: FakeHub, home: Path, repo: Path
) -> None:
    model = opened(home / "cache")
    theirs, mine = read_checkpoint(repo), read_checkpoint(model.folder)
    assert mine.digest == theirs.digest
    assert set(mine.tensors) == set(model.tensors) == set(theirs.tensors)
    for path in repo.glob("*.safetensors"):
        assert (model.folder / path.name).stat().st_size == path.stat().st_size
    assert hub.data_bytes(checkpoints.header_sizes(repo)) == 0
    there = {path.name for path in model.folder.iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= there
    assert not there & {"modeling_evil.py", "pytorch_model.bin"}
    assert not any("evil" in asked or ".bin" in asked for asked in hub.requests)


POOLING = {
    "modules.json": [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode_cls_token": True},
}


def test_only_pooling_is_fetched_from_the_folders_of_a_repository(
    hub: FakeHub, home: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = "onnx/config.json", "1_Pooling/other.json", "2_Dense/config.json"
    for name, content in (*POOLING.items(), *((name, {}) for name in others)):
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text(json.dumps(content))
    model = opened(home / "cache")
    assert pooling_of(model.folder) == "cls"
    assert not any((model.folder / name).exists() for name in others)
    for name in (*POOLING, "config.json", "model.safetensors.index.json"):
        hf_hub_download(REPO, name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert set(POOLING) <= resolve(REPO, None, home / "other").files.keys()


def test_headers_are_fetched_only_once(hub: FakeHub, home: Path) -> None:
    opened(home / "cache")
    before = len(hub.served), hub.requests.total()
    opened(home / "cache")
    assert (len(hub.served), hub.requests.total()) == before


def test_the_default_cache_is_below_hf_home(home: Path) -> None:
    assert default_cache() == home / "brigade"


def write_zeros(descriptor: int, size: int) -> None:
    """What os.ftruncate does on a file system without holes."""
    before = os.fstat(descriptor).st_size
    os.pwrite(descriptor, bytes(size - before), before)


def test_files_larger_than_the_disk_need_a_file_system_with_holes(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(home / "first")  # The hub's own cache has the small files after this.
    full = SimpleNamespace(free=1000)
    monkeypatch.setattr(partial.shutil, "disk_usage", lambda folder: full)
    opened(home / "sparse")
    monkeypatch.setattr(partial.os, "ftruncate", write_zeros)
    opened(home / "sparse")
    with pytest.raises(ModelError, match=f"no sparse files, so {REPO} needs .* --cache-dir"):
        opened(home / "whole")
    assert not list((home / "whole").rglob("*.safetensors"))
    full.free = 10**9
    model = opened(home / "whole")
    full.free = 1000  # The files take all the room that they need.
    model.fetch(model.tensors, nobody)
    assert_right(model, model.tensors)
    sparse = opened(home / "sparse")
    with pytest.raises(ModelError, match="make room"):
        sparse.fetch(sparse.tensors, nobody)


@pytest.mark.parametrize("make", [opened, lambda cache: pin(REPO, None, cache)])
def test_a_new_cache_is_left_out_of_the_backups_of_macos(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    tmutil = home / "bin" / "tmutil"
    tmutil.parent.mkdir()
    tmutil.write_text(f'#!/bin/sh\necho "$@" >>{home}/log\n')
    tmutil.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmutil.parent}:{os.environ['PATH']}")
    make(home / "cache")
    make(home / "cache")
    assert (home / "log").read_text() == f"addexclusion {home / 'cache'}\n"


# --- only one's own


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_rank_fetches_little_more_than_its_own_weights(
    hub: FakeHub, home: Path, repo: Path, num_ranks: int, num_shards: int
) -> None:
    for path in repo.iterdir():
        path.unlink()
    checkpoints.write(repo, num_shards)
    headers = checkpoints.header_sizes(repo)
    for rank in range(num_ranks):
        hub.served.clear()
        names = checkpoints.owned_by(rank, num_ranks)
        model = opened(home / f"cache-{rank}")
        fetched = model.fetch(names, nobody)
        assert fetched == hub.data_bytes(headers)
        assert 1 <= fetched / owned_bytes(names) <= 1.01
        assert_right(model, names)


def test_ranks_that_share_a_folder_fetch_each_weight_once(
    hub: FakeHub, home: Path, repo: Path
) -> None:
    fetched = sum(
        opened(home / "cache").fetch(checkpoints.owned_by(rank, 3), nobody) for rank in range(3)
    )
    assert fetched == owned_bytes(checkpoints.tensors())
    model = opened(home / "cache")
    assert_right(model, checkpoints.tensors())
    assert missing_bytes(model, model.tensors) == 0
    assert model.fetch(model.tensors, nobody) == 0


def test_progress_ends_at_the_number_of_owned_bytes(hub: FakeHub, home: Path) -> None:
    names, seen = checkpoints.owned_by(0, 2), []
    model = opened(home / "cache")
    assert missing_bytes(model, names) == owned_bytes(names)
    model.fetch(names, lambda done, total: seen.append((done, total)))
    assert max(done for done, _ in seen) == owned_bytes(names)
    assert {total for _, total in seen} == {owned_bytes(names)}


def test_tensors_that_others_may_fetch_come_last(hub: FakeHub, home: Path) -> None:
    """The hub then sends the embedding once, also if the last stage uses it as the head."""
    model = opened(home / "cache", replace(SMALL, num_connections=1))
    names = ["model.embed.weight", "model.layers.0.q.weight", "model.norm"]
    hub.served.clear()
    model.fetch(names, nobody, order=FetchOrder(set(), {"model.embed.weight"}))
    embedding = model.tensors["model.embed.weight"]
    is_embedding = [
        served.file == embedding.file.name and embedding.start <= served.start < embedding.end
        for served in hub.served
    ]
    assert is_embedding == sorted(is_embedding)
    assert sum(is_embedding) == 1


# --- what the network does


def spoil_cut(hub: FakeHub) -> None:
    hub.faults.cut = 12


def spoil_busy(hub: FakeHub) -> None:
    hub.faults.busy = 4


def spoil_503(hub: FakeHub) -> None:
    hub.faults.busy, hub.faults.busy_status, hub.faults.retry_after = 4, 503, "nonsense"


def spoil_expired(hub: FakeHub) -> None:
    hub.faults.expired = 3


def spoil_api(hub: FakeHub) -> None:
    hub.faults.busy_api = 2


def spoil_place(hub: FakeHub) -> None:
    hub.faults.wrong_place = 3


def spoil_listing(hub: FakeHub) -> None:
    hub.faults.no_sizes = True


@pytest.mark.parametrize(
    "spoil",
    [spoil_cut, spoil_busy, spoil_503, spoil_expired, spoil_api, spoil_place, spoil_listing],
)
def test_temporary_failures_are_retried(
    hub: FakeHub, home: Path, repo: Path, spoil: Callable[[FakeHub], None]
) -> None:
    names = checkpoints.owned_by(1, 2)
    spoil(hub)
    model = opened(home / "cache")
    spoil(hub)
    fetched = model.fetch(names, nobody)
    assert_right(model, names)
    assert fetched / owned_bytes(names) <= 1.01


def test_a_fetch_continues_at_the_same_byte_after_a_broken_connection(
    hub: FakeHub, home: Path, repo: Path
) -> None:
    model, names = opened(home / "cache"), checkpoints.owned_by(0, 2)
    hub.faults.cut, hub.faults.cut_bytes = 40, 30_000
    hub.served.clear()
    model.fetch(names, nobody)
    assert hub.faults.cut < 30
    assert hub.data_bytes(checkpoints.header_sizes(repo)) <= 1.01 * owned_bytes(names)


def test_the_retry_after_header_is_obeyed(hub: FakeHub, home: Path) -> None:
    model = opened(home / "cache")
    hub.faults.busy, hub.faults.retry_after = 1, "1"
    started = time.monotonic()
    model.fetch(["model.norm"], nobody)
    assert time.monotonic() - started >= 1


def test_a_server_that_never_answers_is_given_up_with_its_reason(hub: FakeHub, home: Path) -> None:
    model = opened(home / "cache")
    hub.faults.busy = 10_000
    with fails(ModelError, "no_hub", match="429"):
        model.fetch(["model.norm"], nobody)
    hub.faults.busy = 0
    model.fetch(["model.norm"], nobody)
    assert_right(model, ["model.norm"])


@pytest.mark.parametrize("num_answers", [0, 1, 3])
def test_a_file_that_changes_during_a_fetch_is_an_error(
    hub: FakeHub, home: Path, num_answers: int
) -> None:
    """Whichever answer is the first of the other file: nothing of it counts as fetched."""
    model, names = opened(home / "cache"), checkpoints.owned_by(0, 2)
    hub.faults.change_after = hub.num_answers + num_answers
    with fails(ModelError, "changed_file"):
        model.fetch(names, nobody)
    hub.faults.change_after = None
    again = opened(home / "cache")
    again.fetch(names, nobody)
    assert_right(again, names)


def test_a_file_with_another_etag_than_in_the_listing_is_an_error(hub: FakeHub, home: Path) -> None:
    hub.faults.moved_commit = True
    with fails(ModelError, "changed_file", match="etag"):
        opened(home / "cache")


def test_a_file_of_another_length_than_in_the_listing_is_an_error(hub: FakeHub, home: Path) -> None:
    hub.faults.wrong_length = 7
    with fails(ModelError, "changed_file"):
        opened(home / "cache")


def test_a_stored_file_shorter_than_in_the_listing_is_an_error(
    hub: FakeHub, home: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, path = hub.listing(), next(repo.glob("model-00002*"))
    etags = {path.name: hub.etag(path.name) for path in repo.iterdir()}
    monkeypatch.setattr(hub, "listing", lambda: listing)
    monkeypatch.setattr(hub, "etag", etags.__getitem__)
    hub.sizes[path.name] = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1000])
    with fails(ModelError, "changed_file", match=path.name):
        opened(home / "cache")


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_server_without_byte_ranges_is_refused_unless_all_files_are_complete(
    hub: FakeHub, home: Path, repo: Path, from_the_start: bool
) -> None:
    names = checkpoints.owned_by(0, 2)
    if from_the_start:
        hub.faults.no_ranges_after = 0
    else:
        model = opened(home / "cache")
        hub.faults.no_ranges_after = hub.num_answers
    with pytest.raises(ModelError, match=f"serves only whole files: run `hf download {REPO}`"):
        (opened(home / "cache") if from_the_start else model).fetch(names, nobody)
    for path in repo.glob("*.safetensors"):
        hf_hub_download(REPO, path.name, revision=COMMIT)
    model = opened(home / "other")
    model.fetch(names, nobody)
    assert_right(model, names)


# --- who may


@pytest.mark.parametrize("status", [401, 403])
def test_the_error_for_a_gated_model_says_what_to_do(hub: FakeHub, home: Path, status: int) -> None:
    hub.faults.gated = status
    with fails(ModelError, "licence") as caught:
        opened(home / "cache")
    assert "\n" not in str(caught.value)


def test_the_token_is_sent_to_the_hub_and_to_nobody_else(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.gated = 401
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = opened(home / "cache")
    model.fetch(["model.norm"], nobody)
    assert_right(model, ["model.norm"])
    assert hub.leaked_tokens == []


def test_an_unknown_repository_is_refused(hub: FakeHub, home: Path) -> None:
    with fails(ModelError, "not_on_hub"):
        resolve("org/nothing", None, home)
    with fails(ModelError, "not_on_hub") as caught:
        resolve(REPO, "nothing", home)
    assert caught.value.exit_code == ModelError.exit_code


def test_the_error_for_an_unreachable_hub_names_its_address(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with fails(ModelError, "no_hub", match="http://127.0.0.1:9") as caught:
        resolve(REPO, None, tmp_path)
    assert caught.value.exit_code == EngineError.exit_code, "whoever starts it may do so again"


# --- what the model is


def test_a_repository_with_only_pickles_is_refused(hub: FakeHub, home: Path, repo: Path) -> None:
    for path in repo.glob("model*"):
        path.unlink()
    with fails(ModelError, "pickles", match="pytorch_model.bin"):
        opened(home / "cache")


def test_an_index_that_names_a_missing_file_is_refused(
    hub: FakeHub, home: Path, repo: Path
) -> None:
    next(repo.glob("model-00002*")).unlink()
    with fails(ModelError, "missing_file", match="model-00002-of-00003.safetensors"):
        opened(home / "cache")
    assert not hub.served


@pytest.mark.parametrize("name", ["../../evil.safetensors", "/etc/model.safetensors"])
def test_an_index_with_paths_outside_of_the_folder_is_refused(
    hub: FakeHub, home: Path, repo: Path, name: str
) -> None:
    index = {"weight_map": {"a": name}}
    (repo / "model.safetensors.index.json").write_text(json.dumps(index))
    with fails(ModelError, "missing_file"):
        opened(home / "cache")


def break_length(data: bytearray) -> None:
    data[0:8] = (1 << 40).to_bytes(8, "little")


def break_json(data: bytearray) -> None:
    data[8:10] = b"[["


def break_overlap(data: bytearray) -> None:
    place = data.index(b'"data_offsets": [0, ')
    data[place : place + 20] = b'"data_offsets": [8, '


def break_end(data: bytearray) -> None:
    del data[-5000:]


@pytest.mark.parametrize("spoil", [break_length, break_json, break_overlap, break_end])
def test_the_error_for_a_corrupt_header_names_the_file(
    hub: FakeHub, home: Path, repo: Path, spoil: Callable[[bytearray], None]
) -> None:
    path = next(repo.glob("model-00002*"))
    data = bytearray(path.read_bytes())
    spoil(data)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=path.name):
        opened(home / "cache")


# --- what is here already


def test_a_file_in_the_cache_of_hugging_face_is_used(hub: FakeHub, home: Path, repo: Path) -> None:
    whole = "model-00002-of-00003.safetensors"
    hf_hub_download(REPO, whole, revision=COMMIT)
    hub.served.clear()
    model = opened(home / "cache")
    model.fetch(model.tensors, nobody)
    assert (model.folder / whole).is_symlink()
    assert whole not in {served.file for served in hub.served}
    assert_right(model, model.tensors)


def test_a_complete_cache_is_enough_offline(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, cache = checkpoints.owned_by(0, 2), home / "cache"
    snapshot = resolve(REPO, "v1", cache)
    open_partial(REPO, snapshot.commit, cache, snapshot, SMALL).fetch(names, nobody)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = hub.requests.total()
    assert resolve(REPO, "v1", cache).commit == COMMIT
    model = opened(cache)
    assert model.fetch(names, nobody) == 0
    assert_right(model, names)
    with fails(ModelError, "hub_offline"):
        model.fetch(checkpoints.owned_by(1, 2), nobody)
    assert hub.requests.total() == before


def test_the_cache_of_hugging_face_is_enough_offline(
    hub: FakeHub, home: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in [*repo.glob("*.json"), *repo.glob("*.jinja"), *repo.glob("*.safetensors")]:
        hf_hub_download(REPO, path.name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = resolve(REPO, None, home / "cache")
    model = open_partial(REPO, snapshot.commit, home / "cache", snapshot)
    assert model.fetch(model.tensors, nobody) == 0
    assert_right(model, model.tensors)


def test_a_config_without_weights_is_not_enough_offline(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_hub_download(REPO, "config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = resolve(REPO, None, home / "cache")
    with fails(ModelError, "missing_file"):
        open_partial(REPO, snapshot.commit, home / "cache", snapshot)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("outgoing traffic has been disabled"), "partly in the cache"),
        (
            EntryNotFoundError("404 Client Error.\n\nEntry Not Found for url"),
            "lacks a required file",
        ),
        (HFValidationError("Repo id must be in the form"), "OWNER/NAME"),
        (OfflineModeIsEnabled("Cannot reach the hub: offline mode is enabled"), "HF_HUB_OFFLINE"),
    ],
)
def test_errors_of_the_hub_library_are_explained_in_one_line(error: Any, words: str) -> None:
    text = str(explain(error, REPO))
    assert words in text
    assert str(error) not in text
    assert "\n" not in text


def test_an_empty_cache_is_an_error_offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with fails(ModelError, "hub_offline"):
        resolve(REPO, None, home / "cache")


def test_the_cache_is_used_while_the_hub_is_down(hub: FakeHub, home: Path) -> None:
    resolve(REPO, None, home / "cache")
    opened(home / "cache")
    hub.faults.busy_api = 100
    assert resolve(REPO, None, home / "cache").commit == COMMIT


def test_an_error_is_raised_at_once_without_name_resolution(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It tried four times, with a line of the log for each wait."""
    asked = []

    def no_name(*address: Any, **_: Any) -> None:
        asked.append(address[0])
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with fails(HubError, "no_hub") as raised:
        resolve(REPO, None, home / "cache")
    assert "\n" not in str(raised.value)
    assert len(asked) == 1
    assert "event=hub_retry" not in caplog.text


def test_the_cache_is_used_without_name_resolution(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(REPO, None, home / "cache")
    opened(home / "cache")

    def no_name(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    assert resolve(REPO, None, home / "cache").commit == COMMIT


# --- kills and company

PROGRAM = """
import sys
from pathlib import Path
from serve.hub.fetch import Sizes
from serve.hub.partial import open_partial
cache, repo, commit, *names = sys.argv[1:]
sizes = Sizes(request_bytes=300_000, sync_bytes=50_000, num_connections=4)
model = open_partial(repo, commit, Path(cache), sizes=sizes)
print(model.fetch(names, lambda done, total: None), flush=True)
"""


def start(hub: FakeHub, home: Path, names: Iterable[str]) -> "subprocess.Popen[str]":
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PATH": ""}
    command = [sys.executable, "-c", PROGRAM, str(home / "cache"), REPO, COMMIT, *names]
    root = Path(__file__).parent.parent.parent
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": str(root)},
    )


def finish(process: "subprocess.Popen[str]") -> int:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return int(output)


def kill_when(hub: FakeHub, process: "subprocess.Popen[str]", num_bytes: int) -> bool:
    """Whether it was killed before it was done. The hub waits if the kill comes late."""
    hub.faults.silent_after = num_bytes + 100_000
    while process.poll() is None:
        if hub.num_sent() >= num_bytes:
            process.kill()
        time.sleep(0.001)
    process.communicate(timeout=60)
    hub.speak()
    hub.wait_until_left()
    return process.returncode != 0


def kill_and_go_on(hub: FakeHub, home: Path, repo: Path, shares: Iterable[float]) -> None:
    """Kills one process after another and checks each: nothing that was recorded is
    asked for again, and no more than was under way is lost."""
    names, headers = checkpoints.owned_by(1, 2), checkpoints.header_sizes(repo)
    owned, num_killed = owned_bytes(names), 0
    hub.faults.delay_seconds = 0.002
    for share in shares:
        hub.served.clear()
        model = opened(home / "cache") if (home / "cache").exists() else None
        recorded = {s.path.name: s.present() for s in model._shards.values()} if model else {}
        num_killed += kill_when(hub, start(hub, home, names), int(share * owned))
        for served in hub.served:
            for first, last in recorded.get(served.file, []):
                assert served.end <= first or served.start >= last
    hub.served.clear()
    hub.faults.delay_seconds = 0
    missing = missing_bytes(opened(home / "cache"), names)
    assert finish(start(hub, home, names)) == hub.data_bytes(headers) <= 1.01 * missing
    assert_right(opened(home / "cache"), names)
    assert num_killed


def test_a_fetch_that_is_killed_continues_after_a_restart(
    hub: FakeHub, home: Path, repo: Path
) -> None:
    kill_and_go_on(hub, home, repo, (0.2, 0.35))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_fetch_that_is_killed_at_random_points_continues(
    hub: FakeHub, home: Path, repo: Path, seed: int
) -> None:
    digest = hashlib.sha256(b"%d" % seed).digest()
    kill_and_go_on(hub, home, repo, [byte / 600 for byte in digest[:6]])


def test_a_killed_fetch_loses_only_bytes_in_transit(hub: FakeHub, home: Path, repo: Path) -> None:
    names = checkpoints.owned_by(1, 2)
    opened(home / "cache")
    hub.served.clear()
    hub.faults.delay_seconds = 0.004
    assert kill_when(hub, start(hub, home, names), owned_bytes(names) // 2)
    sent = hub.data_bytes(checkpoints.header_sizes(repo))
    missing = missing_bytes(opened(home / "cache"), names)
    # Per connection one commit and what the sockets between here and there hold.
    assert owned_bytes(names) - missing >= sent - 4 * (SMALL.sync_bytes + 262_144 + 65_536)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_two_processes_that_fetch_together_fetch_each_byte_once(
    hub: FakeHub, home: Path, repo: Path, num_shards: int
) -> None:
    for path in repo.iterdir():
        path.unlink()
    checkpoints.write(repo, num_shards)
    hub.faults.delay_seconds = 0.001
    names = list(checkpoints.tensors())
    processes = [start(hub, home, part) for part in (names, names[::-1])]
    fetched = [finish(process) for process in processes]
    assert sum(fetched) == owned_bytes(names)
    assert hub.data_bytes(checkpoints.header_sizes(repo)) == owned_bytes(names)
    assert sum(s.start == 0 for s in hub.served if s.file.endswith(".safetensors")) == num_shards
    assert_right(opened(home / "cache"), names)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"short")])
def test_a_lost_weight_file_is_fetched_again(
    hub: FakeHub, home: Path, spoil: Callable[[Path], object]
) -> None:
    model = opened(home / "cache")
    model.fetch(["model.norm"], nobody)
    path = model.tensors["model.norm"].file
    spoil(path)
    again = opened(home / "cache")
    assert missing_bytes(again, ["model.norm"]) == 384
    again.fetch(["model.norm"], nobody)
    assert_right(again, ["model.norm"])


def test_headers_equal_those_of_the_whole_files(hub: FakeHub, home: Path, repo: Path) -> None:
    model = opened(home / "cache")
    for path in repo.glob("*.safetensors"):
        theirs = {name: (t.start, t.end) for name, t in read_header(path).items()}
        mine = {name: (t.start, t.end) for name, t in read_header(model.folder / path.name).items()}
        assert mine == theirs


def test_a_journal_never_lists_bytes_that_are_not_on_the_disk(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut it would claim bytes that are zeros, and no checksum would show that."""
    synced: list[int] = []

    def noting_sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(partial, "_NUM_HEADER_CONNECTIONS", 1)
    for module in (partial, fetch, journal):
        monkeypatch.setattr(module, "full_sync", noting_sync)
    model = opened(home / "cache", replace(SMALL, num_connections=1))
    model.fetch(model.tensors, nobody)
    kinds = {path.stat().st_ino: path.suffix for path in (home / "cache").rglob("*.*")}
    pairs = list(zip(synced[::2], synced[1::2], strict=True))
    assert len(pairs) > 3
    found = {(kinds[data], kinds[record]) for data, record in pairs}
    assert found == {(".safetensors", ".journal")}
