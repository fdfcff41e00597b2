"""The endpoints over real sockets, also with the official client."""

import json

import httpx
import openai
import pytest

from tests.front.fakes import FakeEngine, Running

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10)


def post(server: Running, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={**HELLO, **fields}, timeout=10)


def test_a_reply_has_text_and_usage(server: Running, engine: FakeEngine) -> None:
    with client(server) as ai:
        reply = ai.chat.completions.create(**HELLO)  # type: ignore[call-overload]
    assert reply.choices[0].message.content == engine.answer
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    num_tokens = len(engine.tokenizer.encode(engine.answer)) + 1
    assert reply.usage.completion_tokens == num_tokens
    assert reply.usage.prompt_tokens == len(engine.prompts[0])
    assert reply.usage.total_tokens == len(engine.prompts[0]) + num_tokens


def test_a_stream_adds_up_to_the_reply(server: Running, engine: FakeEngine) -> None:
    with client(server) as ai:
        options = {"include_usage": True}
        chunks = list(
            ai.chat.completions.create(**HELLO, stream=True, stream_options=options)  # type: ignore[call-overload]
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == engine.answer
    assert len([text for text in texts if text]) > 3
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == len(engine.prompts[0])
    assert len({chunk.id for chunk in chunks}) == 1
