"""Calls that the length limit or a stop string cuts off, in the four APIs, streamed and not."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from serve.front.text.tokens import Tokenizer
from tests.agents.played import PlayedEngine, save_model
from tests.front.fakes import Running

NAME = "w"
ASKED = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"t": {"type": "string", "minLength": 300}},
    "required": ["t"],
}
FUNCTION = {"name": NAME, "parameters": SCHEMA}
CALL = f'<tool_call>{{"name": "{NAME}", "arguments": {{"t": "{"x" * 320}"}}}}</tool_call>'
NAMED_AFTER = CALL.index(NAME) + len(NAME) + 1  # characters
LIMITS = range(1, 61)


@dataclass
class Seen:
    """What a client gets. calls are the arguments of each, and whether it is complete."""

    text: str = ""
    calls: list[tuple[Any, bool]] = field(default_factory=list)
    reason: Any = None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_model(tmp_path_factory.mktemp("played")))


@pytest.fixture(scope="module")
def url(tokenizer: Tokenizer) -> Iterator[str]:
    engine = PlayedEngine(tokenizer, lambda _prompt, _is_allowed: CALL)
    with Running(engine, max_context=4096) as running:
        yield running.url


def post(url: str, path: str, body: Any) -> list[Any]:
    """The reply, or the events of a stream."""
    reply = httpx2.post(url + path, json=body, timeout=60).raise_for_status()
    if not body["stream"]:
        return [reply.json()]
    data = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    return [json.loads(each) for each in data if each.startswith("{")]


def chat(url: str, *, is_stream: bool, is_forced: bool, **limit: Any) -> Seen:
    tools = {"tools": [{"type": "function", "function": FUNCTION}]}
    choice = {"tool_choice": "required" if is_forced else "auto"}
    body = {"messages": ASKED, **tools, **choice, **limit, "stream": is_stream}
    seen = Seen()
    arguments: list[str] = []
    for event in post(url, "/v1/chat/completions", body):
        (choice,) = event["choices"]
        said: Any = choice.get("delta") or choice.get("message") or {}
        seen.text += said.get("content") or ""
        for call in said.get("tool_calls") or ():
            arguments += [""] if "id" in call else []
            arguments[-1] += call["function"]["arguments"]
        seen.reason = choice["finish_reason"]
    is_complete = seen.reason == "tool_calls"
    seen.calls = [(each, is_complete) for each in arguments]
    return seen


def responses(url: str, *, is_stream: bool, is_forced: bool, **limit: Any) -> Seen:
    if "max_tokens" in limit:
        limit = {"max_output_tokens": limit["max_tokens"]}
    tools = {"tools": [{"type": "function", **FUNCTION}]}
    choice = {"tool_choice": "required" if is_forced else "auto"}
    body = {"input": "hi", **tools, **choice, **limit, "stream": is_stream}
    last = post(url, "/v1/responses", body)[-1]
    response = last.get("response", last)
    seen = Seen(reason=response["status"])
    for item in response["output"]:
        if item["type"] == "message":
            seen.text += "".join(part["text"] for part in item["content"])
        else:
            seen.calls.append((item["arguments"], item["status"] == "completed"))
    assert (response["incomplete_details"] is not None) == (seen.reason == "incomplete")
    return seen


def messages(url: str, *, is_stream: bool, is_forced: bool, **limit: Any) -> Seen:
    if "stop" in limit:
        limit = {"stop_sequences": limit["stop"], "max_tokens": 900}
    tools = {"tools": [{"name": NAME, "input_schema": SCHEMA}]}
    choice = {"tool_choice": {"type": "any" if is_forced else "auto"}}
    body = {"messages": ASKED, **tools, **choice, **limit, "stream": is_stream}
    events = post(url, "/v1/messages", body)
    if is_stream:
        return _streamed_message(events)
    (message,) = events
    seen = Seen(reason=message["stop_reason"])
    for block in message["content"]:
        seen.text += block.get("text", "")
        if block["type"] == "tool_use":
            assert block["input"].keys() in ({"t"}, {"INVALID_JSON"})
            is_complete = "t" in block["input"] or seen.reason == "tool_use"
            seen.calls.append((block["input"].get("INVALID_JSON"), is_complete))
    return seen


def _streamed_message(events: list[Any]) -> Seen:
    seen = Seen()
    arguments: list[str] = []
    for event in events:
        delta = event.get("delta", {})
        seen.text += delta.get("text", "")
        seen.reason = delta.get("stop_reason", seen.reason)
        if event.get("content_block", {}).get("type") == "tool_use":
            arguments.append("")
        elif "partial_json" in delta:
            arguments[-1] += delta["partial_json"]
    seen.calls = [(each, seen.reason == "tool_use") for each in arguments]
    return seen


def ollama(url: str, *, is_stream: bool, is_forced: bool, **limit: Any) -> Seen:
    assert not is_forced, "Ollama's API has no such field"
    names = {"max_tokens": "num_predict", "stop": "stop"}
    options = {names[name]: value for name, value in limit.items()}
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": ASKED, "tools": tools, "options": options, "stream": is_stream}
    seen = Seen()
    for line in post(url, "/api/chat", body):
        seen.text += line["message"]["content"]
        calls = line["message"].get("tool_calls", ())
        seen.calls += [(call["function"]["arguments"], True) for call in calls]
        seen.reason = line.get("done_reason")
    return seen


ASK = {"chat": chat, "responses": responses, "messages": messages, "ollama": ollama}
CUT = {"chat": "length", "responses": "incomplete", "messages": "max_tokens", "ollama": "length"}
STOPPED = {"chat": "stop", "responses": "incomplete", "messages": "stop_sequence", "ollama": "stop"}
ways = pytest.mark.parametrize(
    ("api", "is_forced"),
    [(api, is_forced) for api in ASK for is_forced in (False, True) if api != "ollama"]
    + [("ollama", False)],
)


@ways
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_call_that_the_token_limit_cuts_off_is_reported_as_incomplete(
    url: str, tokenizer: Tokenizer, api: str, is_forced: bool, is_stream: bool
) -> None:
    tokens = tokenizer.encode(CALL)
    for limit in LIMITS if is_forced else LIMITS[::7]:
        written = tokenizer.decode(tokens[:limit])
        seen = ASK[api](url, is_stream=is_stream, is_forced=is_forced, max_tokens=limit)
        assert seen.reason == CUT[api], limit
        if len(written) >= NAMED_AFTER:
            begun = written.partition('"arguments": ')[2]
            assert seen.calls == ([] if api == "ollama" else [(begun, False)]), limit
            assert seen.text == "", limit
        else:
            assert seen.calls == []
            assert seen.text == ("" if is_forced else written), limit


@ways
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("stop", "begun"), [("xxx", '{"t": "'), ("arg", "")])
def test_a_call_that_a_stop_string_cuts_off_is_reported_as_incomplete(
    url: str, api: str, is_forced: bool, is_stream: bool, stop: str, begun: str
) -> None:
    seen = ASK[api](url, is_stream=is_stream, is_forced=is_forced, stop=[stop])
    assert seen == Seen("", [] if api == "ollama" else [(begun, False)], STOPPED[api])


@ways
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_call_that_is_not_cut_off_is_reported_as_complete(
    url: str, api: str, is_forced: bool, is_stream: bool
) -> None:
    seen = ASK[api](url, is_stream=is_stream, is_forced=is_forced, max_tokens=900)
    ((_, is_complete),) = seen.calls
    assert (seen.text, is_complete) == ("", True)
