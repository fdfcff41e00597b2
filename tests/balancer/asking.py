"""Single requests to a balancer or a cluster."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from tests.balancer.load import read_stream
from tests.balancer.programs import Balancer

NUM_LONG_TOKENS = 1900


def ask(
    url: str, key: str, messages: list[dict[str, str]], session: str = "none", **fields: Any
) -> httpx2.Response:
    body = {"model": "tiny-chat", "messages": messages, "temperature": 0, "max_tokens": 24}
    headers = {"authorization": f"Bearer {key}", "x-litellm-session-id": session}
    return httpx2.post(f"{url}/v1/chat/completions", json={**body, **fields}, headers=headers)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@contextmanager
def long_stream(balancer: Balancer, conversation: str = "") -> Iterator[tuple[int, Iterator[str]]]:
    """The cluster of a long stream that has begun, and what is left of its texts. It is of a new
    conversation unless one is named."""
    body = {"model": "tiny-chat", "messages": [user("Sing.")], "stream": True, "ignore_eos": True}
    body |= {"max_tokens": NUM_LONG_TOKENS, "prompt_cache_key": conversation or uuid.uuid4().hex}
    headers = {"authorization": f"Bearer {balancer.key}"}
    url = f"{balancer.url}/v1/chat/completions"
    with httpx2.stream("POST", url, json=body, headers=headers, timeout=120) as reply:
        assert reply.status_code == 200, reply.read()
        texts = read_stream(reply)
        next(texts)
        yield balancer.cluster_of(reply), texts
