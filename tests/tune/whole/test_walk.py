"""The walk of docs/fine-tuning.md, every command as it is written there but for the port."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.servers import BIN, ROOT
from tests.ports import free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]

MAX_SECONDS = 300


def commands() -> list[str]:
    text = (ROOT / "docs" / "fine-tuning.md").read_text()
    walk = text.split("\n## ")[1]
    return re.findall(r"^```sh\n(.*?)^```", walk, re.M | re.S)


@pytest.mark.timeout(MAX_SECONDS + 60)
def test_commands_of_the_guide_train_an_adapter_and_load_it_into_a_server(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (port,) = free_ports(1)
    script = "set -euo pipefail\n" + "".join(commands()).replace("8080", str(port))
    began = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        # Ends when the server that it has started has ended too: both write there.
        said, _ = process.communicate(timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
        pytest.fail(f"longer than {MAX_SECONDS} s:\n{said}")
    assert process.returncode == 0, said
    assert time.monotonic() - began < MAX_SECONDS
    for done in ("added", "replaced"):
        assert said.count(f"Success: LoRA adapter 'friend' {done} successfully.") == 1, said
    answers = re.findall(r'"content": ?"([^"]*)"', said)
    walk = (ROOT / "docs" / "fine-tuning.md").read_text()
    assert answers == re.findall(r"^ask .*# (.*)$", walk, re.M)
    assert answers[1:] == ["It is 12, friend.", "It is 12, king."]
    for name in ("best/adapters.safetensors", "README.md", "curves.svg", "schedule.svg"):
        assert (tmp_path / "adapters" / "friend" / name).exists(), name
    assert (tmp_path / "adapters" / "second" / "friend" / "peft").is_dir()
