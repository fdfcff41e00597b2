"""One two-rank server for all tests that do not harm it, and the slow, obvious answers."""

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.servers import TINY_CHAT, Server, running


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with running(2) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def mlx_lm_answer() -> Callable[[str], str]:
    """mlx_lm.generate on the whole model, greedy."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(TINY_CHAT))

    def answer(question: str | list[dict], max_tokens: int = 48) -> str:
        messages = question
        if isinstance(question, str):
            messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens)

    return answer
