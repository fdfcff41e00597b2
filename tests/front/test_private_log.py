"""No text of a client is in the log: requests of all calls, right and wrong ones, with a mark in
every text, name, header and path. Nothing is searched for and cut out: such text never gets
there."""

import http.client
import json
import logging
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest

from serve.front.http.record import AccessRecord
from serve.front.text.tokens import Tokenizer
from tests.agents.played import save_model
from tests.front.fakes import FakeEngine, FakeRanks, Running

MARK = "Zq7mark"
TEXT = "a client's text stands here"
TOOL = {
    "type": "function",
    "function": {
        "name": "use",
        "description": TEXT,
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
SCHEMA = {"type": "object", "properties": {TEXT: {"type": "string", "pattern": TEXT}}}
NAMED = {"name": "a", "schema": SCHEMA}
ASKED = [{"role": "user", "content": TEXT}]
CALL = {"id": TEXT, "type": "function", "function": {"name": "use", "arguments": TEXT}}
MESSAGES: Any = [
    {"role": "system", "content": TEXT, "name": TEXT},
    {"role": "user", "content": [{"type": "text", "text": TEXT}]},
    {"role": "assistant", "content": TEXT, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": TEXT, "content": TEXT},
    {"role": "user", "content": TEXT},
]
BODIES: list[tuple[str, Any]] = [
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": MESSAGES,
            "tools": [TOOL],
            "tool_choice": "auto",
            "stop": [TEXT],
            "user": TEXT,
            "metadata": {TEXT: TEXT},
            "max_tokens": 200,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": ASKED,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
            "stream": True,
            "chat_template_kwargs": {TEXT: TEXT},
            "bad_words": [TEXT],
            "logit_bias": {"5": 1.0},
        },
    ),
    (
        "/v1/completions",
        {"model": "tiny", "prompt": [TEXT, TEXT], "max_tokens": 200, "suffix": TEXT},
    ),
    ("/v1/completions", {"prompt": TEXT, "structured_outputs": {"regex": TEXT}, "stream": True}),
    ("/v1/completions", {"prompt": TEXT, "structured_outputs": {"grammar": TEXT}}),
    (
        "/v1/responses",
        {
            "model": "tiny",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}],
            "instructions": TEXT,
            "tools": [{"type": "function", "name": "use", "parameters": SCHEMA, "strict": False}],
            "previous_response_id": TEXT,
            "metadata": {TEXT: TEXT},
            "max_output_tokens": 200,
        },
    ),
    ("/v1/responses", {"input": TEXT, "prompt_cache_key": TEXT}),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 200,
            "system": [{"type": "text", "text": TEXT}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
            "tools": [
                {"name": "use", "description": TEXT, "input_schema": SCHEMA},
                {"type": "web_search_20250305", "name": TEXT},
            ],
            "metadata": {"user_id": TEXT},
        },
    ),
    (
        "/v1/messages/count_tokens",
        {"model": "tiny", "messages": ASKED},
    ),
    ("/api/chat", {"model": "tiny", "messages": ASKED}),
    ("/api/generate", {"model": "tiny", "prompt": TEXT, "system": TEXT, "format": SCHEMA}),
    ("/api/show", {"model": TEXT}),
    ("/v1/embeddings", {"model": "tiny", "input": [TEXT, TEXT]}),
    ("/tokenize", {"model": "tiny", "prompt": TEXT}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"model": "tiny", "tokens": [1, 2]}),
    ("/v1/load_lora_adapter", {"lora_name": MARK, "lora_path": MARK}),
    ("/v1/load_lora_adapter", {"lora_name": TEXT, "lora_path": TEXT, "base_model_name": TEXT}),
    ("/v1/unload_lora_adapter", {"lora_name": TEXT}),
    ("/admin/adapters", {"lora_name": TEXT, "pin": True}),
    ("/admin/prefix-cache", {"clear": False}),
]
PATHS = [
    *(
        "/v1/models/{}",
        "/v1/responses/{}",
        "/v1/responses/{}?after={}",
        "/ui/{}",
        "/{}",
    ),
    *("/v1/responses/x?{}={}", "/admin/requests/{}/cancel", "/admin/trace?seconds={}", "/admin/{}"),
    *("/admin/trace?{}=1", "/api/{}", "/v1/messages/{}", "/v1/models?limit={}", "/health/%0A{}"),
]
HEADERS = ["User-Agent", "Accept", "Referer", "Cookie", "Authorization", "X-{}"]
MALFORMED = [
    "GET /{} {} HTTP/1.1\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: {}\r\n{}\r\n\r\n",
    "GET / {}/1.1\r\n\r\n",
    "{}\r\n\r\n",
    "POST /v1/{} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n{}\r\n",
    "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
    "GET http://{}/ HTTP/1.1\r\nHost: {}\r\n\r\n",
    "GET /x HTTP/1.1\r\nHost: localhost\r\n {}: {}\r\n\r\n",
]
ANSWERS = [
    f"plain {MARK} text",
    f'<tool_call>\n{{"name": "{MARK}", "arguments": {{"{MARK}": "{MARK}"}}}}\n</tool_call>',
    f'<tool_call>\n{{"name": "use", "arguments": {{"x": "{MARK}',
    f'<tool_call>\n{{"{MARK}": {MARK}\n</tool_call> {MARK}',
    f'{{"{MARK}": "{MARK}"}}',
]


