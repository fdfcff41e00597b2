"""A fake hub with a small model in several files, and huggingface_hub pointed at it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from serve.hub import access
from tests.hub import checkpoints
from tests.hub.server import FakeHub, running


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "repo", num_shards=3)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HF_HOME, without a token."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HOME", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(folder / "stored_tokens"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(access, "_FIRST_WAIT_SECONDS", 0.001)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def hub(repo: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(repo) as hub:
        point_at(hub, monkeypatch)
        yield hub


def point_at(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
