"""Answers in progress: text that stops, the events of their ends, several choices at once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from serve.core.errors import BrigadeError, EngineError, UnavailableError
from serve.core.types import Event, Reasoning
from serve.front.api.writers.chat import ChatWriter, WholeChat
from serve.front.http import replies
from serve.front.http.metrics import Metrics
from serve.front.http.record import AccessRecord
from serve.front.output.answer import Job, RunningAnswer
from serve.front.output.deltas import AnswerEnd, Text, Update
from serve.front.routes.stream import OPENAI, sent_events
from tests.front.api.test_chat import job
from tests.front.fakes import FakeEngine, FakeGeneration

pytestmark = pytest.mark.anyio


def start(
    engine: FakeEngine,
    record: AccessRecord,
    stops: Sequence[str] = (),
    limit: int = 99,
    **fields: Any,
) -> RunningAnswer:
    return started(engine, record, stops, limit, **fields)[1]


def started(
    engine: FakeEngine,
    record: AccessRecord,
    stops: Sequence[str] = (),
    limit: int = 99,
    **fields: Any,
) -> tuple[Job, RunningAnswer]:
    asked = job(engine.tokenizer, 512, max_tokens=limit, stop=list(stops), **fields)
    return asked, begun(engine, record, asked, engine.submit(asked.prompts))


def begun(
    engine: FakeEngine, record: AccessRecord, asked: Job, generation: FakeGeneration
) -> RunningAnswer:
    return RunningAnswer(asked, generation, engine.tokenizer, record, Metrics(engine.pipeline))


async def whole(engine: FakeEngine, asked: Job, chat: RunningAnswer) -> dict[str, Any]:
    writer = WholeChat(asked, engine.tokenizer)
    async for update in chat.updates():
        list(writer.feed(update))
    return writer.whole()


async def written(
    engine: FakeEngine,
    record: AccessRecord,
    stops: Sequence[str] = (),
    limit: int = 99,
    **fields: Any,
) -> dict[str, Any]:
    return await whole(engine, *started(engine, record, stops, limit, **fields))


async def chunks_of(
    engine: FakeEngine, record: AccessRecord, **fields: Any
) -> list[dict[str, Any]]:
    asked, chat = started(engine, record, **fields)
    writer = ChatWriter(asked, engine.tokenizer)
    chunks = [chunk async for update in chat.updates() for chunk in writer.feed(update)]
    return [*chunks, *writer.finish()]


def events_of(engine: FakeEngine, asked: Job, chat: RunningAnswer) -> AsyncIterator[bytes]:
    return sent_events(chat, ChatWriter(asked, engine.tokenizer), OPENAI)


@pytest.fixture
def record() -> AccessRecord:
    return AccessRecord("id", "POST", "/v1/chat/completions")


async def answer(chat: RunningAnswer) -> tuple[str, str]:
    """The text and the reason of the only answer."""
    deltas = [delta async for update in chat.updates() for delta in update.deltas]
    text = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    (end,) = [delta for delta in deltas if isinstance(delta, AnswerEnd)]
    return text, end.reason


async def test_a_stop_string_that_spans_tokens_ends_the_generation(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.answer = "one two three. STOP one two"
    assert len(engine.tokenizer.encode("ee. ST")) > 1
    assert await answer(start(engine, record, ("ee. ST",))) == ("one two thr", "stop")
    assert engine.generations[0].closed_numbers == {0}
    num_tokens = record.completion_tokens
    assert num_tokens is not None
    assert num_tokens < len(engine.tokenizer.encode(engine.answer)), "it ran on to the end"


async def test_a_slow_client_does_not_keep_the_row_of_a_finished_answer(
    engine: FakeEngine, record: AccessRecord
) -> None:
    """The generation is closed at the stop string, not when the client has read of it."""
    engine.answer = "one two three. STOP one two"
    updates = start(engine, record, ("STOP",)).updates()
    while (await anext(updates)).end is None:
        pass
    assert engine.generations[0].closed_numbers == {0}
    await updates.aclose()  # type: ignore[attr-defined]


async def test_text_that_only_begins_like_a_stop_string_is_sent_at_the_end(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.answer = "one two three"
    assert await answer(start(engine, record, ("threesome",))) == ("one two three", "stop")


async def test_reaching_the_token_limit_is_reported(
    engine: FakeEngine, record: AccessRecord
) -> None:
    text, reason = await answer(start(engine, record, limit=2))
    assert reason == "length"
    assert engine.answer.startswith(text)
    assert record.completion_tokens == 2


async def test_a_character_that_the_limit_cuts_off_is_sent_as_a_replacement_character(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.answer = "👍"
    assert len(engine.tokenizer.encode("👍")) > 1
    assert await answer(start(engine, record, limit=1)) == ("\ufffd", "length")


async def test_the_end_token_is_counted_but_is_not_text(
    engine: FakeEngine, record: AccessRecord
) -> None:
    """Also if it is a common token, as some models' generation configs have it."""
    (hello, *_) = engine.tokenizer.encode("hello")
    generation = FakeGeneration([Event(0, hello), Event(0, hello, "stop")], 0)
    asked, metrics = job(engine.tokenizer, 512), Metrics(engine.pipeline)
    chat = RunningAnswer(asked, generation, engine.tokenizer, record, metrics)
    text, _ = await answer(chat)
    assert text == engine.tokenizer.decode([hello])
    assert record.completion_tokens == 2


