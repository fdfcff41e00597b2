"""Thousands of generated bodies: near a good one, far from it, and broken bytes. Whatever they
are, there is an answer that is no fault of the server's, and nothing of them stays."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.front.api.anthropic.body import MessagesBody
from serve.front.api.fields import NEUTRAL
from serve.front.api.openai import ChatBody, CompletionBody
from serve.front.api.responses.body import ResponsesBody
from tests.cluster.servers import Server, running
from tests.faults.cases import ANTHROPIC, CHAT, GOOD, JSON

pytestmark = pytest.mark.long

BODIES_AT_ONCE = 20
MAX_GROWTH_BYTES = 48 << 20
FINE = {200, 400, 404, 413, 429}
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
# What is asked of each call, and the fields that it knows.
CALLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    CHAT: (GOOD, sorted({*ChatBody.model_fields, *NEUTRAL})),
    COMPLETIONS: (
        {"model": GOOD["model"], "prompt": "What is 7 + 5?", "max_tokens": 4},
        sorted({*CompletionBody.model_fields, *NEUTRAL}),
    ),
    RESPONSES: (
        {"model": GOOD["model"], "input": "What is 7 + 5?", "max_output_tokens": 16},
        sorted(ResponsesBody.model_fields),
    ),
    ANTHROPIC: (GOOD, sorted(MessagesBody.model_fields)),
}
LAST_EVENT = {
    CHAT: "data: [DONE]",
    COMPLETIONS: "data: [DONE]",
    RESPONSES: "event: response.",
    ANTHROPIC: "event: message_stop",
}
OPENAI_ERROR = {"message", "type", "param", "code"}
ERROR = {ANTHROPIC: {"type", "message"}}

numbers = st.one_of(
    st.integers(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 1, -1, 0.5, 2, 2**31, 2**63, 1e308, 5e-324]),
)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=40)
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": st.text()})
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | leaves,
            "content": st.text(max_size=60) | st.lists(parts, max_size=3) | leaves,
        },
        optional={"name": leaves, "tool_call_id": leaves, "tool_calls": anything},
    ),
    max_size=4,
)
types = st.sampled_from(["object", "array", "string", "integer", "number", "null", "nil"])
schemas = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": types,
            "enum": st.lists(leaves, min_size=1, max_size=3),
            # The last one is refused after a second of a core.
            "multipleOf": st.sampled_from([-1, 0, 0.5, 1, 3, 7, 100, 9_999_991]),
            "maxLength": st.integers(0, 40) | numbers,
            "pattern": st.text(max_size=6),
            "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "http://127.0.0.1:9/a"]),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": types,
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "required": st.lists(st.sampled_from("abc"), max_size=2),
            "items": inner,
            "maxItems": st.integers(0, 3),
            "anyOf": st.lists(inner, max_size=3),
            "allOf": st.lists(inner, max_size=3),
            "$defs": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            "additionalProperties": st.booleans(),
        },
    ),
    max_leaves=6,
)
tool_names = st.sampled_from(["f", "g"]) | st.text(max_size=3)
functions = st.fixed_dictionaries(
    {"name": tool_names}, optional={"parameters": schemas, "description": st.text(max_size=9)}
)
function_tools = st.one_of(
    st.fixed_dictionaries({"type": st.just("function"), "function": functions}),
    functions.map(lambda function: {"type": "function", **function}),
    st.fixed_dictionaries({"name": tool_names, "input_schema": schemas}),
)
formats = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object", "json_schema"])}),
    schemas.map(lambda schema: {"type": "json_schema", "schema": schema}),
    schemas.map(
        lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ),
)
structured = st.one_of(
    schemas.map(lambda schema: {"json": schema}),
    st.text(max_size=12).map(lambda regex: {"regex": regex}),
    st.sampled_from(["a+b", "[0-9]{3}", "(a|b)*", "a{1000}{1000}"]).map(lambda r: {"regex": r}),
    st.lists(st.text(max_size=5), max_size=3).map(lambda choice: {"choice": choice}),
    st.sampled_from(['start: "a"+', "start: start", "start: /[a-z]/ start?"]).map(
        lambda grammar: {"grammar": grammar}
    ),
)
choices = st.one_of(
    st.sampled_from(["auto", "none", "required"]),
    st.just({"type": "function", "function": {"name": "f"}}),
    st.just({"type": "function", "name": "f"}),
    st.sampled_from([{"type": "any"}, {"type": "tool", "name": "f"}, {"type": "auto"}]),
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "messages": messages,
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "max_tokens": st.integers(1, 40),
    "stop": st.lists(st.text(min_size=1, max_size=4), max_size=5) | st.text(max_size=3),
    "stop_sequences": st.lists(st.text(min_size=1, max_size=4), max_size=5),
    "prompt": st.text(max_size=60) | st.lists(st.integers(0, 1100), max_size=20),
    "input": st.text(max_size=60) | messages,
    "system": st.text(max_size=20) | st.lists(parts, max_size=2),
    "instructions": st.text(max_size=20),
    "tools": st.lists(function_tools, max_size=3),
    "tool_choice": choices,
    "response_format": formats,
    "structured_outputs": structured,
    "text": formats.map(lambda format: {"format": format}),
    "output_config": formats.map(lambda format: {"format": format}),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=12), anything, max_size=3),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body."""
    path = draw(st.sampled_from(sorted(CALLS)))
    good, fields = CALLS[path]
    body: dict[str, Any] = dict(good)
    likely = sorted(LIKELY.keys() & fields)
    for name in draw(st.lists(st.sampled_from(likely), max_size=4)):
        body[name] = draw(LIKELY[name])
    if draw(st.integers(0, 2)) == 0:
        body |= draw(st.dictionaries(st.sampled_from(fields) | st.text(), anything, max_size=3))
    data = json.dumps(body).encode()
    if draw(st.integers(0, 4)) == 0:
        place = draw(st.integers(0, len(data)))
        cut = draw(st.integers(0, 5))
        data = data[:place] + draw(st.binary(max_size=6)) + data[place + cut :]
    return path, data


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Server]:
    """Its context is so short that no answer takes long."""
    with running(2, "--max-model-len", "64", "--max-num-seqs", "8") as server:
        yield server


