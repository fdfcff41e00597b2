"""From messages to a prompt that fits, with the parameters of the request."""

from typing import Any

import pytest

from serve.core.errors import RequestError
from serve.core.types import Sampling
from serve.front.api.chat import prepare
from serve.front.api.openai import ChatBody, parse
from serve.front.output.answer import Job
from serve.front.output.splitter import Splitter
from serve.front.pipeline.interface import Prompt
from serve.front.text.dialects.interface import Dialect, ReasoningFormat
from serve.front.text.grammars import of_schema
from serve.front.text.tokens import Tokenizer
from tests.errors import fails


def job(tokenizer: Tokenizer, max_context: int, content: str = "hi", **fields: Any) -> Job:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return prepare(parse(ChatBody, body).request(tokenizer), tokenizer, max_context)


def prepared(tokenizer: Tokenizer, max_context: int, content: str = "hi", **fields: Any) -> Prompt:
    (prompt,) = job(tokenizer, max_context, content, **fields).prompts
    return prompt


def test_an_answer_without_a_limit_may_fill_the_context(tokenizer: Tokenizer) -> None:
    prompt = prepared(tokenizer, 200)
    assert prompt.ids == tokenizer.encode("<|user|>hi<|assistant|>")
    assert prompt.max_tokens == 200 - len(prompt.ids)


@pytest.mark.parametrize(
    "content", ["how are you", [{"type": "text", "text": "how are you"}]], ids=["text", "parts"]
)
def test_the_prediction_of_a_request_is_encoded(tokenizer: Tokenizer, content: Any) -> None:
    prompt = prepared(tokenizer, 200, prediction={"type": "content", "content": content})
    assert prompt.prediction == tuple(tokenizer.encode("how are you"))
    assert prepared(tokenizer, 200).prediction == ()


@pytest.mark.parametrize("prediction", ["x", {"content": "x"}, {"type": "content", "content": 5}])
def test_an_invalid_prediction_is_refused(tokenizer: Tokenizer, prediction: Any) -> None:
    with pytest.raises(RequestError) as caught:
        prepared(tokenizer, 200, prediction=prediction)
    assert (caught.value.param or "").startswith("prediction")


def test_a_prompt_must_leave_room_for_one_token(tokenizer: Tokenizer) -> None:
    length = len(prepared(tokenizer, 200).ids)
    assert prepared(tokenizer, length + 1).max_tokens == 1
    with fails(
        RequestError, "context_length_exceeded", match=f"{length} tokens.* {length} "
    ) as caught:
        prepared(tokenizer, length)
    assert caught.value.code == "context_length_exceeded"


def test_a_limit_above_the_context_is_lowered_to_it(tokenizer: Tokenizer) -> None:
    length = len(prepared(tokenizer, 200).ids)
    assert prepared(tokenizer, 200, max_tokens=200 - length).max_tokens == 200 - length
    assert prepared(tokenizer, 200, max_tokens=32_000).max_tokens == 200 - length
    assert prepared(tokenizer, 200, max_tokens=-1).max_tokens == 200 - length


def test_a_prompt_far_too_long_is_refused_without_encoding_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "encode", lambda *_: pytest.fail("encoded"))
    with fails(RequestError, "context_length_exceeded", match="at least") as caught:
        prepared(tokenizer, 200, "hello " * 100_000)
    assert caught.value.code == "context_length_exceeded"


def test_a_chat_without_parameters_is_sampled_with_defaults_and_a_random_seed(
    tokenizer: Tokenizer,
) -> None:
    (first,), (second,) = (prepared(tokenizer, 200).samplings for _ in range(2))
    ends = tuple(sorted(tokenizer.eos_ids))
    assert first == Sampling(seed=first.seed, end_ids=ends)
    assert first.seed != second.seed
    (seeded,) = prepared(tokenizer, 200, seed=-5, temperature=0).samplings
    assert seeded.seed == -5


def test_every_sampling_parameter_of_a_chat_is_used(tokenizer: Tokenizer) -> None:
    prompt = prepared(
        tokenizer,
        200,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=-1,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "6": 1.5},
        allowed_token_ids=[5, 6, 7],
        min_tokens=3,
        stop_token_ids=[9],
        logprobs=True,
        top_logprobs=4,
        seed=8,
    )
    (sampling,) = prompt.samplings
    assert sampling == Sampling(
        temperature=0.5,
        top_p=0.25,
        seed=8,
        top_k=7,
        min_p=0.125,
        presence_penalty=-1,
        frequency_penalty=2,
        repetition_penalty=1.5,
        bias_ids=(5, 6),
        biases=(-100, 1.5),
        allowed_ids=(5, 6, 7),
        min_tokens=3,
        end_ids=tuple(sorted({9, *tokenizer.eos_ids})),
        logprobs=4,
    )
    assert prompt.end_ids == {9, *tokenizer.eos_ids}


def test_end_tokens_that_are_ignored_are_still_banned_before_min_tokens(
    tokenizer: Tokenizer,
) -> None:
    prompt = prepared(tokenizer, 200, ignore_eos=True, stop_token_ids=[9])
    assert prompt.end_ids == {9}
    assert set(prompt.samplings[0].end_ids) == {9, *tokenizer.eos_ids}


def test_bad_words_are_banned_at_the_start_and_after_a_space(tokenizer: Tokenizer) -> None:
    (sampling,) = prepared(tokenizer, 200, bad_words=["you", "two three"]).samplings
    plain, spaced = (tuple(tokenizer.encode(text)) for text in ("you", " you"))
    assert len(plain) == len(spaced), "the tokenizer cuts them differently"
    assert {plain, spaced} <= set(sampling.bad_words)


