"""The call for embeddings over HTTP, from the body to the reply."""

import base64
from array import array
from typing import Any

import httpx2
import pytest

from serve.core.errors import EngineError
from tests.front.fakes import FakeEngine, Running


def post(server: Running, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", **fields}
    return httpx2.post(f"{server.url}/v1/embeddings", json=body)


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        ([5, 6, 7], [[3, 7]]),
        ([[5, 6, 7], [8]], [[3, 7], [1, 8]]),
    ],
)
def test_token_ids_are_embedded_and_counted(server: Running, given: Any, vectors: Any) -> None:
    reply = post(server, input=given).raise_for_status().json()
    num_tokens = int(sum(vector[0] for vector in vectors))
    assert reply == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": n, "embedding": vector}
            for n, vector in enumerate(vectors)
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def test_embeddings_can_be_returned_in_base64(server: Running, engine: FakeEngine) -> None:
    texts = ["hello", "how are you"]
    reply = post(server, input=texts, encoding_format="base64").raise_for_status().json()
    expected = [engine.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    assert engine.prompts == expected
    for item, ids in zip(reply["data"], expected, strict=True):
        assert array("f", base64.b64decode(item["embedding"])).tolist() == [len(ids), ids[-1]]


def test_embeddings_are_computed_a_few_at_a_time(engine: FakeEngine) -> None:
    with Running(engine, max_num_seqs=3) as server:
        reply = post(server, input=[[n + 1] for n in range(8)]).raise_for_status().json()
    assert [item["embedding"] for item in reply["data"]] == [[1, n + 1] for n in range(8)]
    assert len(engine.generations) == 3
    assert all(generation.closed.is_set() for generation in engine.generations)


def test_embeddings_that_fail_are_an_error_and_free_their_rows(
    server: Running, engine: FakeEngine
) -> None:
    engine.breaks_with = EngineError("It broke.")
    assert post(server, input="hello").status_code == 503
    assert engine.generations[-1].closed.is_set()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [999_999]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [[1]] * 2049}, "input"),
        ({"input": [1] * 513}, "input"),
        ({"input": "hello " * 5000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_bad_input_is_refused_with_the_name_of_its_field(
    server: Running, fields: Any, param: str
) -> None:
    reply = post(server, **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_an_input_can_fill_the_context_and_a_longer_input_can_be_truncated(
    server: Running, engine: FakeEngine
) -> None:
    ids = [n % 50 + 3 for n in range(600)]
    assert post(server, input=ids[:512]).status_code == 200
    assert post(server, input=ids, truncate_prompt_tokens=-1).status_code == 200
    assert post(server, input=ids, truncate_prompt_tokens=20).status_code == 200
    assert engine.prompts == [ids[:512], ids[-512:], ids[-20:]]
