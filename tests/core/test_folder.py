"""Folders of processes that live, and of those that were killed."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from serve.core import folder


def test_the_folder_of_a_process_that_was_killed_goes_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folder, "_NEW_SECONDS", 0.0)
    code = (
        "from serve.core.folder import own_folder\n"
        "folder = own_folder()\nprint(folder.name, flush=True)\ninput()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
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


def test_a_new_folder_is_somebodys_though_it_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    new = tmp_path / "brigade-own-1"
    new.mkdir()
    with folder.own_folder():
        assert new.exists()
