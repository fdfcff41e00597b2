"""LiteLLM, as somebody who has its OpenAI provider pointed at Brigade would use it."""

import os

import litellm
import pytest

MODEL = {"model": "openai/tiny-chat", "api_base": os.environ["OPENAI_BASE_URL"]}
SAID = [{"role": "user", "content": "Say the alphabet."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}


def test_a_stream_adds_up_to_the_reply() -> None:
    fields = {**MODEL, "messages": SAID, "temperature": 0, "max_tokens": 30}
    reply = litellm.completion(**fields)
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert reply.choices[0].message.content.startswith("a, b, c")
    assert whole.choices[0].message.content == reply.choices[0].message.content
    assert whole.usage.completion_tokens == reply.usage.completion_tokens


async def test_an_asynchronous_reply_ends_at_max_tokens() -> None:
    reply = await litellm.acompletion(**MODEL, messages=SAID, temperature=0, max_tokens=5)
    assert reply.choices[0].finish_reason == "length"


def test_a_required_tool_is_called() -> None:
    reply = litellm.completion(
        **MODEL, messages=SAID, tools=[WEATHER], tool_choice="required", max_tokens=100
    )
    call = reply.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert any(city in call.function.arguments for city in ("Rome", "Oslo"))


def test_a_text_completion_has_logprobs() -> None:
    reply = litellm.text_completion(
        model="text-completion-openai/tiny-chat",
        api_base=MODEL["api_base"],
        prompt="the cat sat",
        max_tokens=4,
        logprobs=1,
    )
    assert 1 <= len(reply.choices[0].logprobs.tokens) <= 4


def test_litellm_raises_its_own_class_for_each_error() -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/absent", api_base=MODEL["api_base"], messages=SAID)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**MODEL, messages=SAID, top_p=7)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**MODEL, messages=[{"role": "user", "content": "word " * 9000}])
