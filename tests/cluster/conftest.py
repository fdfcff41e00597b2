"""One two-rank server for all tests that do not harm it, and the slow, obvious answers."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.servers import TINY_CHAT, Server, quick, running


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    # A thousand clients that come at once may take long to send their headers.
    with running(2, quick(header_timeout=60)) as running_server:
        yield running_server


@pytest.fixture(scope="package")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks: the embedded one, whose marks of calls are renamed, and whose template
    opens a thought. So what would be a call becomes reasoning."""
    folder = tmp_path_factory.mktemp("model") / "thinker"
    shutil.copytree(TINY_CHAT, folder)
    _replace(folder / "tokenizer.json", "tool_call>", "think>")
    template = folder / "chat_template.jinja"
    _replace(template, "tool_call>", "think>")
    _replace(template, "{{- '<|assistant|>' -}}", "{{- '<|assistant|><think>' -}}")
    return folder


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="package")
def thinker(thinking_model: Path) -> Iterator[Server]:
    """A two-rank server of the model that thinks. Tests may kill its engines."""
    with running(2, "--model", str(thinking_model), quick(max_restarts=1000)) as running_server:
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