class Requests:
    """Makes requests at random, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._wrongness = 0.0

    def marked(self) -> str:
        around = ["", " ", "'", '"', "\\", "\n", "\u2028", "é", "{", "%s", "\x00", "a ", ": ", "/"]
        before, after = self._random.choice(around), self._random.choice(around)
        return before + MARK + after * self._random.randint(1, 3)

    def body(self, sample: Any) -> bytes:
        """Returns a body like the sample, with any share of mistakes."""
        self._wrongness = self._random.choice([0.0, 0.03, 0.1, 0.4])
        body = self._changed(sample)
        if isinstance(body, dict) and self._random.random() < 0.03:
            body["messages"] = [{"role": "user", "content": self.marked() * 6000}]
        data = json.dumps(body).encode()
        if self._random.random() < 0.05:
            return data[: self._random.randrange(len(data))]
        return data

    def _is_wrong(self) -> bool:
        return self._random.random() < self._wrongness

    def _changed(self, value: Any) -> Any:
        if self._is_wrong():
            return self._random.choice(
                [None, 1, -1.5, True, [], {}, self.marked(), [self.marked()]]
            )
        if isinstance(value, dict):
            changed = {self._name(name): self._changed(each) for name, each in value.items()}
            if self._is_wrong():
                changed[self.marked()] = self.marked()
            return changed
        if isinstance(value, list):
            return [self._changed(each) for each in value]
        return self.marked() if value == TEXT else value

    def _name(self, name: str) -> str:
        return self.marked() if name == TEXT or self._is_wrong() else name

    def headers(self) -> dict[str, str]:
        names = self._random.sample(HEADERS, self._random.randint(0, 3))
        values = [f"{MARK}", f"Bearer {MARK}", f"'{MARK}'", f"{MARK}-1", f"text/{MARK}; q=1"]
        return {name.format(MARK): self._random.choice(values) for name in names}

    def send(self, server: Running) -> int:
        """Sends one request, and returns the status of the reply."""
        kind = self._random.random()
        if kind < 0.06:
            return self._send_malformed(server)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = self.headers()
        if kind < 0.26:
            path = self._random.choice(PATHS).replace("{}", quote(self.marked()))
            method = self._random.choice(["GET", "POST", "DELETE", MARK])
            connection.request(method, path, b"", headers)
        else:
            path, sample = self._random.choice(BODIES)
            if kind < 0.3:
                path += f"?{MARK}={MARK}"
            type = f"application/{MARK}" if kind < 0.28 else "application/json"
            headers["Content-Type"] = type
            connection.request("POST", path, self.body(sample), headers)
        reply = connection.getresponse()
        reply.read()
        connection.close()
        return reply.status

    def _send_malformed(self, server: Running) -> int:
        with server.connect() as connection:
            written = self._random.choice(MALFORMED).replace("{}", MARK)
            connection.sendall(written.encode())
            connection.shutdown(socket.SHUT_WR)
            line = connection.makefile("rb").readline()
            return int(line.split()[1]) if line else 0


class Lines(logging.Handler):
    """All that is logged, with the traces of errors."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(name)s %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def logged() -> Iterator[list[str]]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield handler.lines
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


@pytest.fixture(scope="module")
def reading_calls(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_model(tmp_path_factory.mktemp("calls")))


@pytest.mark.parametrize("num", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_text_of_a_client_is_logged(
    reading_calls: Tokenizer, capfd: pytest.CaptureFixture[str], num: int
) -> None:
    engine = FakeEngine(reading_calls)
    engine.ranks = FakeRanks(adapter_memory=None)
    engine.adapters = engine.ranks.adapters
    refused = {"message": f"There is no file {MARK}.", "status": 404}
    engine.ranks.refusals = {0: refused, 1: refused}
    statuses: dict[int, int] = {}
    with logged() as lines, Running(engine, max_context=4096, pooling="last") as server:
        for seed in range(num):
            engine.answer = ANSWERS[seed % len(ANSWERS)]
            status = Requests(seed).send(server)
            statuses[status] = statuses.get(status, 0) + 1
    found = [line for line in lines if MARK.lower() in line.lower()]
    assert not found, found[:10]
    standard = capfd.readouterr()
    assert MARK.lower() not in (standard.out + standard.err).lower()
    assert not [line for line in lines if "event=bug" in line]
    assert statuses[200] > num / 20, statuses
    assert statuses[400] > num / 20, statuses
    assert sum(" status=" in line for line in lines) > num / 2


def test_text_of_a_client_in_the_log_would_be_found(
    reading_calls: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""

    def fail(record: AccessRecord, error: Exception) -> None:
        record.reason = str(error)

    monkeypatch.setattr(AccessRecord, "fail", fail)
    with logged() as lines, Running(FakeEngine(reading_calls)) as server:
        for seed in range(40):
            Requests(seed).send(server)
    assert [line for line in lines if MARK in line]
