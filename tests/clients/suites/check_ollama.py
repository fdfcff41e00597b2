"""Ollama's official client, as somebody who has it pointed at Brigade would use it."""

import json
import os

import ollama
import pytest

HOST = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
CLIENT = ollama.Client(host=HOST)
SAID = [{"role": "user", "content": "Say the alphabet."}]
OPTIONS = {"temperature": 0, "num_predict": 30}


def test_the_model_is_listed() -> None:
    (model,) = CLIENT.list().models
    assert model.model == "tiny-chat"
    assert "completion" in CLIENT.show("tiny-chat").capabilities


@pytest.mark.parametrize("model", ["tiny-chat", "tiny-chat:latest"])
def test_a_stream_adds_up_to_the_reply(model: str) -> None:
    reply = CLIENT.chat(model, SAID, options=OPTIONS)
    chunks = list(CLIENT.chat(model, SAID, options=OPTIONS, stream=True))
    assert reply.message.content.startswith("a, b, c")
    assert "".join(chunk.message.content for chunk in chunks) == reply.message.content
    for last in (reply, chunks[-1]):
        assert last.done
        assert last.done_reason in ("stop", "length")
        assert last.eval_count == reply.eval_count > 3
        assert last.total_duration >= last.eval_duration > 0


def test_a_prompt_is_continued_if_raw_and_answered_otherwise() -> None:
    raw = CLIENT.generate("tiny-chat", "a, b, c,", raw=True, options=OPTIONS)
    assert raw.response
    chunks = list(CLIENT.generate("tiny-chat", "Say the alphabet.", options=OPTIONS, stream=True))
    assert "".join(chunk.response for chunk in chunks).startswith("a, b, c")


def test_an_answer_follows_its_format() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    reply = CLIENT.chat("tiny-chat", SAID, format=schema, options={"num_predict": 60})
    assert json.loads(reply.message.content) in ({"a": 1}, {"a": 2})


def test_a_history_with_calls_is_accepted() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    history = [
        *SAID,
        {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "Hm"},
        {"role": "tool", "content": "4", "tool_name": "f"},
    ]
    assert CLIENT.chat("tiny-chat", history, options=OPTIONS).done


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_returned_with_the_text(stream: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "options": OPTIONS, "stream": stream}
    chat = CLIENT.chat("tiny-chat", SAID, **fields)
    generated = CLIENT.generate("tiny-chat", SAID[0]["content"], **fields)
    for reply in (chat, generated):
        parts = list(reply) if stream else [reply]
        scores = [score for part in parts for score in part.logprobs or ()]
        assert len(scores) == parts[-1].eval_count
        for score in scores:
            assert score.logprob == score.top_logprobs[0].logprob <= 0, "greedy"
            assert len(score.top_logprobs) == 2


def test_texts_are_embedded() -> None:
    reply = CLIENT.embed("tiny-chat", ["hello", "how are you"], dimensions=8)
    assert [len(vector) for vector in reply.embeddings] == [8, 8]
    assert reply.prompt_eval_count > 2
    assert reply.total_duration > 0
    whole = CLIENT.embed("tiny-chat", "hello").embeddings[0]
    assert sum(number * number for number in whole) == pytest.approx(1, abs=1e-3)
    assert CLIENT.embeddings("tiny-chat", "hello").embedding == pytest.approx(whole, abs=1e-6)


def test_a_prompt_that_is_too_long_is_shortened() -> None:
    text = "hello " * CLIENT.show("tiny-chat").modelinfo["brigade.context_length"]
    assert CLIENT.chat("tiny-chat", [{"role": "user", "content": text}], options=OPTIONS).done
    assert CLIENT.embed("tiny-chat", text).prompt_eval_count > 1000
    with pytest.raises(ollama.ResponseError, match="context length"):
        CLIENT.embed("tiny-chat", text, truncate=False)


def test_loading_and_unloading_are_reported_but_the_model_stays() -> None:
    assert CLIENT.generate("tiny-chat", keep_alive=0).done_reason == "unload"
    assert CLIENT.generate("tiny-chat").done_reason == "load"
    assert CLIENT.ps().models


def test_the_client_of_ollama_raises_its_response_error() -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        CLIENT.chat("nobody", SAID)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature"):
        CLIENT.chat("tiny-chat", SAID, options={"temperature": 9})


async def test_the_asynchronous_client_streams_to_the_end() -> None:
    client = ollama.AsyncClient(host=HOST)
    stream = await client.chat("tiny-chat", SAID, options=OPTIONS, stream=True)
    assert [chunk async for chunk in stream][-1].done
