"""`scripts/fresh` refuses what it cannot do; the whole run needs root and a package mirror."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def fresh(*words: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "check"), "--fresh", *words]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_an_unknown_debian_release_is_refused() -> None:
    run = fresh("sid")
    assert run.returncode == 2
    assert run.stderr == ("scripts/fresh: no Debian is called 'sid' here; use bookworm or trixie\n")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who alone gets that far")
def test_without_mmdebstrap_the_script_is_skipped_with_the_reason(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "id"):
        program = shutil.which(name)
        assert program
        (tmp_path / name).symlink_to(program)
    (tmp_path / "env").symlink_to("/usr/bin/env")
    run = fresh("trixie", path=str(tmp_path))
    assert run.returncode == 0
    assert "skipped: mmdebstrap is missing" in run.stderr
