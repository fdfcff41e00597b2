"""A request's life without HTTP: prompts that fit, text that stops, ends that are told."""

import asyncio
import json
from typing import Any

import pytest

from serve.core.errors import BrigadeError, EngineError, RequestError, UnavailableError
from serve.core.types import Event
from serve.front import replies
from serve.front.chat import Chat, Prompt, prepare
from serve.front.metrics import Metrics
from serve.front.openai import parse_chat
from serve.front.record import Record
from serve.front.tokens import Tokenizer
from tests.front.fakes import FakeEngine, FakeGeneration

pytestmark = pytest.mark.anyio


def prepared(tokenizer: Tokenizer, max_context: int, content: str = "hi", **fields: Any) -> Prompt:
    messages = [{"role": "user", "content": content}]
    body = {"model": "m", "messages": messages, **fields}
    return prepare(parse_chat(json.dumps(body).encode()), tokenizer, max_context)


def test_without_a_limit_the_context_is_the_limit(tokenizer: Tokenizer) -> None:
    prompt = prepared(tokenizer, 200)
    assert prompt.ids == tokenizer.encode("<|user|>hi<|assistant|>")
    assert prompt.max_tokens == 200 - len(prompt.ids)


def test_a_prompt_leaves_room_for_one_token(tokenizer: Tokenizer) -> None:
    length = len(prepared(tokenizer, 200).ids)
    assert prepared(tokenizer, length + 1).max_tokens == 1
    with pytest.raises(RequestError, match=f"{length} tokens. Your messages have {length}") as told:
        prepared(tokenizer, length)
    assert told.value.code == "context_length_exceeded"


def test_prompt_and_answer_must_fit_together(tokenizer: Tokenizer) -> None:
    length = len(prepared(tokenizer, 200).ids)
    assert prepared(tokenizer, 200, max_tokens=200 - length).max_tokens == 200 - length
    with pytest.raises(RequestError, match=r"asked for 201 tokens") as told:
        prepared(tokenizer, 200, max_tokens=201 - length)
    assert told.value.param == "max_tokens"


def test_an_absurd_prompt_is_not_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "encode", lambda text: pytest.fail("encoded"))
    with pytest.raises(RequestError, match="at least") as told:
        prepared(tokenizer, 200, "hello " * 100_000)
    assert told.value.code == "context_length_exceeded"


def test_defaults_of_sampling(tokenizer: Tokenizer) -> None:
    first, second = (prepared(tokenizer, 200).sampling for _ in range(2))
    assert (first.temperature, first.top_p) == (1.0, 1.0)
    assert first.seed != second.seed
    assert prepared(tokenizer, 200, seed=-5, temperature=0).sampling.seed == -5


# --- generations


def start(engine: FakeEngine, record: Record, stops: tuple[str, ...] = (), limit: int = 99) -> Chat:
    prompt = prepared(engine.tokenizer, 512, max_tokens=limit)
    generation = engine.submit(prompt.ids, limit, prompt.sampling, engine.tokenizer.eos_ids)
    prompt = Prompt(prompt.ids, limit, prompt.sampling, stops)
    return Chat("m", prompt, generation, engine.tokenizer, record, Metrics(engine.pipeline))


@pytest.fixture
def record() -> Record:
    return Record("id", "POST", "/v1/chat/completions")


async def answer(chat: Chat) -> tuple[str, str]:
    reply = await replies.fold(chat.chunks(include_usage=True))
    (choice,) = reply["choices"]
    return choice["message"]["content"], choice["finish_reason"]


async def test_a_stop_string_over_tokens_ends_the_generation(
    engine: FakeEngine, record: Record
) -> None:
    engine.answer = "one two three. STOP one two"
    assert len(engine.tokenizer.encode("ee. ST")) > 1
    assert await answer(start(engine, record, ("ee. ST",))) == ("one two thr", "stop")
    assert engine.generations[0].closed.is_set()
    num_tokens = record.completion_tokens
    assert num_tokens is not None
    assert num_tokens < len(engine.tokenizer.encode(engine.answer)), "it ran on to the end"


async def test_a_slow_client_keeps_no_row_of_a_finished_answer(
    engine: FakeEngine, record: Record
) -> None:
    """The generation is closed at the stop string, not when the client has read of it."""
    engine.answer = "one two three. STOP one two"
    chunks = start(engine, record, ("STOP",)).chunks(include_usage=False)
    while (await anext(chunks))["choices"][0]["finish_reason"] is None:
        pass
    assert engine.generations[0].closed.is_set()
    await chunks.aclose()  # type: ignore[attr-defined]