def resident_bytes(server: Server) -> int:
    """Of all its processes."""
    sizes = []
    for process in server.family():
        with suppress(psutil.NoSuchProcess):  # A helper has just ended.
            sizes.append(process.memory_info().rss)
    return sum(sizes)


def run(server: Server, num_bodies: int) -> None:
    counted: Counter[int] = Counter()
    sizes = []
    no_keeping = httpx2.Limits(max_keepalive_connections=0)
    with (
        httpx2.Client(base_url=server.url, limits=no_keeping) as client,
        ThreadPoolExecutor(BODIES_AT_ONCE) as threads,
    ):

        def ask(request: tuple[str, bytes]) -> httpx2.Response:
            path, body = request
            return client.post(path, content=body, headers=JSON)

        @settings(
            max_examples=num_bodies // BODIES_AT_ONCE,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(requests(), min_size=BODIES_AT_ONCE, max_size=BODIES_AT_ONCE))
        def check(many: list[tuple[str, bytes]]) -> None:
            for (path, body), reply in zip(many, threads.map(ask, many), strict=True):
                counted[reply.status_code] += 1
                assert reply.status_code in FINE, (path, body, reply.text)
                if reply.headers["content-type"].startswith("text/event-stream"):
                    events = reply.text.split("\n\n")
                    assert events[-1] == "", (path, body, reply.text)
                    assert events[-2].startswith(LAST_EVENT[path]), (path, body, reply.text)
                    assert '"error":{' not in reply.text, (path, body, reply.text)
                elif reply.status_code >= 400:
                    assert set(reply.json()["error"]) == ERROR.get(path, OPENAI_ERROR)
            pipeline = client.get("/admin/pipeline").json()
            assert pipeline["num_running"] + pipeline["num_waiting"] == 0
            sizes.append(resident_bytes(server))

        check()
    warm = sizes[len(sizes) // 3]
    assert max(sizes[-3:]) - warm < MAX_GROWTH_BYTES, [size >> 20 for size in sizes]
    assert counted[200] > num_bodies / 20, counted
    assert counted[400] > num_bodies / 20, counted
    assert "Traceback" not in server.text


def test_three_hundred_generated_bodies_do_no_harm(fuzzed: Server) -> None:
    run(fuzzed, 300)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_generated_bodies_do_no_harm(fuzzed: Server) -> None:
    began = time.monotonic()
    run(fuzzed, 10_000)
    assert time.monotonic() - began < 800