async def test_an_empty_answer_still_has_a_role_and_an_end(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.answer = ""
    chunks = await chunks_of(engine, record)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_failed_engine_ends_the_stream_with_an_error(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.breaks_with = EngineError("rank 1 at 10.0.0.2 died")
    stream = events_of(engine, *started(engine, record))
    events = [event async for event in stream]
    assert b'"error"' in events[-2]
    assert b"10.0.0.2" not in events[-2]
    assert events[-1] == replies.DONE
    assert (record.finish_reason, record.status) == ("error", 503)
    assert engine.generations[0].closed.is_set()


async def test_an_internal_error_ends_only_its_own_stream(
    engine: FakeEngine, record: AccessRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunningAnswer, "_count_event", lambda *_: 1 / 0)
    stream = events_of(engine, *started(engine, record))
    event, done = [event async for event in stream]
    assert done == replies.DONE
    assert b"server_error" in event
    assert b"division" not in event
    assert (record.status, record.finish_reason) == (500, "error"), "its client has not left"


async def test_the_message_of_an_internal_error_is_not_logged(
    engine: FakeEngine,
    record: AccessRecord,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("\n2026 INFO request=FORGED\x1b[2K\u2028") from ValueError("a\rFORGED")

    monkeypatch.setattr(RunningAnswer, "_count_event", broken)
    assert [event async for event in events_of(engine, *started(engine, record))]
    lines = [entry.getMessage() + (entry.exc_text or "") for entry in caplog.records]
    assert any("event=bug trace=" in line and "test_answer.py" in line for line in lines)
    assert all(line.isprintable() for line in lines), lines
    assert not any("FORGED" in line for line in lines), lines


async def test_text_that_cannot_be_encoded_ends_its_stream_with_an_error(
    engine: FakeEngine, record: AccessRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    untold = Update(0, (Text("\ud800"),))
    monkeypatch.setattr(RunningAnswer, "_count_event", lambda *_: lambda: untold)
    stream = events_of(engine, *started(engine, record))
    event, done = [event async for event in stream]
    assert (b"server_error" in event, done) == (True, replies.DONE)
    assert record.status == 500


async def test_a_failed_row_is_reported_as_an_internal_error_and_not_as_a_cluster_failure(
    engine: FakeEngine, record: AccessRecord
) -> None:
    generation = FakeGeneration([Event(0, 5), Event(0, None, "error")], 0)
    asked, metrics = job(engine.tokenizer, 512), Metrics(engine.pipeline)
    chat = RunningAnswer(asked, generation, engine.tokenizer, record, metrics)
    with pytest.raises(BrigadeError) as raised:
        await answer(chat)
    assert raised.value.http_status == 500
    assert record.finish_reason == "error"


async def test_a_grammar_that_fails_midway_is_reported_as_an_error_of_the_request(
    engine: FakeEngine, record: AccessRecord
) -> None:
    asked = job(engine.tokenizer, 512)
    generation = FakeGeneration([Event(0, 5), Event(0, None, "refused")], 0)
    chat = begun(engine, record, asked, generation)
    events = [event async for event in events_of(engine, asked, chat)]
    assert events[-1] == replies.DONE
    assert b'"type":"invalid_request_error"' in events[-2]
    assert b"grammar" in events[-2]
    assert (record.status, record.finish_reason) == (400, "error")


@pytest.mark.parametrize(
    ("stops", "stop_token", "fields", "reason"),
    [
        ((), None, {}, None),
        (("absent", "two three", "o t"), None, {}, "o t"),
        (("absent",), "two", {}, "two"),
        ((), "</s>", {}, None),
        ((), "</s>", {"ignore_eos": True}, "</s>"),
        (("absent",), None, {"limit": 1}, None),
    ],
)
async def test_the_stop_string_or_token_is_reported(
    engine: FakeEngine,
    record: AccessRecord,
    stops: Sequence[str],
    stop_token: str | None,
    fields: dict[str, Any],
    reason: str | None,
) -> None:
    """As in vLLM, an end token is not a stop reason, unless end tokens are ignored."""
    ids = {"two": engine.tokenizer.encode(" two")[0], "</s>": min(engine.tokenizer.eos_ids)}
    engine.answer = "one two three"
    if stop_token:
        fields = {**fields, "stop_token_ids": [ids[stop_token]]}
    (choice,) = (await written(engine, record, stops, **fields))["choices"]
    assert choice["stop_reason"] == ids.get(reason or "", reason)


@pytest.mark.parametrize("events", [[], [Event(0, None, "abort")], [Event(0, 5)]])
async def test_a_generation_that_ends_without_a_reason_is_an_error(
    engine: FakeEngine, record: AccessRecord, events: list[Any]
) -> None:
    generation = FakeGeneration(events, 0)
    asked, metrics = job(engine.tokenizer, 512), Metrics(engine.pipeline)
    chat = RunningAnswer(asked, generation, engine.tokenizer, record, metrics)
    with pytest.raises(EngineError):
        await answer(chat)
    assert generation.closed.is_set()


async def test_an_interruption_ends_a_chat_that_waits_for_tokens(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.delay = 60
    chat = start(engine, record)
    answering = asyncio.ensure_future(answer(chat))
    await asyncio.sleep(0.01)
    chat.interrupt(UnavailableError("stopping"))
    await asyncio.wait({answering}, timeout=60)
    assert answering.done()
    assert isinstance(answering.exception(), UnavailableError)
    assert engine.generations[0].closed.is_set()


async def test_an_interruption_ends_a_chat_whose_client_is_slow(
    engine: FakeEngine, record: AccessRecord
) -> None:
    chat = start(engine, record)
    updates = chat.updates()
    await anext(updates)
    chat.interrupt(UnavailableError("stopping"))
    with pytest.raises(UnavailableError):
        [update async for update in updates]


async def test_cancelling_a_reply_closes_its_generation(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.delay = 60
    answering = asyncio.ensure_future(answer(start(engine, record)))
    await asyncio.sleep(0.01)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert engine.generations[0].closed.is_set()
    assert record.finish_reason == "abort"


# --- parameters of the text


async def test_a_stop_string_can_be_included_in_the_output(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.answer = "one two three. STOP one two"
    kept = start(engine, record, ["ee. ST"], include_stop_str_in_output=True)
    assert await answer(kept) == ("one two three. ST", "stop")


async def test_a_stop_token_ends_the_answer_and_can_be_included_in_the_output(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.answer = "one two three"
    ids = engine.tokenizer.encode(engine.answer)
    before, with_it = (engine.tokenizer.decode(ids[:n]) for n in (1, 2))
    assert await answer(start(engine, record, stop_token_ids=[ids[1]])) == (before, "stop")
    fields = {"stop_token_ids": [ids[1]], "include_stop_str_in_output": True}
    record.finish_reason = None
    assert await answer(start(engine, record, **fields)) == (with_it, "stop")


async def test_stop_strings_are_ignored_before_min_tokens(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.answer = "one one one one"
    first, *_ = engine.tokenizer.encode("one")
    num_first = engine.tokenizer.encode(engine.answer).count(first)
    assert num_first <= 2
    text, _ = await answer(start(engine, record, ["one"], min_tokens=3))
    assert text.startswith("one")
    record.finish_reason = None
    assert (await answer(start(engine, record, ["one"])))[0] == ""


async def test_special_tokens_are_shown_as_text_if_the_request_asks_for_it(
    engine: FakeEngine, record: AccessRecord
) -> None:
    engine.answer = "a<s>b"
    assert (await answer(start(engine, record)))[0] == "ab"
    record.finish_reason = None
    assert (await answer(start(engine, record, skip_special_tokens=False)))[0] == "a<s>b"


# --- scores and ids


async def test_logprobs_are_sent_with_their_tokens(
    engine: FakeEngine, record: AccessRecord
) -> None:
    """Also of the token that ends, and also while text is held back."""
    fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    chunks = await chunks_of(engine, record, stops=["zzz"], **fields)
    ids = [*engine.tokenizer.encode(engine.answer), min(engine.tokenizer.eos_ids)]
    assert chunks[0]["prompt_token_ids"] == engine.prompts[0]
    choices = [chunk["choices"][0] for chunk in chunks[1:-1]]
    assert [choice["token_ids"] for choice in choices] == [[id] for id in ids]
    scores = [score for choice in choices for score in choice["logprobs"]["content"]]
    assert [score["logprob"] for score in scores] == [-id for id in ids]
    assert {tuple(top["logprob"] for top in score["top_logprobs"]) for score in scores} == {(0, -1)}
    joined = b"".join(bytes(score["bytes"]) for score in scores[:-1])
    assert joined.decode() == engine.answer, "of an emoji in two tokens each has its own bytes"


async def test_the_full_reply_has_the_same_logprobs_as_the_stream(
    engine: FakeEngine, record: AccessRecord
) -> None:
    reply = await written(engine, record, logprobs=True, return_token_ids=True)
    (choice,) = reply["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert choice["message"]["content"] == engine.answer


async def test_tokens_can_be_returned_as_their_ids(
    engine: FakeEngine, record: AccessRecord
) -> None:
    fields = {"logprobs": True, "return_tokens_as_token_ids": True}
    (choice,) = (await written(engine, record, limit=2, **fields))["choices"]
    ids = engine.tokenizer.encode(engine.answer)[:2]
    assert [t["token"] for t in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]


# --- several choices


async def test_all_choices_are_sent_in_one_stream(engine: FakeEngine, record: AccessRecord) -> None:
    fields = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    chunks = await chunks_of(engine, record, **fields)
    indices = [chunk["choices"][0]["index"] for chunk in chunks[:-1]]
    assert sorted(set(indices)) == [0, 1, 2]
    assert indices != sorted(indices), "one after the other"
    reply = await written(engine, record, n=3)
    assert [c["message"]["content"] for c in reply["choices"]] == [engine.answer] * 3
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks[:-1]) == 3
    assert chunks[-1]["choices"] == []
    num_tokens = len(engine.tokenizer.encode(engine.answer)) + 1
    assert chunks[-1]["usage"]["completion_tokens"] == 3 * num_tokens
    assert chunks[-1]["usage"]["prompt_tokens"] == len(engine.prompts[0])


async def test_a_choice_that_stops_does_not_end_the_other_choices(
    engine: FakeEngine, record: AccessRecord
) -> None:
    ids = engine.tokenizer.encode("one two three")
    events = [Event(n, id) for id in ids for n in (0, 1)]
    events = [event for event in events if event != Event(1, ids[0])]
    events += [Event(0, ids[-1], "length"), Event(1, ids[-1], "length")]
    generation = FakeGeneration(events, 0)
    asked, metrics = job(engine.tokenizer, 512, n=2, stop=["one"]), Metrics(engine.pipeline)
    chat = RunningAnswer(asked, generation, engine.tokenizer, record, metrics)
    first, second = (await whole(engine, asked, chat))["choices"]
    assert (first["message"]["content"], first["finish_reason"]) == ("", "stop")
    assert second["finish_reason"] == "length"
    assert second["message"]["content"].endswith("three" + engine.tokenizer.decode(ids[-1:]))
    assert 0 in generation.closed_numbers


async def test_usage_counts_the_reasoning_tokens_of_all_answers(
    engine: FakeEngine, record: AccessRecord
) -> None:
    """The marks are tokens 5 and 6; the second answer never leaves its reasoning."""
    asked = job(engine.tokenizer, 512, n=2)
    reasoning = Reasoning((5,), (6,), is_open=True)
    (prompt,) = asked.prompts
    samplings = tuple(replace(each, reasoning=reasoning) for each in prompt.samplings)
    prompt = replace(prompt, samplings=samplings)
    asked = msgspec.structs.replace(asked, prompts=[prompt])
    answers = {0: [1, 2, 6, 3, 5, 4, 6, 1], 1: [1, 1]}
    events = []
    for number, tokens in answers.items():
        events += [Event(number, token) for token in tokens[:-1]]
        events.append(Event(number, tokens[-1], "length"))
    answer = begun(engine, record, asked, FakeGeneration(events, 0))
    usages = [update.end.usage async for update in answer.updates() if update.end]
    assert [usage.reasoning_tokens for usage in usages] == [3, 5]
    assert usages[-1].completion_tokens == 10