async def test_the_beginning_of_a_stop_string_is_given_out_at_the_end(
    engine: FakeEngine, record: Record
) -> None:
    engine.answer = "one two three"
    assert await answer(start(engine, record, ("threesome",))) == ("one two three", "stop")


async def test_the_limit_is_told(engine: FakeEngine, record: Record) -> None:
    text, reason = await answer(start(engine, record, limit=2))
    assert reason == "length"
    assert engine.answer.startswith(text)
    assert record.completion_tokens == 2


async def test_a_character_cut_by_the_limit_is_given_out(
    engine: FakeEngine, record: Record
) -> None:
    engine.answer = "👍"
    assert len(engine.tokenizer.encode("👍")) > 1
    assert await answer(start(engine, record, limit=1)) == ("\ufffd", "length")


async def test_the_token_that_ends_is_counted_but_no_text(
    engine: FakeEngine, record: Record
) -> None:
    """Also if it is a common token, as some models' generation configs have it."""
    (hello, *_) = engine.tokenizer.encode("hello")
    prompt = prepared(engine.tokenizer, 512)
    generation = FakeGeneration([Event(1, hello), Event(1, hello, "stop")], 0)
    metrics = Metrics(engine.pipeline)
    chat = Chat("m", prompt, generation, engine.tokenizer, record, metrics)
    text, _ = await answer(chat)
    assert text == engine.tokenizer.decode([hello])
    assert record.completion_tokens == 2


async def test_an_empty_answer_has_a_role_and_an_end(engine: FakeEngine, record: Record) -> None:
    engine.answer = ""
    chunks = [chunk async for chunk in start(engine, record).chunks(include_usage=False)]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_broken_engine_ends_the_stream_with_an_error(
    engine: FakeEngine, record: Record
) -> None:
    engine.breaks_with = EngineError("rank 1 at 10.0.0.2 died")
    stream = start(engine, record).server_sent_events(include_usage=False)
    events = [event async for event in stream]
    assert b'"error"' in events[-2]
    assert b"10.0.0.2" not in events[-2]
    assert events[-1] == replies.DONE
    assert (record.finish_reason, record.status) == ("error", 503)
    assert engine.generations[0].closed.is_set()


async def test_an_exception_of_ours_ends_that_stream_alone(
    engine: FakeEngine, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chat, "_take", lambda self, event: 1 / 0)
    stream = start(engine, record).server_sent_events(include_usage=False)
    event, done = [event async for event in stream]
    assert done == replies.DONE
    assert b"server_error" in event
    assert b"division" not in event
    assert record.status == 500


async def test_a_row_that_failed_is_a_mistake_of_ours_and_no_broken_cluster(
    engine: FakeEngine, record: Record
) -> None:
    chat = start(engine, record)
    chat._generation = FakeGeneration([Event(1, 5), Event(1, None, "error")], 0)
    with pytest.raises(BrigadeError) as raised:
        await replies.fold(chat.chunks(include_usage=False))
    assert raised.value.http_status == 500
    assert record.finish_reason == "error"


@pytest.mark.parametrize("events", [[], [Event(1, None, "abort")], [Event(1, 5)]])
async def test_a_generation_without_a_right_end_is_an_error(
    engine: FakeEngine, record: Record, events: list[Any]
) -> None:
    prompt = prepared(engine.tokenizer, 512)
    generation = FakeGeneration(events, 0)
    chat = Chat("m", prompt, generation, engine.tokenizer, record, Metrics(engine.pipeline))
    with pytest.raises(EngineError):
        await answer(chat)
    assert generation.closed.is_set()


async def test_an_interruption_reaches_a_chat_that_waits(
    engine: FakeEngine, record: Record
) -> None:
    engine.delay = 60
    chat = start(engine, record)
    answering = asyncio.ensure_future(answer(chat))
    await asyncio.sleep(0.01)
    chat.interrupt(UnavailableError("stopping"))
    await asyncio.wait({answering}, timeout=5)
    assert answering.done()
    assert isinstance(answering.exception(), UnavailableError)
    assert engine.generations[0].closed.is_set()


async def test_an_interruption_reaches_a_chat_whose_client_is_slow(
    engine: FakeEngine, record: Record
) -> None:
    chat = start(engine, record)
    chunks = chat.chunks(include_usage=False)
    await anext(chunks)
    chat.interrupt(UnavailableError("stopping"))
    with pytest.raises(UnavailableError):
        await replies.fold(chunks)


async def test_a_cancelled_reply_closes_its_generation(engine: FakeEngine, record: Record) -> None:
    engine.delay = 60
    answering = asyncio.ensure_future(answer(start(engine, record)))
    await asyncio.sleep(0.01)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert engine.generations[0].closed.is_set()
    assert record.finish_reason == "abort"
