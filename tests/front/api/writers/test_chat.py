"""The chat writer: chunks and whole replies from deltas, as OpenAI's own types have them."""

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serve.core.errors import EngineError
from serve.front.api.writers.chat import ChatWriter, WholeChat
from serve.front.output.answer import Job
from serve.front.output.deltas import (
    CallBegin,
    CallEnd,
    CallText,
    Text,
    Thought,
    Update,
)
from serve.front.text.tokens import Tokenizer
from tests.front.api.test_chat import job
from tests.front.api.writers.updates import ORDER, begin, call, end, scored, update

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def chunks(asked: Job, tokenizer: Tokenizer, *updates: Update) -> list[dict[str, Any]]:
    writer = ChatWriter(asked, tokenizer)
    made = [*writer.begin(), *(chunk for each in updates for chunk in writer.feed(each))]
    made += writer.finish()
    for chunk in made:
        ChatCompletionChunk.model_validate(chunk)
    return made


def whole(asked: Job, tokenizer: Tokenizer, *updates: Update) -> dict[str, Any]:
    writer = WholeChat(asked, tokenizer)
    for each in updates:
        assert list(writer.feed(each)) == []
    assert list(writer.finish()) == []
    reply = writer.whole()
    ChatCompletion.model_validate(reply)
    return reply


def deltas(made: list[dict[str, Any]]) -> list[Any]:
    return [choice["delta"] for chunk in made for choice in chunk["choices"]]


@pytest.fixture
def asked(tokenizer: Tokenizer) -> Job:
    return job(tokenizer, 200)


def test_the_chat_writer_keeps_the_order_of_deltas(asked: Job, tokenizer: Tokenizer) -> None:
    made = chunks(asked, tokenizer, *ORDER)
    named = {"name": "add", "arguments": '{"x"'}
    other = {"name": "sub", "arguments": "{}"}
    assert deltas(made) == [
        {"role": "assistant", "content": ""},
        {"reasoning": "Hm", "reasoning_content": "Hm"},
        {"content": "a"},
        {"content": "b"},
        {"tool_calls": [{"index": 0, "id": "call_add", "type": "function", "function": named}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {"tool_calls": [{"index": 1, "id": "call_sub", "type": "function", "function": other}]},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in made]
    assert reasons == [None] * (len(made) - 1) + ["tool_calls"]
    assert len({chunk["id"] for chunk in made}) == 1
    assert all("usage" not in chunk for chunk in made)


def test_the_chat_writer_sends_the_name_of_a_call_before_its_arguments(
    asked: Job, tokenizer: Tokenizer
) -> None:
    parts = [update(CallBegin("a", "f")), update(CallText("{}")), update(CallEnd())]
    made = deltas(chunks(asked, tokenizer, begin(), *parts, end("tool_calls")))
    functions = [each["tool_calls"][0]["function"] for each in made if "tool_calls" in each]
    assert functions == [{"name": "f", "arguments": ""}, {"arguments": "{}"}]


def test_the_chat_writer_ends_with_the_reason_stop_after_a_named_tool(tokenizer: Tokenizer) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    named = job(tokenizer, 2000, tools=TOOLS, tool_choice=choice)
    updates = [begin(), update(*call("add", "{}")), end("tool_calls")]
    assert chunks(named, tokenizer, *updates)[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole(named, tokenizer, *updates)["choices"][0]["finish_reason"] == "stop"


def test_the_chat_writer_sends_usage_only_if_it_is_wanted(tokenizer: Tokenizer) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    *others, last = chunks(job(tokenizer, 200, **fields), tokenizer, begin(Text("a")), end())
    assert [chunk["usage"] for chunk in others] == [None] * 3
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {
            "reasoning_tokens": 2,
            "repeated_tokens": 3,
        },
    }


def test_the_chat_writer_sends_tokens_with_the_first_delta_of_an_update(
    tokenizer: Tokenizer,
) -> None:
    asked = job(tokenizer, 200, logprobs=True, return_token_ids=True)
    updates = [begin(), update(), update(Thought("a"), Text("b")), end()]
    made = chunks(asked, tokenizer, *scored(updates))
    assert made[0]["prompt_token_ids"] == asked.prompts[0].ids
    assert [chunk["choices"][0].get("token_ids") for chunk in made] == [
        *(None, [0], [1], [2], None, [3], None)
    ]
    assert deltas(made)[1:3] == [{"content": ""}] * 2
    scores = [chunk["choices"][0]["logprobs"] for chunk in made]
    assert [bool(each) for each in scores] == [False, True, True, True, False, True, False]
    (choice,) = whole(asked, tokenizer, *scored(updates))["choices"]
    assert choice["token_ids"] == [0, 1, 2, 3]
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-1.5] * 4


def test_a_whole_chat_contains_all_choices(tokenizer: Tokenizer) -> None:
    asked = job(tokenizer, 200, n=2)
    other = [begin(Text("x"), number=1), end("length", number=1)]
    reply = whole(asked, tokenizer, *other, *ORDER)
    assert reply["object"] == "chat.completion"
    first, second = reply["choices"]
    assert first == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "ab",
            "reasoning": "Hm",
            "reasoning_content": "Hm",
            "refusal": None,
            "tool_calls": [
                {"id": f"call_{name}", "type": "function", "function": function}
                for name, function in (
                    ("add", {"name": "add", "arguments": '{"x":1}'}),
                    ("sub", {"name": "sub", "arguments": "{}"}),
                )
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
        "token_ids": None,
        "stop_reason": None,
    }
    assert (second["message"]["content"], second["finish_reason"]) == ("x", "length")
    assert reply["usage"]["completion_tokens"] == 5


def test_the_content_of_a_whole_chat_is_null_if_there_are_only_calls(
    asked: Job, tokenizer: Tokenizer
) -> None:
    reply = whole(asked, tokenizer, begin(*call("add", "{}")), end("tool_calls", "END"))
    (choice,) = reply["choices"]
    assert choice["message"]["content"] is None
    assert choice["stop_reason"] == "END"


def test_the_chat_writer_reports_a_failure_without_internal_details(
    asked: Job, tokenizer: Tokenizer
) -> None:
    error = ChatWriter(asked, tokenizer).failed(EngineError("/a/path"))["error"]
    assert "/a/path" not in error["message"]


def test_the_chat_writer_sends_the_prompts_token_ids_once(tokenizer: Tokenizer) -> None:
    asked = job(tokenizer, 200, n=2, return_token_ids=True)
    made = chunks(asked, tokenizer, begin(), begin(number=1), end(), end(number=1))
    assert ["prompt_token_ids" in chunk for chunk in made] == [True, False, False, False]
