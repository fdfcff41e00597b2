"""The model's own sampling parameters in every API; what a request says wins."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve.core.parameters import parameters
from serve.core.types import Sampling
from serve.front.api.anthropic.body import MessagesBody
from serve.front.api.chat import prepare
from serve.front.api.completions import prepare as prepare_completion
from serve.front.api.openai import ChatBody, CompletionBody, parse
from serve.front.api.responses.body import ResponsesBody
from serve.front.text.tokens import Tokenizer
from tests.front.fakes import byte_level, save

OWN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2}
SAID = [{"role": "user", "content": "hi"}]
CHOSEN = {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "min_p": 0.3, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(byte_level(), tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps({**OWN, "max_new_tokens": 7}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def chosen_fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in OWN}


def chat(tokenizer: Tokenizer, **fields: Any) -> Sampling:
    body = parse(ChatBody, {"model": "m", "messages": SAID, **fields})
    return body.request(tokenizer).samplings[0]


def test_sampling_defaults_of_the_model_are_used_in_every_api(tokenizer: Tokenizer) -> None:
    assert chosen_fields(chat(tokenizer)) == OWN
    completion = parse(CompletionBody, {"model": "m", "prompt": "hi"})
    completed = prepare_completion(completion, tokenizer, 200)
    assert chosen_fields(completed.prompts[0].samplings[0]) == OWN
    messages = parse(MessagesBody, {"model": "m", "max_tokens": 5, "messages": SAID})
    assert chosen_fields(messages.request(tokenizer).samplings[0]) == OWN
    response = parse(ResponsesBody, {"model": "m", "input": "hi"})
    assert chosen_fields(response.request(SAID, tokenizer).samplings[0]) == OWN


@pytest.mark.parametrize("name", parameters(Sampling))
def test_every_numeric_parameter_of_sampling_can_be_set_by_a_request(
    tokenizer: Tokenizer, name: str
) -> None:
    """A field of Sampling with a range needs no other line for that."""
    parameter = parameters(Sampling)[name]
    number = parameter.kind(parameter.range.max)
    assert getattr(chat(tokenizer, **{name: number}), name) == number


def test_parameters_of_a_request_override_sampling_defaults(tokenizer: Tokenizer) -> None:
    assert chosen_fields(chat(tokenizer, **CHOSEN)) == CHOSEN
    assert chat(tokenizer, top_k=-1).top_k == 0
    assert chat(tokenizer, temperature=0).temperature == 0


def test_answers_without_a_limit_get_the_default_limit_of_the_model(tokenizer: Tokenizer) -> None:
    for fields, expected in (({}, 7), ({"max_tokens": 20}, 20)):
        body = parse(ChatBody, {"model": "m", "messages": SAID, **fields})
        job = prepare(body.request(tokenizer), tokenizer, 200)
        assert job.prompts[0].max_tokens == expected


def test_sampling_defaults_of_the_model_can_be_turned_off(folder: Path) -> None:
    assert chosen_fields(chat(Tokenizer(folder, generation_config="none"))) == chosen_fields(
        Sampling(temperature=1.0, top_p=1.0)
    )
