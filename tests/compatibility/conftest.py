"""One server for all requests of this folder."""

from collections.abc import Iterator

import httpx2
import pytest

from serve.front.text.tokens import Tokenizer
from tests.agents.played import MAX_CONTEXT, PlayedEngine, save_model
from tests.compatibility.asking import ANSWER, Server
from tests.front.fakes import Running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tokenizer = Tokenizer(save_model(tmp_path_factory.mktemp("played")))
    engine = PlayedEngine(tokenizer, lambda *_: ANSWER, "tiny")
    with (
        Running(engine, max_context=MAX_CONTEXT) as running,
        # Making a client takes longer than a request, so all requests share one.
        httpx2.Client(base_url=running.url) as client,
    ):
        yield Server(engine, client)
