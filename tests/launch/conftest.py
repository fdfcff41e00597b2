"""One ssh server for all tests of hosts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.sshd import Sshd, running_sshd, why_not
from tests.test_launcher import wait_until


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    if reason := why_not():
        pytest.skip(reason)
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def sshd(ssh_server: Sshd) -> Iterator[Sshd]:
    """With a quiet profile; a test may write into it."""
    yield ssh_server
    ssh_server.profile.write_text("")
    # Agents of a launcher that was killed may need a moment. MLX keeps a folder of its own there.
    wait_until(lambda: not list(ssh_server.temporary.glob("brigade-*")))


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    file = tmp_path / "hosts.json"
    file.write_text(
        '[{"ssh": "127.0.0.2", "ips": ["127.0.0.2"]}, {"ssh": "127.0.0.3", "ips": ["127.0.0.3"]}]'
    )
    return file
