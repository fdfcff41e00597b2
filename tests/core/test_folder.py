"""Folders of processes that live, and of those that were killed."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from serve.core import folder

OWNER = (
    "from serve.core.folder import own_folder\n"
    "folder = own_folder()\nprint(folder.name, flush=True)\ninput()"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_folders_of_killed_processes_are_removed_and_no_other_folders(
    tmp_path: Path,
) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "1.safetensors").touch()
        with folder.own_folder() as ours:
            assert theirs.exists()
            other.send_signal(signal.SIGKILL)
            other.wait()
            with folder.own_folder():
                assert not theirs.exists()
                assert Path(ours).exists()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_process_is_making_is_not_removed(tmp_path: Path) -> None:
    new, old = tmp_path / "brigade-new-1", tmp_path / "brigade-new-2"
    new.mkdir()
    old.mkdir()
    os.utime(old, (0, time.time() - 3600))
    with folder.own_folder():
        assert new.exists()
        assert not old.exists(), "its maker was killed before it could lock it"


def test_removing_old_folders_follows_no_link_and_removes_no_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "brigade-own-link").symlink_to(kept)
    (tmp_path / "brigade-own-file").touch()
    with folder.own_folder():
        assert kept.exists()
        assert (tmp_path / "brigade-own-file").exists()


def test_a_folder_is_not_removed_by_processes_that_start_at_the_same_time(tmp_path: Path) -> None:
    lost: list[str] = []

    def start() -> None:
        for _ in range(40):
            with folder.own_folder() as name:
                (Path(name) / "a").touch()
                if not os.path.exists(name):
                    lost.append(name)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
    assert not list(tmp_path.iterdir())


def programs(folder: Path, script: str) -> str:
    """A PATH where tmutil, which only macOS has, is this script."""
    folder.mkdir()
    (folder / "tmutil").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "tmutil").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_new_folder_of_a_cache_is_left_out_of_the_backups_and_the_index_of_macos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, new, old = tmp_path / "log", tmp_path / "home" / "brigade", tmp_path / "old"
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", f'echo noise; echo "$@" >>{log}; exit 1'))
    old.mkdir()
    for made in (new, new, old):
        folder.make_cache_folder(made)
    assert log.read_text() == f"addexclusion {new}\n"
    assert [path.name for path in new.iterdir()] == [".metadata_never_index"]
    assert not list(old.iterdir()), "it is the user's, and may hold other files"


def test_a_new_folder_of_a_cache_is_empty_on_other_systems_than_macos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    folder.make_cache_folder(tmp_path / "home" / "brigade", 0o700)
    assert not list((tmp_path / "home" / "brigade").iterdir())
    assert (tmp_path / "home" / "brigade").stat().st_mode & 0o777 == 0o700


def test_full_sync_on_macos_reaches_the_disk_or_falls_back_to_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[int, int]] = []
    monkeypatch.setattr(folder, "_FULL_SYNC", 51)
    monkeypatch.setattr(folder.fcntl, "fcntl", lambda *asked: called.append(asked))
    monkeypatch.setattr(os, "fsync", lambda descriptor: called.append((descriptor, 0)))
    folder.full_sync(7)
    assert called == [(7, 51)]

    def refuse(*asked: int) -> None:
        raise OSError(45, "Operation not supported")

    monkeypatch.setattr(folder.fcntl, "fcntl", refuse)
    folder.full_sync(8)
    assert called[1:] == [(8, 0)], "a network file system"
