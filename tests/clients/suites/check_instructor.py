"""instructor: answers as pydantic models, in each of its modes that OpenAI's API has."""

from typing import Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """Closed: a grammar allows what a schema does, and a small model then never ends."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Rome", "Oslo", "Lima"]
    is_large: bool


# Mode.JSON asks for any JSON object and hopes: this model is too small for hope.
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_parsed_into_a_pydantic_model(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(), mode=mode)
    fields = {"model": "tiny-chat", "response_model": City, "max_retries": 1}
    messages = [{"role": "user", "content": "Name a city."}]
    city = client.chat.completions.create(**fields, messages=messages, max_tokens=100)
    assert city.name in ("Rome", "Oslo", "Lima")


def test_a_partial_answer_grows_into_a_valid_model() -> None:
    client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.TOOLS)
    messages = [{"role": "user", "content": "Name a city."}]
    *_, city = client.chat.completions.create_partial(
        model="tiny-chat", response_model=City, messages=messages, max_tokens=100
    )
    assert City.model_validate(city.model_dump())


async def test_the_asynchronous_client_parses_an_answer() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(), mode=instructor.Mode.TOOLS)
    messages = [{"role": "user", "content": "Name a city."}]
    city = await client.chat.completions.create(
        model="tiny-chat", response_model=City, messages=messages, max_tokens=100
    )
    assert isinstance(city, City)
