"""Bodies are read where large ones hold up nobody, with the same result everywhere."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import msgspec
import pytest

from serve.core.errors import BrigadeError, OverloadedError, RequestError
from serve.core.helper_messages import BodyKind, BodyNotRead, BodyRead, BodyRefused
from serve.front.api.reading.lanes import MAX_MEDIUM_BYTES, MAX_SMALL_TEXT_BYTES, Lanes, ProcessLane
from serve.front.api.reading.process import Answer, answered
from serve.front.api.reading.reader import FinishedReply, Reader, ReadMessage, ReadResponse
from serve.front.api.reading.turns import MAX_SMALL_BYTES, MAX_WAITING
from serve.front.http.guard import Parts
from serve.front.output.answer import Job
from serve.front.text.tokens import Tokenizer
from tests.front.fakes import MAX_CONTEXT, FakeEngine, Running, byte_level, save

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(byte_level(), tmp_path_factory.mktemp("model")), "json_tools")


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer) -> Reader:
    return Reader(tokenizer, MAX_CONTEXT, 64)


@pytest.fixture
async def lanes(reader: Reader) -> AsyncIterator[Lanes]:
    made = Lanes(reader, lambda: False)
    yield made
    made.close()


MESSAGES = [{"role": "user", "content": "hello"}]


def function(schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema or {}}}


TOOLS = [function({"type": "object"})]
BODIES: list[tuple[BodyKind, dict[str, Any]]] = [
    ("chat", {"model": "m", "messages": MESSAGES, "tools": TOOLS, "n": 2, "stop": ["x"]}),
    ("chat", {"model": "m", "messages": []}),
    ("completion", {"model": "m", "prompt": ["hello", "world"], "echo": True, "logprobs": 2}),
    ("completion", {"model": "m", "prompt": "a " * 9000}),
    ("message", {"model": "m", "messages": MESSAGES, "max_tokens": 5, "stop_sequences": ["y"]}),
    ("response", {"model": "m", "input": "hello", "instructions": "Be short."}),
    ("response", {"model": "m", "input": "hello", "previous_response_id": "r"}),
    ("response", {"model": "m", "input": "hello", "tools": [{"type": "custom", "name": "f"}]}),
    ("count", {"model": "m", "messages": MESSAGES}),
    ("tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("detokenize", {"tokens": [5, 6, 7]}),
]


# JSON has integers that MessagePack has not.
HUGE = 10**30
BODIES += [
    ("chat", {"model": "m", "messages": MESSAGES, "tools": [function({"minimum": -HUGE})]}),
    ("response", {"model": "m", "input": "hello", "tools": [{**function(), "name": "f"}]}),
    ("input_tokens", {"model": "m", "input": "hello", "instructions": "Be short."}),
    ("embedding", {"model": "m", "input": ["hello", [5, 6]], "dimensions": 2}),
    ("ollama_chat", {"model": "m", "messages": MESSAGES}),
    ("ollama_generate", {"model": "m", "prompt": ""}),
    ("ollama_embed", {"model": "m", "input": ["hello"], "dimensions": 2}),
    ("ollama_embeddings", {"model": "m", "prompt": ""}),
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


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_answered_is_the_same_on_the_other_side(
    reader: Reader, kind: BodyKind, body: dict[str, Any]
) -> None:
    answer = answered(reader, kind, json.dumps(body).encode())
    assert not isinstance(answer, BodyNotRead)
    sent = msgspec.json.encode(answer)
    again: Answer = msgspec.json.decode(sent, type=Answer)
    assert again == answer


def test_answered_refuses_a_body_as_its_reader_does(reader: Reader) -> None:
    data = json.dumps({"model": "m", "messages": MESSAGES, "temperature": "hot"}).encode()
    with pytest.raises(RequestError) as raised:
        reader.chat(data)
    refused = answered(reader, "chat", data)
    assert isinstance(refused, BodyRefused)
    again = RequestError(refused.message, param=refused.param, code=refused.code)
    assert vars(again) == vars(raised.value)
    assert str(again) == str(raised.value)


def test_answered_reports_a_mistake_of_ours_without_its_message(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A message may quote the body, and the log must not."""

    def fail(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(Reader, "chat", fail)
    assert answered(reader, "chat", b"{}") == BodyNotRead("KeyError")
    assert "event=bug trace=" in caplog.text
    assert "secret" not in caplog.text


async def until_ready(lanes: Lanes) -> None:
    deadline = time.monotonic() + 60
    while not lanes._medium.process.is_ready():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_large_bodies_are_read_in_a_process_of_their_own(
    lanes: Lanes, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until_ready(lanes)
    padding = {"metadata": {"x": "y" * MAX_SMALL_BYTES}}

    def never(*_: object) -> None:
        raise AssertionError("it was read here")

    expected = {}
    for kind, body in BODIES[:1] + BODIES[2:3]:
        data = json.dumps({**body, **padding}).encode()
        method = getattr(Reader, kind)
        expected[kind] = described(method(reader, data))
        with monkeypatch.context() as patched:
            patched.setattr(Reader, kind, never)
            assert described(await lanes.read(method, [(data,)], "client")) == expected[kind]
    many = b'{"model": "m", "messages": [' + b"{}," * 39999 + b"{}]}"
    with pytest.raises(RequestError, match="messages: has 40000 entries") as caught:
        await lanes.read(Reader.chat, [(many,)], "client")
    assert caught.value.code == "context_length_exceeded"


async def test_texts_of_a_few_kilobytes_are_read_in_the_process_unless_they_are_answered(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing many of them would take the server's process a core."""
    await until_ready(lanes)
    kinds: list[BodyKind] = []
    read_here = lanes._read_here

    def noted(kind: BodyKind, held: list[Parts]) -> Any:
        kinds.append(kind)
        return read_here(kind, held)

    monkeypatch.setattr(lanes, "_read_here", noted)
    text = "hello " * (MAX_SMALL_TEXT_BYTES // 6)
    tokenize = json.dumps({"prompt": text}).encode()
    completion = json.dumps({"model": "m", "prompt": "hello", "user": text}).encode()
    await lanes.read(Reader.tokenize, [(tokenize[:100], tokenize[100:])], "client")
    await lanes.read(Reader.completion, [(completion[:100], completion[100:])], "client")
    await lanes.read(Reader.tokenize, [(b'{"prompt": "hello"}',)], "client")
    assert kinds == ["completion", "tokenize"]


async def test_a_body_of_megabytes_delays_no_medium_one(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding megabytes takes seconds, and it cannot be interrupted for a turn of others."""
    slow = Slow()
    read = ProcessLane._read

    def slow_if_large(self: ProcessLane, kind: BodyKind, held: list[Parts]) -> Any:
        return slow(kind, held) if self is lanes._large else read(self, kind, held)

    monkeypatch.setattr(ProcessLane, "_read", slow_if_large)
    large = lanes.read(Reader.chat, [(bytes(MAX_MEDIUM_BYTES + 1),)], "client")
    reading = asyncio.ensure_future(large)
    await asyncio.sleep(0.05)
    data = json.dumps({"prompt": "hello", "user": "x" * MAX_SMALL_BYTES}).encode()
    medium = await asyncio.wait_for(lanes.read(Reader.tokenize, [(data,)], "client"), 60)
    assert isinstance(medium, FinishedReply)
    assert not reading.done()
    slow.may_go_on.set()
    assert await reading == "chat"


async def test_very_large_bodies_wait_until_the_process_has_started(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was read here")

    monkeypatch.setattr(lanes, "_read_here", never)
    data = json.dumps({"prompt": "hello", "user": "x" * MAX_MEDIUM_BYTES}).encode()
    reading = lanes.read(Reader.tokenize, [(data,)], "client")
    assert isinstance(await asyncio.wait_for(reading, 60), FinishedReply)


async def test_warm_up_starts_the_process_of_very_large_bodies(lanes: Lanes) -> None:
    """Otherwise the first body of megabytes would wait until the tokenizer is loaded."""
    lanes.warm_up()
    process = lanes._large.process
    pid = process.pid
    assert pid is not None
    assert lanes._medium.process.pid is None
    data = json.dumps({"prompt": "hello", "user": "x" * MAX_MEDIUM_BYTES}).encode()
    await asyncio.wait_for(lanes.read(Reader.tokenize, [(data,)], "client"), 60)
    assert process.pid == pid


async def test_what_is_too_long_to_be_a_prompt_is_not_encoded(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(reader.tokenizer, "encode", never)
    text = "hello world " * 100_000
    for kind, body in (
        ("tokenize", {"prompt": text}),
        ("tokenize", {"messages": [{"role": "user", "content": text}]}),
        ("count", {"model": "m", "messages": [{"role": "user", "content": text}]}),
        ("detokenize", {"tokens": [1] * (1 << 21)}),
    ):
        with pytest.raises(RequestError) as caught:
            getattr(reader, kind)(json.dumps(body).encode())
        assert caught.value.code == "context_length_exceeded"


class Slow:
    """In the place of the process: notes what it reads and waits until it may go on."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may_go_on = threading.Event()

    def __call__(self, kind: BodyKind, held: list[Parts]) -> str:
        self.sizes.append(sum(map(len, held[0])) - MAX_SMALL_BYTES)
        held.clear()
        assert self.may_go_on.wait(10)
        return kind


async def test_the_smallest_large_body_is_next_and_those_that_are_answered_come_first(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    monkeypatch.setattr(ProcessLane, "_read", slow)

    def read(kind: BodyKind, size: int) -> "asyncio.Task[Any]":
        held: list[Parts] = [(bytes(MAX_SMALL_BYTES + size),)]
        return asyncio.ensure_future(lanes.read(getattr(Reader, kind), held, "client"))

    first = read("tokenize", 9000)
    await asyncio.sleep(0.1)
    asked: list[tuple[BodyKind, int]]
    asked = [("count", 10), ("chat", 5000), ("chat", 20), ("message", 300), ("tokenize", 1)]
    tasks = [first, *(read(*each) for each in asked)]
    await asyncio.sleep(0)
    tasks[3].cancel()  # Its client leaves while it waits.
    small = await lanes.read(Reader.tokenize, [(b'{"prompt": "hello"}',)], "client")
    assert isinstance(small, FinishedReply), "it waits for none of them"
    slow.may_go_on.set()
    await asyncio.wait(tasks, timeout=10)
    assert slow.sizes == [9000, 300, 5000, 1, 10]
    assert [task.cancelled() for task in tasks] == [False, False, False, True, False, False]


async def test_only_so_many_large_bodies_wait(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    monkeypatch.setattr(ProcessLane, "_read", slow)
    data = bytes(MAX_SMALL_BYTES + 1)
    tasks = [
        asyncio.ensure_future(lanes.read(Reader.chat, [(data,)], "client"))
        for _ in range(MAX_WAITING + 1)
    ]
    await asyncio.sleep(0.05)
    with pytest.raises(OverloadedError):
        await lanes.read(Reader.chat, [(data,)], "client")
    for task in tasks[1:]:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks[1:])
    slow.may_go_on.set()
    assert await tasks[0] == "chat"
    assert await lanes.read(Reader.chat, [(data,)], "client") == "chat", "the queue is free again"


async def test_a_full_queue_of_large_bodies_keeps_no_smaller_one_out(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that is answered; the last one in the queue goes for it."""
    slow = Slow()
    monkeypatch.setattr(ProcessLane, "_read", slow)
    large = bytes(2 * MAX_SMALL_BYTES)
    tasks = [
        asyncio.ensure_future(lanes.read(Reader.tokenize, [(large,)], "client"))
        for _ in range(MAX_WAITING + 1)
    ]
    await asyncio.sleep(0.05)
    chat = asyncio.ensure_future(lanes.read(Reader.chat, [(bytes(MAX_SMALL_BYTES + 1),)], "client"))
    with pytest.raises(OverloadedError):
        await tasks[-1]
    slow.may_go_on.set()
    assert await chat == "chat"
    assert await asyncio.gather(*tasks[:-1]) == ["tokenize"] * MAX_WAITING


async def test_a_client_that_leaves_while_its_body_is_read_holds_up_nobody(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    monkeypatch.setattr(ProcessLane, "_read", slow)
    data = bytes(MAX_SMALL_BYTES + 1)
    left = asyncio.ensure_future(lanes.read(Reader.chat, [(data,)], "client"))
    await asyncio.sleep(0.05)
    left.cancel()
    other = asyncio.ensure_future(lanes.read(Reader.chat, [(data,)], "client"))
    await asyncio.sleep(0.05)
    assert not other.done()
    slow.may_go_on.set()
    assert await asyncio.wait_for(other, 10) == "chat"


async def test_a_process_that_ended_is_the_fault_of_one_request(lanes: Lanes) -> None:
    await until_ready(lanes)
    lanes._medium.process._running[0].kill()
    data = json.dumps({"prompt": "hello", "user": "x" * MAX_SMALL_BYTES}).encode()
    with suppress(BrigadeError):
        await lanes.read(Reader.tokenize, [(data,)], "client")
    assert isinstance(await lanes.read(Reader.tokenize, [(data,)], "client"), FinishedReply)


def test_responses_go_on_from_large_ones(tokenizer: Tokenizer) -> None:
    """Their messages are kept as JSON, and read where the body is."""
    engine = FakeEngine(tokenizer)
    with Running(engine) as server, ThreadPoolExecutor(1):
        url = f"{server.url}/v1/responses"
        body = {"model": "tiny", "input": "hello", "metadata": {}, "max_output_tokens": 3}
        first = httpx2.post(url, json=body, timeout=30).json()
        body |= {"previous_response_id": first["id"], "input": "more"}
        second = httpx2.post(url, json=body, timeout=30)
        assert second.status_code == 200
        text = tokenizer.decode(engine.prompts[-1], skip_special_tokens=False)
        said = first["output"][0]["content"][0]["text"]
        assert text == f"<|user|>hello<|assistant|>{said}<|user|>more<|assistant|>"
        kept = httpx2.get(f"{url}/{second.json()['id']}").json()
        assert kept == second.json()
        missing = httpx2.post(url, json={**body, "previous_response_id": "no"}, timeout=30)
        assert missing.json()["error"]["code"] == "previous_response_not_found"
