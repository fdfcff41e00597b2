"""A head that shards share gives the same replies as the whole head: with every kind of drafts,
grammars, penalties, scores, and adapters that change the head itself.

Which steps share the head, and how many drafts there are, usually depends on times that are
measured. Here inside/sitecustomize.py decides it, so that one cluster gives both replies, also on a
busy machine.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests import adapters, heads
from tests.cluster.servers import Server, running
from tests.cluster.shards.test_shards import check_scores
from tests.cluster.test_speculation import (
    OBJECT,
    TEXT,
    ask,
    comparable,
    save_first_layers,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.uses("adapters", "drafts", "embeddings"),
]

INSIDE = str(Path(__file__).parent / "inside")
NONE, SOME, ALL = 0, 4, 1000  # the largest number of tokens in a step that shares the head
PREDICTION = {"type": "content", "content": TEXT}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "words", "schema": OBJECT}}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
BIAS = {"logit_bias": {"40": 3, "50": -10}}
SCORES = {"logprobs": True, "top_logprobs": 3}
ONE_TOKEN = {
    "model": "tiny-chat",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 1,
}
# head is an adapter of the head and of layers, body one of layers alone.
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0, **SCORES, "prompt_logprobs": 1, "prediction": PREDICTION},
    {"temperature": 0.8, **SCORES, **PENALTIES, **BIAS, "prediction": PREDICTION},
    {"temperature": 0.7, **SCORES, "structured_outputs": {"json": OBJECT}},
    {"temperature": 0.7, "tools": [WEATHER], "tool_choice": "required"},
    {"temperature": 0.9, "n": 2, "min_tokens": 20, "bad_words": ["red", "the"]},
    {"temperature": 0.6, "model": "body", **SCORES, "prediction": PREDICTION},
    {"temperature": 0, "model": "head", **SCORES, "prompt_logprobs": 1, "ignore_eos": True},
    {"temperature": 0.6, "model": "head", **SCORES, **PENALTIES, **BIAS, "ignore_eos": True},
    {"temperature": 0.7, "model": "head", "response_format": SCHEMA, "prediction": PREDICTION},
]


def said(server: Server, body: dict[str, Any]) -> Any:
    """A reply as it can be compared: ids of calls are random."""
    reply = ask(server, body)
    for choice in reply["choices"]:
        for call in choice["message"].get("tool_calls", []):
            call["id"] = ""
    return comparable(reply)


def bodies() -> Iterator[dict[str, Any]]:
    for seed, fields in enumerate(FIELDS):
        message = {"role": "user", "content": f"Say this {seed + 2} times: {TEXT}"}
        body = {"model": "tiny-chat", "messages": [message], "max_tokens": 24, "seed": seed}
        yield body | fields


@dataclass(frozen=True)
class Cluster:
    """A cluster whose steps share the head as a test says. model is the folder of its model, and
    head that of the adapter called head."""

    server: Server
    notes: Path
    model: Path
    head: Path

    @contextmanager
    def sharing(self, max_tokens: int) -> Iterator[list[tuple[int, int]]]:
        """Lets steps of up to max_tokens share the head, inside a with block. Afterwards the
        list has the numbers of rows and drafts of each step that did."""
        noted: list[tuple[int, int]] = []
        before = self._noted()
        write_max_tokens(self.notes, max_tokens)
        try:
            yield noted
        finally:
            write_max_tokens(self.notes, NONE)
        # A step that was sent ahead may still run. The steps of another request come after it.
        ask(self.server, ONE_TOKEN)
        noted += self._noted()[len(before) :]

    def _noted(self) -> list[tuple[int, int]]:
        files = list(self.notes.glob("steps-*"))
        if not files:
            return []
        first, *others = [file.read_text() for file in files]
        assert others, "only one shard has shared the head"
        assert all(other == first for other in others), "shards differ in the steps that share it"
        lines = [line.split() for line in first.splitlines()]
        return [(int(num_rows), int(num_drafts)) for num_rows, num_drafts in lines]

    def embedding(self) -> np.ndarray:
        body = {"model": "tiny-chat", "input": "The bridge. " * 20}
        reply = httpx2.post(f"{self.server.url}/v1/embeddings", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return np.array(reply.json()["data"][0]["embedding"])


def write_max_tokens(notes: Path, max_tokens: int) -> None:
    """Replaces the file at once, because rank 0 reads it at each step."""
    new = notes / "new"
    new.write_text(str(max_tokens))
    new.replace(notes / "max_tokens")


@contextmanager
def cluster(folder: Path, num_ranks: int, model: Path, key: str, *flags: str) -> Iterator[Cluster]:
    """key names the head among the modules of the model."""
    notes = folder / "notes"
    notes.mkdir()
    write_max_tokens(notes, ALL)
    keys = {"head": [key, *adapters.KEYS], "body": adapters.KEYS}
    loras: list[str] = []
    for seed, (name, own_keys) in enumerate(keys.items()):
        whole, _ = mlx_lm.load(str(model))
        adapters.save_adapter(folder / name, whole, seed, keys=own_keys, size=0.1)
        loras += ["--lora-modules", f"{name}={folder / name}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", INSIDE, prepend=":")
        patch.setenv("SHARED_HEAD", str(notes))
        with running(num_ranks, *loras, *flags, model=model) as server:
            first, *_ = server.get("/admin/pipeline")["stages"]
            assert first["shared_head_tokens"] == ALL
            write_max_tokens(notes, NONE)
            yield Cluster(server, notes, model, folder / "head")


def with_prediction_head(folder: Path) -> Path:
    """Two layers with a random prediction head, and with a head that is not the embedding."""
    model = heads.chat_model(folder / "tiny-chat", save_first_layers(folder / "layers"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["lm_head.weight"] = mx.array(weights["model.embed_tokens.weight"])
    mx.eval(weights)
    mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})
    return model


def check_mlx_lm(cluster: Cluster) -> None:
    """Compares greedy answers and all log-probabilities with mlx_lm on the whole model, without and
    with the adapter of the head."""
    for name, adapter in (("tiny-chat", None), ("head", cluster.head)):
        with cluster.sharing(ALL) as shared:
            check_scores(cluster.server, 12, cluster.model, name, adapter)
        assert shared


def check_replies(cluster: Cluster, drafter: str) -> None:
    """Compares replies of a shared head with those of the whole one: one by one, and in batches in
    which rows have different adapters, sampling and numbers of drafts. The drafter is to have made
    some of the drafts."""
    server = cluster.server
    with cluster.sharing(NONE) as shared:
        expected = [said(server, body) for body in bodies()]
        embedding = cluster.embedding()
    assert not shared
    with cluster.sharing(ALL) as shared:
        replies = [said(server, body) for body in bodies()]
    for body, reply, wanted in zip(bodies(), replies, expected, strict=True):
        assert reply == wanted, body
    assert any(num_drafts for _, num_drafts in shared)
    # Steps with many drafts use the whole head, between others that share it.
    with cluster.sharing(SOME) as shared, ThreadPoolExecutor(SOME) as threads:
        beside = threads.submit(cluster.embedding)
        together = list(threads.map(lambda body: said(server, body), bodies()))
    for body, reply, wanted in zip(bodies(), together, expected, strict=True):
        assert reply == wanted, body
    assert beside.result() == pytest.approx(embedding, abs=1e-4)
    assert any(num_rows > 1 for num_rows, _ in shared)
    assert all(num_rows + num_drafts <= SOME for num_rows, num_drafts in shared)
    drafts = server.get("/admin/pipeline")["drafts"]
    assert drafts[drafter]["drafted"] > 0, drafts


def test_sharing_the_head_changes_no_reply_with_a_prediction_head(tmp_path: Path) -> None:
    model = with_prediction_head(tmp_path)
    flags = ("--tensor-parallel-size", "2", "--draft-model", "mtp")
    with cluster(tmp_path, 2, model, "lm_head", *flags) as shards:
        check_mlx_lm(shards)
        check_replies(shards, "model")


def test_sharing_a_tied_head_changes_no_reply_with_a_draft_model(
    tmp_path: Path,
) -> None:
    """The draft model is the model itself, so that many drafts are right."""
    model = save_first_layers(tmp_path / "tiny-chat")
    flags = ("--tensor-parallel-size", "2", "--draft-model", str(model))
    with cluster(tmp_path, 4, model, "model.embed_tokens", *flags) as shards:
        check_mlx_lm(shards)
        check_replies(shards, "model")


def test_sharing_the_head_in_unequal_parts_changes_no_reply(tmp_path: Path) -> None:
    """Three shards have 342, 342 and 340 of 1024 tokens. All guesses come from the texts."""
    model = save_first_layers(tmp_path / "tiny-chat")
    with cluster(tmp_path, 3, model, "model.embed_tokens", "--tensor-parallel-size", "3") as shards:
        check_mlx_lm(shards)
        check_replies(shards, "prediction")
