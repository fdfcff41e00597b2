"""Ollama's calls over real sockets."""

import json
from typing import Any

import httpx2
import pytest

from serve.front.api.writers.ollama import OllamaWriter, WholeOllama
from serve.front.output.deltas import CallBegin, CallEnd, CallText, Text, Thought
from serve.front.text.tokens import Tokenizer
from tests.front.api.writers.updates import begin, end, scored, update
from tests.front.fakes import MAX_CONTEXT, FakeEngine, Running

SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def post(server: Running, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body)


def lines(reply: httpx2.Response) -> list[Any]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_chat_is_streamed_as_lines_of_json_by_default(
    server: Running, engine: FakeEngine
) -> None:
    *others, last = lines(post(server, "/api/chat", model="tiny", **SAID))
    assert "".join(line["message"]["content"] for line in others) == engine.answer
    assert not any(line["done"] for line in others)
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", "tiny")
    assert last["prompt_eval_count"] == len(engine.prompts[0])
    assert all(isinstance(last[name], int) and last[name] >= 0 for name in DURATIONS)


def test_a_chat_without_a_stream_equals_the_sum_of_the_lines_of_a_stream(shared: Running) -> None:
    reply = post(shared, "/api/chat", **SAID, stream=False).json()
    streamed = lines(post(shared, "/api/chat", **SAID))
    assert reply["message"]["content"] == "".join(each["message"]["content"] for each in streamed)
    assert (reply["done"], reply["eval_count"]) == (True, streamed[-1]["eval_count"])


def test_the_call_generate_answers_a_prompt_or_continues_a_raw_prompt(
    server: Running, engine: FakeEngine
) -> None:
    answered = post(server, "/api/generate", prompt="hi", system="s", stream=False).json()
    continued = lines(post(server, "/api/generate", prompt="hi", raw=True))
    assert answered["response"] == "".join(each["response"] for each in continued)
    decoded = [engine.tokenizer.decode(ids) for ids in engine.prompts]
    assert decoded == ["<|system|>s<|user|>hi<|assistant|>", "hi"]


def test_options_are_read_as_sampling_parameters(server: Running, engine: FakeEngine) -> None:
    options = {"temperature": 0.5, "top_k": 7, "seed": 3, "repeat_penalty": 1.5, "num_ctx": 99}
    reply = post(server, "/api/chat", **SAID, options={**options, "num_predict": 2}, stream=False)
    (sampling,) = engine.samplings
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 3)
    assert sampling.repetition_penalty == 1.5
    assert (reply.json()["done_reason"], reply.json()["eval_count"]) == ("length", 2)