def test_each_choice_has_its_own_seed(tokenizer: Tokenizer) -> None:
    samplings = prepared(tokenizer, 200, n=3, seed=7).samplings
    assert [sampling.seed for sampling in samplings] == [7, 8, 9]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"400": 1}}, "logit_bias"),
        ({"stop_token_ids": [1, 2**31 - 1]}, "stop_token_ids"),
        ({"allowed_token_ids": [999_999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "min_tokens": 2}, "allowed_token_ids"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 200}, "min_tokens"),
    ],
)
def test_invalid_values_that_only_the_tokenizer_can_detect_are_refused(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        prepared(tokenizer, 200, **fields)
    assert caught.value.param == param


def test_a_final_message_of_the_assistant_can_be_continued(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello wor"}]
    open_ended = job(tokenizer, 200, messages=messages, continue_final_message=True)
    text = tokenizer.decode(open_ended.prompts[0].ids)
    assert text == "<|user|>hi<|assistant|>hello wor"
    assert open_ended.continues
    bare = prepared(tokenizer, 200, messages=messages, add_generation_prompt=False)
    assert tokenizer.decode(bare.ids) == text


def test_a_truncated_prompt_loses_its_beginning(tokenizer: Tokenizer) -> None:
    whole = prepared(tokenizer, 2000, "hello " * 100)
    cut = prepared(tokenizer, 2000, "hello " * 100, truncate_prompt_tokens=20)
    assert cut.ids == whole.ids[-20:]
    fitted = prepared(tokenizer, 50, "hello " * 100, truncate_prompt_tokens=-1, max_tokens=10)
    assert fitted.ids == whole.ids[-40:]
    with pytest.raises(RequestError) as caught:
        prepared(tokenizer, 50, "hello", truncate_prompt_tokens=-1, max_tokens=50)
    assert caught.value.param == "truncate_prompt_tokens"


def test_a_grammar_is_refused_if_the_end_of_reasoning_is_several_tokens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kimi K3's marks, which are several tokens each."""
    marks = ("<|assistant|>", "<|close|>think<|sep|>")
    monkeypatch.setattr(tokenizer, "dialect", Dialect("k", reasoning=ReasoningFormat(*marks)))
    assert prepared(tokenizer, 200).samplings[0].free_until is None
    with fails(RequestError, "unsupported_by_model") as caught:
        prepared(tokenizer, 200, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"
    monkeypatch.setattr(
        tokenizer, "dialect", Dialect("k", reasoning=ReasoningFormat(marks[0], "a"))
    )
    asked = prepared(tokenizer, 200, response_format={"type": "json_object"})
    assert asked.samplings[0].free_until == tokenizer.id_of("a")


def test_tools_are_described_even_if_the_models_call_format_is_unknown(
    tokenizer: Tokenizer,
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "Finds it."}}]
    for choice in (None, "auto"):
        asked = job(tokenizer, 2000, tools=tools, tool_choice=choice)
        prompt = tokenizer.decode(asked.prompts[0].ids)
        assert '"description": "Finds it."' in prompt
        assert asked.grammar is not None
        assert (asked.grammar_param, asked.is_grammar_optional) == ("tools", True)
        splitter = Splitter(asked.splitting, tokenizer.dialect)
        parts = list(splitter.feed('<tool_call>{"name": "f", "arguments": {}}</tool_call>'))
        assert [type(part).__name__ for part in parts] == ["CallBegin", "CallText", "CallEnd"]
        assert asked.without_grammar().grammar is None
    assert job(tokenizer, 2000, tools=tools, tool_choice="required").prompts


def test_no_tool_grammar_is_used_if_tools_may_not_be_called(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert job(tokenizer, 2000, tools=tools, tool_choice="none").grammar is None
    narrowed = job(tokenizer, 2000, tools=tools, allowed_token_ids=[5])
    assert narrowed.grammar is None
    demanded = job(tokenizer, 2000, tools=tools, response_format={"type": "json_object"})
    assert (demanded.grammar_param, demanded.is_grammar_optional) == ("response_format", False)


CLOCK = {"type": "function", "function": {"name": "clock"}}
AGE: Any = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}


def test_a_forced_call_is_preferred_to_a_format(tokenizer: Tokenizer) -> None:
    forced = {"tools": [CLOCK], "tool_choice": "required"}
    both = job(tokenizer, 800, **forced, response_format=FORMAT)
    assert both.grammar == job(tokenizer, 800, **forced).grammar
    assert both.grammar_param == "tool_choice"
    assert both.ignored_fields == ("response_format",)
    assert job(tokenizer, 800, **forced).ignored_fields == ()


def test_a_format_beside_tools_still_allows_calls(tokenizer: Tokenizer) -> None:
    both = job(tokenizer, 800, tools=[CLOCK], response_format=FORMAT)
    declared = [{"type": "function", "function": {"name": "clock"}}]
    grammar = tokenizer.tool_grammar(declared, of_schema(AGE))
    assert grammar is not None
    assert both.grammar == grammar.text
    assert (both.grammar_param, both.is_grammar_optional) == ("response_format", False)
    none = job(tokenizer, 800, tools=[CLOCK], tool_choice="none", response_format=FORMAT)
    assert none.grammar == of_schema(AGE)


@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_tool_enforces_its_schema(tokenizer: Tokenizer, strict: bool) -> None:
    tool = {"type": "function", "function": {"name": "clock", "strict": strict}}
    made = job(tokenizer, 800, tools=[CLOCK, tool])
    assert (made.grammar_param, made.is_grammar_optional) == ("tools", not strict)
