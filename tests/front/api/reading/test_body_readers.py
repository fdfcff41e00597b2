"""Bodies are read where large ones delay nobody, with the same result in every process."""

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx2
import msgspec
import pytest

from serve.core.errors import BrigadeError, NotFoundError, RequestError
from serve.core.helper_messages import BodyNotRead, BodyRead, BodyRefused, ModelNames, ReadBody
from serve.front.api.reading import body_readers as module
from serve.front.api.reading import kinds
from serve.front.api.reading.body_readers import (
    MAX_MEDIUM_BYTES,
    MAX_SMALL_BYTES,
    MAX_SMALL_TEXT_BYTES,
    BodyReaders,
)
from serve.front.api.reading.process import Answer, answered
from serve.front.api.reading.reader import FinishedReply, Reader, ReadMessage, ReadResponse
from serve.front.http.middleware import Parts
from serve.front.output.answer import Job
from serve.front.text.helpers import HelperEnded, Helpers
from serve.front.text.tokens import Tokenizer
from tests.errors import fails
from tests.front.fakes import MAX_CONTEXT, FakeEngine, Running, byte_level, save

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(byte_level(), tmp_path_factory.mktemp("model")), "json_tools")


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer) -> Reader:
    return Reader(tokenizer, MAX_CONTEXT, 64, ModelNames(("m",), "m"))


@pytest.fixture
async def body_readers(reader: Reader) -> AsyncIterator[BodyReaders]:
    made = BodyReaders(reader)
    yield made
    made.close()


MESSAGES = [{"role": "user", "content": "hello"}]


def function(schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema or {}}}


TOOLS = [function({"type": "object"})]
BODIES: list[tuple[kinds.BodyKind[Any], dict[str, Any]]] = [
    (kinds.CHAT, {"model": "m", "messages": MESSAGES, "tools": TOOLS, "n": 2, "stop": ["x"]}),
    (kinds.CHAT, {"model": "m", "messages": []}),
    (kinds.COMPLETION, {"model": "m", "prompt": ["hello", "world"], "echo": True, "logprobs": 2}),
    (kinds.COMPLETION, {"model": "m", "prompt": "a " * 9000}),
    (kinds.MESSAGE, {"model": "m", "messages": MESSAGES, "max_tokens": 5, "stop_sequences": ["y"]}),
    (kinds.RESPONSE, {"model": "m", "input": "hello", "instructions": "Be short."}),
    (kinds.RESPONSE, {"model": "m", "input": "hello", "previous_response_id": "r"}),
    (kinds.RESPONSE, {"model": "m", "input": "hello", "tools": [{"type": "custom", "name": "f"}]}),
    (kinds.COUNT, {"model": "m", "messages": MESSAGES}),
    (kinds.TOKENIZE, {"prompt": "hello", "return_token_strs": True}),
    (kinds.DETOKENIZE, {"tokens": [5, 6, 7]}),
]


# JSON has integers that MessagePack has not.
HUGE = 10**30
BODIES += [
    (kinds.CHAT, {"model": "m", "messages": MESSAGES, "tools": [function({"minimum": -HUGE})]}),
    (kinds.RESPONSE, {"model": "m", "input": "hello", "tools": [{**function(), "name": "f"}]}),
    (kinds.INPUT_TOKENS, {"model": "m", "input": "hello", "instructions": "Be short."}),
    (kinds.EMBEDDING, {"model": "m", "input": ["hello", [5, 6]], "dimensions": 2}),
    (kinds.OLLAMA_CHAT, {"model": "m", "messages": MESSAGES}),
    (kinds.OLLAMA_GENERATE, {"model": "m", "prompt": ""}),
    (kinds.OLLAMA_EMBED, {"model": "m", "input": ["hello"], "dimensions": 2}),
    (kinds.OLLAMA_EMBEDDINGS, {"model": "m", "prompt": ""}),
]


def described(read: Any) -> Any:
    """Returns the parts that can be compared: seeds and ids are random."""
    if isinstance(read, BodyRead):
        return described(read.result)
    if isinstance(read, ReadResponse):
        return read.plan, read.messages, described(read.job)
    if isinstance(read, ReadMessage):
        return read.left_out, read.omits_thoughts, described(read.job)
    if isinstance(read, Job):
        prompts = [(p.ids, p.max_tokens, p.end_ids, p.text, p.has_marks) for p in read.prompts]
        return msgspec.structs.replace(read, prompts=[]), prompts
    return read


def ask(reader: Reader, kind: kinds.BodyKind[Any], data: bytes) -> Answer:
    return answered(reader, ReadBody(kind.name, (len(data),), reader.names), data)


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_the_answer_of_a_reading_process_survives_json(
    reader: Reader, kind: kinds.BodyKind[Any], body: dict[str, Any]
) -> None:
    answer = ask(reader, kind, json.dumps(body).encode())
    assert not isinstance(answer, BodyNotRead)
    sent = msgspec.json.encode(answer)
    again: Answer = msgspec.json.decode(sent, type=Answer)
    assert again == answer


