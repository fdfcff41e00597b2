"""What engines leave to each other."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from serve.parent import engine


def test_copies_of_a_process_that_was_killed_go_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(engine, "_NEW_SECONDS", 0.0)
    code = (
        "from serve.parent.engine import copies_folder\n"
        "folder = copies_folder()\nprint(folder.name, flush=True)\ninput()"
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
        with engine.copies_folder() as ours:
            assert theirs.exists()
            other.send_signal(signal.SIGKILL)
            other.wait()
            with engine.copies_folder():
                assert not theirs.exists()
                assert Path(ours).exists()
    assert not list(tmp_path.iterdir())


def test_a_new_folder_is_somebodys_though_it_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    new = tmp_path / "brigade-copies-1"
    new.mkdir()
    with engine.copies_folder():
        assert new.exists()
