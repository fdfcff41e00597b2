"""Fixtures of the front's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.front.tokens import Tokenizer
from tests.front.fakes import FakeEngine, Running, byte_level, save


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return Tokenizer(save(byte_level(), folder))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Running]:
    with Running(engine) as running:
        yield running


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
