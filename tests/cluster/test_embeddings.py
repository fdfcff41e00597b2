"""Embeddings over two real ranks, with OpenAI's client, against mlx_lm's whole model."""

import base64
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from tests.cluster.servers import TINY_CHAT, Server, quick, running

pytestmark = [pytest.mark.long, pytest.mark.uses("embeddings")]

TEXTS = ["Hello", "How are you today?", "The bridge. " * 40, "12 + 30", "a"]
Embed = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def mended() -> Iterator[Server]:
    """A cluster that pools by the mean and may restart."""
    with running(2, "--pooling", "mean", quick(max_restarts=1000)) as server:
        yield server


@pytest.fixture(scope="module")
def hidden_states() -> Embed:
    """mlx_lm's whole model: the hidden states (L, D) of a prompt."""
    import mlx.core as mx
    import mlx_lm

    model, _ = mlx_lm.load(str(TINY_CHAT))

    def hidden(ids: list[int]) -> np.ndarray:
        (states,) = np.array(model.model(mx.array([ids])).astype(mx.float32))
        return states

    return hidden


def ids_of(server: Server, text: str) -> list[int]:
    body = {"model": "tiny-chat", "prompt": text}
    return httpx2.post(f"{server.url}/tokenize", json=body).raise_for_status().json()["tokens"]


def embed(server: Server, given: Any, **fields: Any) -> Any:
    return server.client().embeddings.create(model="tiny-chat", input=given, **fields)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def vectors(reply: Any) -> list[np.ndarray]:
    assert [item.index for item in reply.data] == list(range(len(reply.data)))
    return [np.array(item.embedding) for item in reply.data]


def test_embeddings_equal_those_of_the_whole_model(server: Server, hidden_states: Embed) -> None:
    """The model's files say nothing of pooling, so that its last token counts."""
    ids = [ids_of(server, text) for text in TEXTS]
    expected = [unit(hidden_states(each)[-1]) for each in ids]
    reply = embed(server, TEXTS)
    assert (reply.object, reply.model) == ("list", "tiny-chat")
    total = sum(map(len, ids))
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (total, total)
    for got, wanted in zip(vectors(reply), expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)
    for text, wanted in zip(TEXTS, expected, strict=True):
        assert vectors(embed(server, text))[0] == pytest.approx(wanted, abs=1e-4)


def test_embeddings_of_a_text_and_of_its_tokens_are_equal(server: Server) -> None:
    ids = [ids_of(server, text) for text in TEXTS]
    of_texts = vectors(embed(server, TEXTS))
    of_tokens = vectors(embed(server, ids))
    (alone,) = vectors(embed(server, ids[0]))
    assert alone == pytest.approx(of_texts[0], abs=1e-5)
    for text, tokens in zip(of_texts, of_tokens, strict=True):
        assert tokens == pytest.approx(text, abs=1e-5)


def test_embeddings_have_the_requested_form(server: Server) -> None:
    (plain,) = vectors(embed(server, "Hello", encoding_format="float"))
    encoded = embed(server, "Hello", encoding_format="base64").data[0].embedding
    assert np.frombuffer(base64.b64decode(encoded), "<f4") == pytest.approx(plain, abs=1e-6)
    (cut,) = vectors(embed(server, "Hello", dimensions=8))
    assert cut == pytest.approx(unit(plain[:8]), abs=1e-5)
    assert np.linalg.norm(plain) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_mean_pooling_is_exact_while_chats_run_and_after_a_kill(
    mended: Server, hidden_states: Embed
) -> None:
    """Chats run meanwhile, get what they get alone, and an engine of each rank is killed."""
    client = mended.client()

    def chat(number: int) -> str:
        reply = client.chat.completions.create(
            model="tiny-chat",
            messages=[{"role": "user", "content": f"Tell me of {number} bridges."}],
            temperature=0,
            max_tokens=120,
            extra_body={"ignore_eos": True},
        )
        return reply.choices[0].message.content or ""

    alone = [chat(number) for number in range(3)]
    expected = [unit(hidden_states(ids_of(mended, text)).mean(axis=0)) for text in TEXTS]
    for rank in (None, 0, 1):
        with ThreadPoolExecutor(8) as threads:
            chats = threads.map(chat, range(3))
            embedded = [threads.submit(embed, mended, TEXTS * 3) for _ in range(4)]
            if rank is not None:
                time.sleep(0.1)
                mended.engines()[rank].kill()
            for reply in embedded:
                for n, got in enumerate(vectors(reply.result(60))):
                    assert got == pytest.approx(expected[n % len(TEXTS)], abs=1e-4)
            assert list(chats) == alone
    assert mended.get("/admin/pipeline")["num_running"] == 0


def test_embeddings_do_not_change_the_prefix_cache(server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count the bridges of Venice. " * 8}]
    client = server.client()

    def cached() -> int:
        reply = client.chat.completions.create(
            model="tiny-chat", messages=messages, temperature=0, max_tokens=4
        )
        assert reply.usage
        assert reply.usage.prompt_tokens_details
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    before = server.get("/admin/pipeline")["kv_tokens"]
    embed(server, ["Some bridge. " * 30, "Another. " * 30])
    assert server.get("/admin/pipeline")["kv_tokens"] == before
    assert cached() == 0
    embed(server, "x " * 300)
    assert cached() > 16


def test_hundreds_of_inputs_in_one_request_do_not_fill_the_queue(server: Server) -> None:
    many = vectors(embed(server, [[1, 2, n % 50 + 3] for n in range(600)]))
    assert len(many) == 600
    assert many[7] == pytest.approx(many[57], abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [999_999]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [[1]] * 2049}, "input"),
        ({"input": [1] * 5000}, "input"),
        ({"input": "bridge " * 5000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 100_000}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "normalize": False}, "normalize"),
    ],
)
def test_bad_input_for_embeddings_is_refused_with_the_name_of_its_field(
    server: Server, fields: Any, param: str
) -> None:
    body = {"model": "tiny-chat", **fields}
    reply = httpx2.post(f"{server.url}/v1/embeddings", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_an_input_that_is_too_long_is_truncated_if_the_request_asks_for_it(server: Server) -> None:
    ids = [n % 50 + 3 for n in range(5000)]
    (cut,) = vectors(embed(server, ids, extra_body={"truncate_prompt_tokens": 20}))
    (short,) = vectors(embed(server, ids[-20:]))
    assert cut == pytest.approx(short, abs=1e-5)
    assert embed(server, ids, extra_body={"truncate_prompt_tokens": -1}).usage.total_tokens > 1000


def test_an_unknown_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client().embeddings.create(model="other", input="a")
