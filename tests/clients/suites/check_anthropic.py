"""anthropic for Python, where it does more than send and read: models, tools that it runs,
asynchronous streams. What is under those is tested in tests/cluster."""

from typing import Literal

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """Closed: a grammar allows what a schema does, and a small model then never ends."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Rome", "Oslo", "Lima"]
    is_large: bool


ASKED = [{"role": "user", "content": "Name a city."}]


def test_an_answer_is_parsed_into_a_pydantic_model() -> None:
    with anthropic.Anthropic() as client:
        reply = client.messages.parse(
            model="tiny-chat", max_tokens=100, messages=ASKED, output_format=City
        )
    assert isinstance(reply.parsed_output, City)


def test_tools_are_run_and_their_results_sent_back() -> None:
    """As betas are asked for: ?beta=true and a header. No server-held threads: they are refused."""
    asked = []

    @beta_tool
    def is_open(day: Literal["Monday", "Sunday"]) -> str:
        """Whether the shop is open."""
        asked.append(day)
        return "It is."

    with anthropic.Anthropic() as client:
        runner = client.beta.messages.tool_runner(
            model="tiny-chat",
            max_tokens=60,
            messages=[{"role": "user", "content": "Is the shop open?"}],
            tools=[is_open],
            tool_choice={"type": "tool", "name": "is_open"},
            max_iterations=2,
            thread=False,
        )
        replies = list(runner)
    assert [reply.stop_reason for reply in replies] == ["tool_use", "tool_use"]
    assert asked
    assert set(asked) <= {"Monday", "Sunday"}


async def test_an_asynchronous_stream_adds_up_to_its_message() -> None:
    async with anthropic.AsyncAnthropic() as client:
        fields = {"model": "tiny-chat", "max_tokens": 20, "messages": ASKED}
        async with client.messages.stream(**fields) as stream:
            pieces = [text async for text in stream.text_stream]
            whole = await stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text
    assert whole.usage.output_tokens
