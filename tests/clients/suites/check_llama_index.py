"""LlamaIndex's OpenAI-like model: chat, completions, streams, tools that are demanded."""

import os
from typing import Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

ALPHABET = [ChatMessage(role="user", content="Say the alphabet.")]


@pytest.fixture
def llm() -> OpenAILike:
    return OpenAILike(
        model="tiny-chat",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=60,
        temperature=0,
    )


def test_a_streamed_chat_equals_the_whole_chat(llm: OpenAILike) -> None:
    whole = llm.chat(ALPHABET).message.content
    assert whole.startswith("a, b, c")
    assert "".join(part.delta or "" for part in llm.stream_chat(ALPHABET)) == whole


async def test_an_asynchronous_stream_equals_the_whole_chat(llm: OpenAILike) -> None:
    stream = await llm.astream_chat(ALPHABET)
    text = "".join([part.delta or "" async for part in stream])
    assert text == (await llm.achat(ALPHABET)).message.content


def test_a_streamed_completion_ends_with_the_whole_text(llm: OpenAILike) -> None:
    llm.is_chat_model = False
    whole = llm.complete("the cat sat").text
    assert whole
    assert [part.text for part in llm.stream_complete("the cat sat")][-1] == whole


def test_a_required_tool_is_called(llm: OpenAILike) -> None:
    def paint(colour: Literal["red", "green"]) -> str:
        """Paints a wall. The choice is small, because the model is: it never ends a number."""
        return colour

    tools = [FunctionTool.from_defaults(paint)]
    reply = llm.chat_with_tools(tools, "Paint it red.", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(reply)[:1]
    assert call.tool_name == "paint"
    assert call.tool_kwargs["colour"] in ("red", "green")
