"""/tokenize and /detokenize over HTTP, as vLLM's clients use them."""

import threading
from typing import Any

import httpx2
import pytest

from serve.front.http import replies
from tests.front.fakes import MAX_CONTEXT, Running


def post(server: Running, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body)


def test_a_prompt_can_be_encoded_and_decoded(shared: Running) -> None:
    tokenizer = shared.engine.tokenizer
    tokenized = post(shared, "/tokenize", model="tiny", prompt="hello <s>world").json()
    assert tokenized["tokens"] == tokenizer.encode("hello <s>world")
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == MAX_CONTEXT
    assert tokenized["token_strs"] is None
    back = post(shared, "/detokenize", tokens=tokenized["tokens"]).json()
    assert back == {"prompt": "hello <s>world"}


def test_messages_are_encoded_with_the_chat_template(shared: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokenized = post(shared, "/tokenize", messages=messages, return_token_strs=True).json()
    assert shared.engine.tokenizer.decode(tokenized["tokens"]) == "<|user|>hi<|assistant|>"
    assert "".join(tokenized["token_strs"]) == "<|user|>hi<|assistant|>"
    bare = post(shared, "/tokenize", messages=messages, add_generation_prompt=False).json()
    assert shared.engine.tokenizer.decode(bare["tokens"]) == "<|user|>hi"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_errors_about_wrong_fields_name_them(
    shared: Running, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    reply = post(shared, path, **body)
    assert reply.status_code == status
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [5]})]
)
def test_long_replies_are_encoded_outside_of_the_event_loop(
    shared: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    """Millions of ids take seconds, in which nobody else would get anything."""
    threads, encode = [], replies.encode

    def noted(reply: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return encode(reply)

    monkeypatch.setattr(replies, "encode", noted)
    assert post(shared, path, **body).status_code == 200
    assert [name.startswith("tokenize") for name in threads] == [True]
