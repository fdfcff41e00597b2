"""Fixtures of the agents' tests."""

from collections.abc import Callable, Iterator

import pytest

from serve.front.text.tokens import Tokenizer
from tests.agents.played import MAX_CONTEXT, Call, PlayedEngine, save_model
from tests.front.fakes import Running

TITLE = '{"title":"Done."}'


@pytest.fixture(scope="session")
def played_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_model(tmp_path_factory.mktemp("played")))


@pytest.fixture(scope="module")
def front(played_tokenizer: Tokenizer) -> Iterator[Running]:
    """A server that answers with the same short text, or with a title or a call where a grammar
    demands one."""

    call = Call("write_file", {"path": "a", "content": "b"})
    texts = "Done.", TITLE, *call.forms()

    def play(prompt: str, is_allowed: Callable[[str], bool]) -> str:
        return next(filter(is_allowed, texts))

    with Running(PlayedEngine(played_tokenizer, play), max_context=MAX_CONTEXT) as running:
        yield running
