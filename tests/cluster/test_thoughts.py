"""A model that thinks, over two real ranks."""

import json
import re
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests import architectures
from tests.cluster.servers import Server, running
from tests.front.prefixes.test_boundaries import MARKS, REASONER, SYSTEM, TOOLS, asked, called
from tests.front.text.dialects import models

pytestmark = pytest.mark.long

ASKED = "What is 7 + 5?"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": SCHEMA | {"additionalProperties": False}},
}


def ask(server: Server, **fields: Any) -> Any:
    body: dict[str, Any] = {
        "model": "thinker",
        "messages": [{"role": "user", "content": ASKED}],
        "temperature": 0,
        "max_tokens": 200,
    }
    return server.client().chat.completions.create(**body | fields)


def test_reasoning_is_separate_from_the_answer(thinker: Server) -> None:
    message = ask(thinker).choices[0].message
    assert len(message.reasoning_content) > 3
    assert "think>" not in message.reasoning_content + (message.content or "")
    deltas = [chunk.choices[0].delta for chunk in ask(thinker, stream=True) if chunk.choices]
    streamed = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(streamed) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    silent = ask(thinker, extra_body={"include_reasoning": False}).choices[0].message
    assert silent.reasoning_content is None
    assert silent.content == message.content


def test_a_grammar_begins_after_the_end_of_reasoning(thinker: Server) -> None:
    """The reasoning is the same as without a grammar. This model would end its answer with it."""
    thought = ask(thinker).choices[0].message.reasoning_content
    outputs = {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{3}"}}
    choice = ask(thinker, extra_body=outputs).choices[0]
    assert choice.message.reasoning_content == thought
    assert re.fullmatch("[0-9]{3}-[0-9]{3}", choice.message.content)
    called = ask(thinker, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    message = called.choices[0].message
    assert message.reasoning_content
    assert [call.function.name for call in message.tool_calls] == ["add"]


def test_responses_and_messages_return_the_same_reasoning(thinker: Server) -> None:
    thought = ask(thinker).choices[0].message.reasoning_content
    items = thinker.client().responses.create(model="thinker", input=ASKED, temperature=0).output
    assert (items[0].type, items[0].content[0].text) == ("reasoning", thought)
    said = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 200, "temperature": 0}
    url = f"{thinker.url}/v1/messages"
    blocks = httpx2.post(url, json={"model": "thinker", **said}, timeout=60).json()["content"]
    assert (blocks[0]["type"], blocks[0]["thinking"]) == ("thinking", thought)


def test_messages_obey_thinking_budgets_and_count_thinking_tokens(thinker: Server) -> None:
    """Over two ranks, in the words of Anthropic's client."""
    fields: Any = {"model": "thinker", "messages": [{"role": "user", "content": ASKED}]}
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as ai:

        def ask_for(thinking: Any) -> Any:
            return ai.beta.messages.create(**fields, max_tokens=200, thinking=thinking)

        limited = ask_for({"type": "enabled", "budget_tokens": 3})
        assert limited.usage.output_tokens_details.thinking_tokens == 3
        assert limited.content[0].type == "thinking"
        omitted = ask_for({"type": "enabled", "budget_tokens": 3, "display": "omitted"})
        assert (omitted.content[0].type, omitted.content[0].thinking) == ("thinking", "")
        assert omitted.usage.output_tokens_details.thinking_tokens == 3
        disabled = ask_for({"type": "disabled"})
        assert disabled.usage.output_tokens_details.thinking_tokens == 0
        assert "thinking" not in {block.type for block in disabled.content}


# --- a tool loop

NUM_TURNS = 20


def save_reasoner(folder: Path, name: str, patch: pytest.MonkeyPatch) -> Path:
    """Writes a tiny random model of an architecture. Its template leaves out earlier thoughts."""
    patch.setitem(models.MODELS, "reasoner", (REASONER, MARKS, {}))
    patch.setitem(architectures.WORDS, "vocab_size", 512)
    patch.setitem(architectures.WORDS, "max_position_embeddings", 1 << 15)
    models.save("reasoner", folder)
    weights = dict(tree_flatten(architectures.build(name).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(architectures.config_of(name)))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next"])
def test_hardly_any_token_is_computed_twice_in_twenty_turns_with_tools(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends calls and their results, and no thoughts."""
    model = save_reasoner(tmp_path / name, name, monkeypatch)
    messages: list[dict[str, Any]] = [SYSTEM, asked(0)]
    num_computed = 0
    with running(2, "--model", str(model)) as server:
        create: Any = server.client().chat.completions.create
        for turn in range(NUM_TURNS):
            reply = create(model=name, messages=messages, tools=TOOLS, max_tokens=40, seed=turn)
            cached = reply.usage.prompt_tokens_details.cached_tokens or 0
            num_computed += reply.usage.prompt_tokens - cached
            messages += called(turn)
            if turn in (7, 14):
                messages += [{"role": "assistant", "content": "Done."}, asked(turn)]
    num_tokens = reply.usage.prompt_tokens
    assert num_tokens > 19_000
    print(f"{name}: {num_computed} computed, {num_tokens} tokens")
    assert num_computed <= 1.15 * num_tokens
