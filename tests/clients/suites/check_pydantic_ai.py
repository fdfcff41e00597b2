"""pydantic-ai: an agent with text, with native and with tool output, streamed and not."""

import os
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0.0, "max_tokens": 100}


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Rome", "Oslo", "Lima"]


@pytest.fixture
def model() -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
    return OpenAIChatModel("tiny-chat", provider=provider, settings=SETTINGS)


async def test_a_streamed_text_equals_the_whole_text(model: OpenAIChatModel) -> None:
    agent = Agent(model)
    whole = (await agent.run("Say the alphabet.")).output
    assert whole.startswith("a, b, c")
    async with agent.run_stream("Say the alphabet.") as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)]) == whole


@pytest.mark.parametrize("kind", [NativeOutput, ToolOutput])
async def test_an_answer_is_parsed_into_a_pydantic_model(
    model: OpenAIChatModel, kind: type
) -> None:
    agent = Agent(model, output_type=kind(City))
    assert isinstance((await agent.run("Name a city.")).output, City)


async def test_a_history_is_part_of_the_next_prompt(model: OpenAIChatModel) -> None:
    agent = Agent(model)
    first = await agent.run("Hello!")
    second = await agent.run("Say the alphabet.", message_history=first.all_messages())
    assert second.usage.input_tokens > first.usage.input_tokens