@pytest.mark.parametrize("format", ["json", {"type": "object", "properties": {}}])
def test_a_format_is_enforced_by_a_grammar(
    server: Running, engine: FakeEngine, format: Any
) -> None:
    assert post(server, "/api/chat", **SAID, format=format).status_code == 200
    assert engine.samplings[0].grammar


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/api/chat", {**SAID, "model": "other"}, "does not exist"),
        ("/api/chat", {**SAID, "options": {"temperature": 9}}, "temperature"),
        ("/api/chat", {"messages": [{"role": "user", "content": "", "images": ["x"]}]}, "images"),
        ("/api/chat", {**SAID, "format": "yaml"}, "format"),
        ("/api/generate", {"prompt": "hi", "images": ["x"]}, "images"),
        ("/api/generate", {"prompt": "hi", "suffix": "x"}, "suffix"),
        ("/api/generate", {"prompt": "hi", "context": [1]}, "context"),
        ("/api/show", {"model": "other"}, "does not exist"),
    ],
)
def test_errors_have_the_form_of_ollama(
    shared: Running, path: str, body: dict[str, Any], word: str
) -> None:
    reply = post(shared, path, **body)
    assert reply.status_code in (400, 404)
    assert reply.json().keys() == {"error"}
    assert word in reply.json()["error"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_without_a_prompt_is_answered_as_a_load_or_unload(
    shared: Running, path: str
) -> None:
    for keep_alive, reason in ((0, "unload"), ("0s", "unload"), ("5m", "load"), (None, "load")):
        reply = post(shared, path, model="tiny:latest", keep_alive=keep_alive).json()
        assert (reply["done"], reply["done_reason"]) == (True, reason)


def test_models_are_listed(shared: Running) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = httpx2.get(shared.url + path).json()["models"]
        assert model["name"] == model["model"] == "tiny"
    assert httpx2.get(f"{shared.url}/api/version").json()["version"]
    shown = post(shared, "/api/show", model="tiny").json()
    assert shown["model_info"]["brigade.context_length"] == 512
    assert "completion" in shown["capabilities"]


def test_calls_are_sent_whole_after_thinking_and_text(tokenizer: Tokenizer) -> None:
    updates = [begin(Thought("Hm"), Text("a")), end("tool_calls")]
    updates.insert(1, begin(CallBegin("1", "f"), CallText('{"x"'), CallText(":1}"), CallEnd()))
    writer, whole = OllamaWriter("m", True, tokenizer), WholeOllama("m", True, tokenizer)
    said = [line["message"] for update in updates for line in writer.feed(update)]
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    assert [each.get("thinking") for each in said] == ["Hm", None, None, None]
    assert said[2]["tool_calls"] == [call]
    for each in updates:
        list(whole.feed(each))
    message = whole.whole()["message"]
    assert message == {
        "role": "assistant",
        "content": "a",
        "thinking": "Hm",
        "tool_calls": [call],
    }


# --- scores


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", SAID),
        ("/api/generate", {"prompt": "hi"}),
        ("/api/generate", {"prompt": "hi", "raw": True}),
    ],
    ids=["chat", "generate", "raw"],
)
def test_logprobs_equal_those_of_openai_chats(
    server: Running, path: str, fields: dict[str, Any]
) -> None:
    openai = {**SAID, "model": "tiny", "logprobs": True, "top_logprobs": 2}
    chat = post(server, "/v1/chat/completions", **openai).json()
    asked = {**fields, "logprobs": True, "top_logprobs": 2}
    streamed = lines(post(server, path, **asked))
    reply = post(server, path, **asked, stream=False).json()
    assert reply["logprobs"] == chat["choices"][0]["logprobs"]["content"]
    assert [score for line in streamed for score in line["logprobs"]] == reply["logprobs"]
    alone = post(server, path, **fields, logprobs=True, stream=False).json()
    assert [score["top_logprobs"] for score in alone["logprobs"]] == [[]] * alone["eval_count"]
    assert "logprobs" not in post(server, path, **fields, stream=False, top_logprobs=2).json()


def test_logprobs_are_kept_until_a_line_can_be_sent(tokenizer: Tokenizer) -> None:
    updates = list(scored([begin(Text("a")), update(), update(Text("bc")), end()]))
    writer = OllamaWriter("m", True, tokenizer)
    written = [line["logprobs"] for each in updates for line in writer.feed(each)]
    assert [len(scores) for scores in written] == [1, 2, 1]


# --- prompts that are too long


def long(num_words: int) -> str:
    return "hello " * num_words


def history(num_words: int) -> dict[str, Any]:
    """A chat whose turns have num_words words, between a system message and a question."""
    turns = [{"role": role, "content": long(num_words)} for role in ("user", "assistant") * 2]
    question = {"role": "user", "content": "how are you"}
    return {"messages": [{"role": "system", "content": "count:"}, *turns, question]}


def test_the_oldest_messages_of_a_long_chat_are_left_out(
    server: Running, engine: FakeEngine
) -> None:
    assert post(server, "/api/chat", **history(100)).status_code == 200
    prompt = engine.tokenizer.decode(engine.prompts[0])
    assert prompt.startswith("<|system|>count:<|")
    assert prompt.endswith("<|user|>how are you<|assistant|>")
    assert 100 <= prompt.count("hello") < 400
    assert len(engine.prompts[0]) <= MAX_CONTEXT * 3 // 4


