"""Fixtures of the front's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.front.text.tokens import Tokenizer
from tests.front.fakes import FakeEngine, Running, byte_level, save


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Running]:
    with Running(engine) as running:
        yield running


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Running]:
    """One server for all tests that change nothing about it or its engine."""
    with Running(FakeEngine(tokenizer)) as running:
        yield running


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