def test_a_reading_process_refuses_a_body_as_its_reader_does(reader: Reader) -> None:
    data = json.dumps({"model": "m", "messages": MESSAGES, "temperature": "hot"}).encode()
    with pytest.raises(RequestError) as raised:
        reader.chat(data)
    refused = ask(reader, kinds.CHAT, data)
    assert isinstance(refused, BodyRefused)
    again = RequestError(refused.message, param=refused.param, code=refused.code)
    assert (again.param, again.code) == (raised.value.param, raised.value.code)
    assert str(again) == str(raised.value)


def test_a_reading_process_reports_an_internal_error_without_its_message(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A message may quote the body, and the log must not."""

    def fail(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setitem(kinds.BY_NAME, "chat", kinds.BodyKind("chat", fail))
    assert ask(reader, kinds.CHAT, b"{}") == BodyNotRead("KeyError")
    assert "event=bug trace=" in caplog.text
    assert "secret" not in caplog.text


class Slow:
    """In place of a helper process: records what it reads and waits until it may go on."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may_go_on = threading.Event()

    def __call__(self, _: Helpers[Answer], question: ReadBody, *data: bytes) -> Answer:
        self.sizes.append(sum(question.sizes))
        assert self.may_go_on.wait(60)
        return BodyRead(FinishedReply(b""))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    made = Slow()
    monkeypatch.setattr(Helpers, "call", lambda *given: made(*given))
    return made


def padded(num_bytes: int) -> list[Parts]:
    """The body of a tokenization, in two parts."""
    data = json.dumps({"prompt": "hello", "user": "x" * num_bytes}).encode()
    return [(data[:100], data[100:])]


async def test_large_bodies_are_read_in_a_separate_process(
    body_readers: BodyReaders, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = {"metadata": {"x": "y" * MAX_SMALL_BYTES}}
    monkeypatch.setattr(module, "_read_here", None)
    for kind, body in BODIES[:1] + BODIES[2:3]:
        data = json.dumps({**body, **padding}).encode()
        expected = described(kind.read(reader, data))
        assert described(await body_readers.read(reader, kind, [(data,)], "client")) == expected
    many = b'{"model": "m", "messages": [' + b"{}," * 39999 + b"{}]}"
    with fails(RequestError, "context_length_exceeded", match="40000") as caught:
        await body_readers.read(reader, kinds.CHAT, [(many,)], "client")
    assert caught.value.code == "context_length_exceeded"


async def test_a_large_body_can_name_an_adapter_loaded_after_the_process_started(
    body_readers: BodyReaders, reader: Reader
) -> None:
    """Adapters come and go while the process runs."""
    data = json.dumps({"model": "new", "messages": MESSAGES, "user": "x" * MAX_SMALL_BYTES})
    held: list[Parts] = [(data.encode(),)]
    with fails(NotFoundError, "model_not_found", match="'new'.*'m'") as caught:
        await body_readers.read(reader, kinds.CHAT, list(held), "client")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    grown = replace(reader, names=ModelNames(("m", "new"), "m"))
    assert (await body_readers.read(grown, kinds.CHAT, list(held), "client")).model == "new"


@pytest.mark.parametrize(
    ("kind", "num_bytes", "is_read_here"),
    [
        (kinds.TOKENIZE, MAX_SMALL_TEXT_BYTES - 100, True),
        (kinds.TOKENIZE, MAX_SMALL_TEXT_BYTES, False),
        (kinds.COMPLETION, MAX_SMALL_TEXT_BYTES, True),
        (kinds.COMPLETION, MAX_SMALL_BYTES, False),
    ],
)
async def test_bodies_of_a_few_kilobytes_are_read_in_the_server_unless_they_ask_for_an_answer(
    body_readers: BodyReaders,
    reader: Reader,
    slow: Slow,
    kind: kinds.BodyKind[Any],
    num_bytes: int,
    is_read_here: bool,
) -> None:
    """Tokenizing many of them would keep a core of the server's own process busy."""
    slow.may_go_on.set()
    await body_readers.read(reader, kind, padded(num_bytes), "client")
    assert slow.sizes == ([] if is_read_here else [sum(map(len, padded(num_bytes)[0]))])


async def test_a_large_body_does_not_delay_medium_and_small_bodies(
    body_readers: BodyReaders, reader: Reader, slow: Slow
) -> None:
    """Encoding megabytes takes seconds, and cannot be interrupted to give others a turn."""
    tasks = [
        asyncio.ensure_future(body_readers.read(reader, kinds.TOKENIZE, padded(size), "client"))
        for size in (MAX_MEDIUM_BYTES, MAX_SMALL_BYTES)
    ]
    while len(slow.sizes) < len(tasks):
        await asyncio.sleep(0.01)
    small = body_readers.read(reader, kinds.TOKENIZE, padded(1), "client")
    assert isinstance(await asyncio.wait_for(small, 60), FinishedReply)
    assert not any(task.done() for task in tasks)
    slow.may_go_on.set()
    await asyncio.gather(*tasks)


async def test_warming_up_starts_a_reading_process(
    body_readers: BodyReaders, reader: Reader
) -> None:
    """Otherwise the first large body would wait until the tokenizer is loaded."""
    body_readers.warm_up()
    (process,) = body_readers._helpers._all
    for num_bytes in (MAX_SMALL_BYTES, MAX_MEDIUM_BYTES):
        reading = body_readers.read(reader, kinds.TOKENIZE, padded(num_bytes), "client")
        assert isinstance(await asyncio.wait_for(reading, 60), FinishedReply)
    assert body_readers._helpers._all == [process]


async def test_a_text_too_long_for_a_prompt_is_not_encoded(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(reader.tokenizer, "encode", never)
    text = "hello world " * 100_000
    bodies: list[tuple[kinds.BodyKind[Any], dict[str, Any]]] = [
        (kinds.TOKENIZE, {"prompt": text}),
        (kinds.TOKENIZE, {"messages": [{"role": "user", "content": text}]}),
        (kinds.COUNT, {"model": "m", "messages": [{"role": "user", "content": text}]}),
        (kinds.DETOKENIZE, {"tokens": [1] * (1 << 21)}),
    ]
    for kind, body in bodies:
        with pytest.raises(RequestError) as caught:
            kind.read(reader, json.dumps(body).encode())
        assert caught.value.code == "context_length_exceeded"


async def test_large_bodies_that_get_an_answer_are_read_first_and_clients_take_turns(
    body_readers: BodyReaders, reader: Reader, slow: Slow
) -> None:
    def read(kind: kinds.BodyKind[Any], num_bytes: int, client: str) -> "asyncio.Task[Any]":
        held: list[Parts] = [(bytes(MAX_SMALL_BYTES + num_bytes),)]
        return asyncio.ensure_future(body_readers.read(reader, kind, held, client))

    tasks = [read(kinds.TOKENIZE, 9000, "a")]
    while not slow.sizes:
        await asyncio.sleep(0.01)
    tasks += [read(kinds.COUNT, 10, "a"), read(kinds.CHAT, 5000, "a"), read(kinds.CHAT, 20, "a")]
    tasks += [read(kinds.MESSAGE, 300, "a"), read(kinds.TOKENIZE, 1, "b")]
    await asyncio.sleep(0)
    tasks[3].cancel()  # Its client leaves while it waits.
    slow.may_go_on.set()
    await asyncio.wait(tasks, timeout=60)
    assert [size - MAX_SMALL_BYTES for size in slow.sizes] == [9000, 300, 5000, 1, 10]
    assert tasks[3].cancelled()


async def test_a_reading_process_that_ended_fails_only_one_request(
    body_readers: BodyReaders, reader: Reader
) -> None:
    body_readers.warm_up()
    body_readers._helpers._all[0].kill()
    with suppress(BrigadeError):
        await body_readers.read(reader, kinds.TOKENIZE, padded(MAX_SMALL_BYTES), "client")
    read = await body_readers.read(reader, kinds.TOKENIZE, padded(MAX_SMALL_BYTES), "client")
    assert isinstance(read, FinishedReply)


async def test_a_body_that_takes_too_long_to_read_is_refused(
    body_readers: BodyReaders, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overrun(*_: object) -> Answer:
        raise HelperEnded(-signal.SIGPROF)

    monkeypatch.setattr(Helpers, "call", overrun)
    with fails(RequestError, "request_too_slow"):
        await body_readers.read(reader, kinds.TOKENIZE, padded(MAX_SMALL_BYTES), "client")


def test_a_response_with_a_large_body_can_be_continued(tokenizer: Tokenizer) -> None:
    """Its messages are stored as JSON, and read in the process that reads the body."""
    engine = FakeEngine(tokenizer)
    with Running(engine) as server, ThreadPoolExecutor(1):
        url = f"{server.url}/v1/responses"
        body = {"model": "tiny", "input": "hello", "metadata": {}, "max_output_tokens": 3}
        first = httpx2.post(url, json=body).json()
        body |= {"previous_response_id": first["id"], "input": "more"}
        second = httpx2.post(url, json=body)
        assert second.status_code == 200
        text = tokenizer.decode(engine.prompts[-1], skip_special_tokens=False)
        said = first["output"][0]["content"][0]["text"]
        assert text == f"<|user|>hello<|assistant|>{said}<|user|>more<|assistant|>"
        kept = httpx2.get(f"{url}/{second.json()['id']}").json()
        assert kept == second.json()
        missing = httpx2.post(url, json={**body, "previous_response_id": "no"})
        assert missing.json()["error"]["code"] == "previous_response_not_found"