@pytest.mark.parametrize(("num_predict", "num_kept"), [(None, 384), (9999, 384), (5, 507)])
@pytest.mark.parametrize("raw", [False, True])
def test_the_beginning_of_a_prompt_that_is_too_long_is_cut_off(
    server: Running, engine: FakeEngine, raw: bool, num_predict: int | None, num_kept: int
) -> None:
    options = {"num_predict": num_predict}
    asked = {"prompt": long(600) + "STOP", "options": options, "raw": raw, "stream": False}
    reply = post(server, "/api/generate", **asked).json()
    assert (reply["prompt_eval_count"], len(engine.prompts[0])) == (num_kept, num_kept)
    assert reply["eval_count"] > 1
    assert "hello STOP" in engine.tokenizer.decode(engine.prompts[0])[-30:]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", history(100)),
        ("/api/generate", {"prompt": long(600)}),
        ("/api/generate", {"prompt": long(600), "raw": True}),
        ("/api/embed", {"input": long(600)}),
    ],
    ids=["chat", "generate", "raw", "embed"],
)
def test_a_prompt_that_is_too_long_is_refused_if_it_may_not_be_shortened(
    shared: Running, path: str, fields: dict[str, Any]
) -> None:
    reply = post(shared, path, **fields, truncate=False)
    assert reply.status_code == 400
    assert "maximum context length is 512" in reply.json()["error"]


# --- embeddings


def test_the_call_embed_returns_the_same_vectors_as_openai_embeddings(
    server: Running, engine: FakeEngine
) -> None:
    texts = ["hello", "how are you"]
    hints = {"keep_alive": "5m", "options": {"num_ctx": 99}}
    reply = post(server, "/api/embed", model="tiny", input=texts, **hints)
    data = post(server, "/v1/embeddings", model="tiny", input=texts).json()["data"]
    found = reply.json()
    assert found["embeddings"] == [each["embedding"] for each in data]
    assert found["prompt_eval_count"] == sum(map(len, engine.prompts[:2]))
    assert (found["model"], found["load_duration"]) == ("tiny", 0)
    assert found["total_duration"] > 0
    assert "x-ignored-fields" not in reply.headers
    alone = post(server, "/api/embed", input="hello", dimensions=0).json()
    assert alone["embeddings"] == found["embeddings"][:1]
    older = post(server, "/api/embeddings", prompt="hello", **hints).json()
    assert older == {"embedding": alone["embeddings"][0]}


def test_the_call_embed_can_shorten_the_vectors(server: Running, engine: FakeEngine) -> None:
    assert post(server, "/api/embed", input="hello", dimensions=1).status_code == 200
    assert [pooling.num_dimensions for pooling in engine.poolings] == [1]


def test_the_call_embed_cuts_off_the_end_of_an_input_that_is_too_long(
    server: Running, engine: FakeEngine
) -> None:
    text = "STOP " + long(600)
    found = post(server, "/api/embed", input=[text, "hello"]).json()
    assert found["prompt_eval_count"] == 512 + len(engine.prompts[1])
    assert engine.prompts[0] == engine.tokenizer.encode(text, add_special_tokens=True)[:512]
    assert post(server, "/api/embeddings", prompt=text).status_code == 400


@pytest.mark.parametrize("given", ["", []])
def test_the_call_embed_returns_no_vector_for_no_text(shared: Running, given: Any) -> None:
    assert post(shared, "/api/embed", input=given).json() == {"model": "tiny", "embeddings": []}
    assert post(shared, "/api/embeddings", prompt="").json() == {"embedding": []}


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        ("/api/embed", {}, "input"),
        ("/api/embed", {"input": [1]}, "input"),
        ("/api/embed", {"input": ["a", ""]}, "input"),
        ("/api/embed", {"input": ["a"] * 2049}, "input"),
        ("/api/embed", {"input": "a", "dimensions": -1}, "dimensions"),
        ("/api/embed", {"input": "a", "model": "other"}, "does not exist"),
        ("/api/embeddings", {}, "prompt"),
        ("/api/embeddings", {"prompt": 5}, "prompt"),
        ("/api/chat", {**SAID, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_errors_about_embeddings_and_logprobs_name_the_field(
    shared: Running, path: str, fields: dict[str, Any], word: str
) -> None:
    reply = post(shared, path, **fields)
    assert reply.status_code in (400, 404)
    assert reply.json().keys() == {"error"}
    assert word in reply.json()["error"]
