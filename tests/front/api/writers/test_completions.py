"""The completion writer: chunks and whole replies from deltas, as OpenAI's types have them."""

import json
from typing import Any

from openai.types import Completion

from serve.core.errors import EngineError
from serve.core.types import Score
from serve.front.api.completions import prepare
from serve.front.api.openai import CompletionBody, parse
from serve.front.api.writers.completions import CompletionWriter, WholeCompletion
from serve.front.output.answer import Job
from serve.front.output.deltas import AnswerBegin, Text, Update
from serve.front.text.tokens import Tokenizer
from tests.front.api.writers.updates import FIRST, CompletionChunk, begin, end, scored, update


def job(tokenizer: Tokenizer, **fields: Any) -> Job:
    body = json.loads(json.dumps({"model": "m", "prompt": [5, 6], **fields}))
    return prepare(parse(CompletionBody, body), tokenizer, 200)


def choices(asked: Job, tokenizer: Tokenizer, *updates: Update) -> list[dict[str, Any]]:
    writer = CompletionWriter(asked, tokenizer)
    chunks = [*writer.begin(), *(chunk for each in updates for chunk in writer.feed(each))]
    chunks += writer.finish()
    for chunk in chunks:
        CompletionChunk.model_validate(chunk)
    return [choice for chunk in chunks for choice in chunk["choices"]]


def whole(asked: Job, tokenizer: Tokenizer, *updates: Update) -> dict[str, Any]:
    writer = WholeCompletion(asked, tokenizer)
    for each in updates:
        assert list(writer.feed(each)) == []
    reply = writer.whole()
    Completion.model_validate(reply)
    return reply


def test_the_completion_writer_sends_text_and_then_the_finish_reason(tokenizer: Tokenizer) -> None:
    made = choices(job(tokenizer), tokenizer, begin(), update(Text("a")), end("stop", "END"))
    assert made == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None},
        {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        },
    ]


def test_the_completion_writer_sends_an_echo_and_its_logprobs_first(tokenizer: Tokenizer) -> None:
    asked = job(tokenizer, echo=True, logprobs=1, prompt_logprobs=2, return_token_ids=True)
    scores = (Score(6, -2.0, ((3, -0.5), (4, -1.0))),)
    updates = [Update(0, (AnswerBegin(FIRST, scores),)), *scored([update(Text("a"))]), end()]
    first, second, _ = choices(asked, tokenizer, *updates)
    assert first["text"] == asked.prompts[0].text
    assert (first["prompt_token_ids"], first["token_ids"]) == ([5, 6], [])
    assert first["logprobs"]["token_logprobs"] == [None, -2.0]
    assert len(first["logprobs"]["top_logprobs"][1]) == 2, "one and the token itself"
    assert len(first["prompt_logprobs"][1]) == 3, "two and the token itself"
    assert second["token_ids"] == [0]
    begins = [*first["logprobs"]["text_offset"], *second["logprobs"]["text_offset"]]
    lengths = [len(tokenizer.token_text(id)) for id in (5, 6)]
    assert begins == [0, lengths[0], sum(lengths)]


def test_the_completion_writer_sends_tokens_even_while_their_text_is_held_back(
    tokenizer: Tokenizer,
) -> None:
    asked = job(tokenizer, logprobs=0)
    made = choices(asked, tokenizer, *scored([begin(), update()]), end())
    assert [len(choice["logprobs"]["tokens"]) for choice in made[:2]] == [1, 1]
    assert not choices(job(tokenizer), tokenizer, *scored([begin(), update()]))


def test_the_completion_writer_sends_usage_only_if_it_is_wanted(tokenizer: Tokenizer) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    writer = CompletionWriter(job(tokenizer, **fields), tokenizer)
    chunks = [chunk for each in (begin(Text("a")), end()) for chunk in writer.feed(each)]
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    (last,) = writer.finish()
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 12)


def test_a_whole_completion_contains_all_choices(tokenizer: Tokenizer) -> None:
    asked = job(tokenizer, n=2, logprobs=0, return_token_ids=True)
    ids = asked.prompts[0].ids
    updates = [
        *scored([begin(number=1), begin(Text("a")), update(Text("b"))]),
        end(),
        end(number=1),
    ]
    first, second = whole(asked, tokenizer, *updates)["choices"]
    assert (first["text"], first["token_ids"], first["index"]) == ("ab", [1, 2], 0)
    assert {len(column) for column in first["logprobs"].values()} == {2}
    assert (second["text"], second["finish_reason"]) == ("", "stop")
    assert first["prompt_token_ids"] == [5, 6]
    assert ids == [5, 6], "the prompt's own list stays as it is"


def test_a_whole_completion_can_contain_a_token_whose_text_is_index(tokenizer: Tokenizer) -> None:
    """The likeliest tokens are listed by their text, which may be anything."""
    asked = job(tokenizer, logprobs=2)
    update_ = Update(0, (AnswerBegin(FIRST), Text("t")), (1,), (Score(1, -0.1, ((7, -2.0),)),))
    (choice,) = whole(asked, tokenizer, update_, end())["choices"]
    expected = {tokenizer.token_text(7): -2.0, tokenizer.token_text(1): -0.1}
    assert choice["logprobs"]["top_logprobs"] == [expected]


def test_the_completion_writer_reports_a_failure_without_internal_details(
    tokenizer: Tokenizer,
) -> None:
    error = CompletionWriter(job(tokenizer), tokenizer).failed(EngineError("/a/path"))["error"]
    assert "/a/path" not in error["message"]
