"""Where the next prompt of a chat begins to differ, by templates that rewrite history."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.core.errors import RequestError
from serve.core.types import Sampling, Sequence
from serve.front.api.chat import prepare
from serve.front.api.openai import ChatBody, parse
from serve.front.api.request import ChatPrompt
from serve.front.pipeline.interface import Prompt
from serve.front.prefixes.tree import common_length
from serve.front.text.tokens import Tokenizer
from tests.errors import fails
from tests.front.pipeline.simulation import Pipeline
from tests.front.text.dialects import models

# Like Qwen3's: thoughts are shown only after the last question, and a prompt opens one.
REASONER = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
MARKS = ["<|im_end|>", "<|im_start|>", *models.THINK, *models.TOOL_MARKS]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "read", "description": "word " * 40, "parameters": {"type": "object"}},
    }
]
SYSTEM = {"role": "system", "content": "You are a careful agent. " * 20}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, "reasoner", (REASONER, MARKS, {"model_type": "qwen3"}))
        yield Tokenizer(models.save("reasoner", tmp_path_factory.mktemp("model")))


def prepared(tokenizer: Tokenizer, messages: list[dict[str, Any]], **fields: Any) -> Prompt:
    body = {"model": "m", "messages": messages, "tools": TOOLS, **fields}
    request = parse(ChatBody, body).request(tokenizer)
    (prompt,) = prepare(request, tokenizer, 100_000, finds_boundaries=True).prompts
    return prompt


def asked(number: int, length: int = 30) -> dict[str, Any]:
    return {"role": "user", "content": f"Question {number}: " + "please " * length}


def called(number: int, thought: str | None = None) -> list[dict[str, Any]]:
    """A call and its result, of about 900 tokens. Most clients do not send thoughts back."""
    function = {"name": "read", "arguments": f'{{"path": "{number}"}}'}
    call = {"role": "assistant", "tool_calls": [{"id": f"c{number:08}", "function": function}]}
    if thought:
        call["reasoning_content"] = thought
    lines = "".join(f"line {i} of file {number}\n" for i in range(50))
    return [call, {"role": "tool", "tool_call_id": f"c{number:08}", "content": lines}]


def test_boundaries_of_a_prompt_are_where_later_prompts_differ(tokenizer: Tokenizer) -> None:
    """After system prompt and tools, and before the mark that opens a thought."""
    messages = [SYSTEM, asked(1)]
    prompt = prepared(tokenizer, messages)
    answer = {"role": "assistant", "content": "An answer."}
    next_turn = prepared(tokenizer, [*messages, answer, asked(2)])
    other_chat = prepared(tokenizer, [SYSTEM, asked(3)])
    in_common = [common_length(prompt.ids, other.ids) for other in (other_chat, next_turn)]
    num_alike = len(tokenizer.encode("Question "))  # Another question begins with the same word.
    assert prompt.boundaries == (in_common[0] - num_alike, in_common[1])
    assert tokenizer.decode(prompt.ids[in_common[1] :], False) == "<think>\n"


def test_a_prompt_that_ends_with_a_tool_result_has_two_boundaries(
    tokenizer: Tokenizer,
) -> None:
    """A question removes the reasoning before it; another call leaves it."""
    messages = [SYSTEM, asked(1), *called(1, "I read it."), *called(2, "And this.")]
    prompt = prepared(tokenizer, messages)
    answer = {"role": "assistant", "content": "An answer."}
    with_question = prepared(tokenizer, [*messages, answer, asked(2)])
    with_call = prepared(tokenizer, [*messages, *called(3)])
    expected = {common_length(prompt.ids, other.ids) for other in (with_question, with_call)}
    assert len(expected) == 2
    assert expected < set(prompt.boundaries)


def test_a_chat_without_messages_can_only_be_continued_by_a_question() -> None:
    later = [prompt.messages[-1]["role"] for prompt in ChatPrompt([]).later()]
    assert later == ["user"]


def test_boundaries_are_not_computed_if_they_are_not_needed(tokenizer: Tokenizer) -> None:
    """In short prompts, and where the prompt is cut or stays open."""
    messages = [SYSTEM, asked(1)]
    assert not prepared(tokenizer, [{"role": "user", "content": "Hi"}], tools=None).boundaries
    assert not prepared(tokenizer, messages, truncate_prompt_tokens=100).boundaries
    body = {"model": "m", "messages": messages}
    request = parse(ChatBody, body).request(tokenizer)
    (prompt,) = prepare(request, tokenizer, 100_000).prompts
    assert not prompt.boundaries


def test_boundaries_are_not_computed_for_a_prompt_that_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would cost as much as the prompt itself."""
    rendered: list[ChatPrompt] = []
    render = ChatPrompt.render

    def counting(prompt: ChatPrompt, tokenizer: Tokenizer) -> str:
        rendered.append(prompt)
        return render(prompt, tokenizer)

    monkeypatch.setattr(ChatPrompt, "render", counting)
    body = {"model": "m", "messages": [SYSTEM, asked(1)]}
    request = parse(ChatBody, body).request(tokenizer)
    (prompt,) = prepare(request, tokenizer, 100_000, finds_boundaries=True).prompts
    assert len(rendered) == 3
    with fails(RequestError, "context_length_exceeded"):
        prepare(request, tokenizer, len(prompt.ids) - 1, finds_boundaries=True)
    assert len(rendered) == 4


@pytest.mark.parametrize("sends_thoughts", [False, True])
def test_hardly_any_token_is_computed_twice_in_twenty_turns_with_tools(
    tokenizer: Tokenizer, sends_thoughts: bool
) -> None:
    """Twenty turns. Questions come in between where they do not take away thoughts that the client
    has sent: the calls behind these have to be computed again."""
    pipeline = Pipeline(2, prefill_chunk=512)
    pipeline.scheduler.reuse = "checkpoints"
    messages: list[dict[str, Any]] = [SYSTEM, asked(0)]
    num_computed = 0
    for turn in range(20):
        prompt = prepared(tokenizer, messages)
        sequence = Sequence(turn, prompt.ids, 60, Sampling(temperature=0), frozenset())
        pipeline.boundaries[turn] = prompt.boundaries
        pipeline.add(sequence)
        pipeline.run()
        num_computed += len(prompt.ids) - sequence.num_cached
        messages += called(turn, "I should read this. " * 5 if sends_thoughts else None)
        if turn in (7, 14) and not sends_thoughts:
            messages += [{"role": "assistant", "content": "Done."}, asked(turn)]
    assert len(prompt.ids) > 19_000
    assert num_computed <= 1.15 * len(prompt.ids)


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_every_family_of_models_has_a_boundary_where_the_next_turn_differs(
    name: str, tmp_path: Path
) -> None:
    """Each template shares a long prefix with the next turn, and a boundary is at its end."""
    tokenizer = Tokenizer(models.save(name, tmp_path))
    messages = [asked(1, 60)]
    prompt = prepared(tokenizer, messages, tools=None)
    answer = {"role": "assistant", "content": "An answer."}
    next_turn = prepared(tokenizer, [*messages, answer, asked(2)], tools=None)
    num_common = common_length(prompt.ids, next_turn.ids)
    end = len(prompt.ids) - 1
    assert num_common > 0.9 * end
    assert min(num_common, end) in (*prompt.boundaries, end)
