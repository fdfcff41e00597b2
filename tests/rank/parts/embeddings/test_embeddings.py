"""Embeddings of whole pipelines in one process, against the hidden states of mlx_lm's model."""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from serve.core.messages import Embed, Result
from serve.core.types import Pooling, Row, Sequence, Step
from serve.front.pipeline.scheduler import Scheduler
from serve.model.stage import Stage
from serve.rank.cache import ForwardPass
from serve.rank.parts.embeddings.part import EmbeddingsPart
from tests import architectures
from tests.models import build
from tests.rank.test_pipeline import GREEDY, LLAMA, LocalPipeline, pipeline, whole_model

Kind = Literal["mean", "last", "cls"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PROMPTS = [[7], [1, 2], [5, 6, 7, 8, 9], list(range(3, 40)), list(range(1, 90)), [9] * 13]
OTHERS = [[1, 2, 3], list(range(2, 60))]


def embed_slowly(
    model: nn.Module, prompt: list[int], kind: Kind, num_dimensions: int | None = None
) -> np.ndarray:
    """The slow way: the whole model's hidden states, pooled."""
    (hidden,) = np.array(model.model(mx.array([prompt])).astype(mx.float32))
    pooled = {"mean": hidden.mean(axis=0), "last": hidden[-1], "cls": hidden[0]}[kind]
    cut = pooled[:num_dimensions]
    return cut / np.linalg.norm(cut)


def numbers_of(embedding: bytes | None) -> np.ndarray:
    assert embedding is not None
    return np.frombuffer(embedding, "<f4")


def sequence(local: LocalPipeline, id: int, prompt: list[int], pooling: Pooling) -> Sequence:
    local.poolings[id] = pooling
    return Sequence(id, prompt, 0, GREEDY, frozenset())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_embeddings_equal_those_of_the_whole_model_alone_and_beside_generation(
    num_ranks: int, kind: Kind
) -> None:
    with pipeline(num_ranks) as local:
        local.scheduler.reuse = "any"
        local.answer([sequence(local, 50, PROMPTS[4], Pooling(kind))])
        answers = [Sequence(i, p, 12, GREEDY, frozenset()) for i, p in enumerate(OTHERS)]
        embedded = [sequence(local, 100 + i, p, Pooling(kind)) for i, p in enumerate(PROMPTS)]
        output = local.answer([*answers, *embedded])
    for i, prompt in enumerate(PROMPTS):
        expected = embed_slowly(LLAMA(), prompt, kind)
        assert numbers_of(local.embeddings[100 + i]) == pytest.approx(expected, abs=1e-4)
    assert numbers_of(local.embeddings[50]) == pytest.approx(
        embed_slowly(LLAMA(), PROMPTS[4], kind), abs=1e-4
    )
    for i, prompt in enumerate(OTHERS):
        assert output[i] == whole_model(prompt, 12)


def test_embeddings_are_shortened_to_the_dimensions_asked_for_and_normalised() -> None:
    with pipeline(2) as local:
        local.answer([sequence(local, n, PROMPTS[3], Pooling("mean", n)) for n in (1, 5, 32)])
    for num_dimensions in (1, 5, 32):
        numbers = numbers_of(local.embeddings[num_dimensions])
        expected = embed_slowly(LLAMA(), PROMPTS[3], "mean", num_dimensions)
        assert numbers.shape == (num_dimensions,)
        assert numbers == pytest.approx(expected, abs=1e-4)


def test_embeddings_neither_use_nor_fill_the_prefix_cache() -> None:
    """A chat that continues what was embedded, and an embedding of what was chatted."""
    prompt = list(range(2, 60))
    with pipeline(2) as local:
        local.scheduler = Scheduler(2, max_num_sequences=8, max_queue=64, prefill_chunk=16)
        local.scheduler.reuse = "any"
        local.answer([sequence(local, 1, prompt, Pooling("mean"))])
        assert not list(local.scheduler.budget.kept)
        assert local.scheduler.num_held_tokens == 0
        first = Sequence(2, prompt, 6, GREEDY, frozenset())
        local.answer([first])
        assert first.num_cached == 0
        again = sequence(local, 3, prompt, Pooling("mean"))
        local.answer([again])
        assert again.num_cached == 0
        assert list(local.scheduler.budget.kept) == [2]
    assert local.embeddings[1] == local.embeddings[3]
    assert first.output == whole_model(prompt, 6)


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "gemma4_text"])
def test_embeddings_of_other_architectures_equal_those_of_the_whole_model(name: str) -> None:
    make: Callable[[], nn.Module] = partial(build if name == "qwen3" else architectures.build, name)
    with pipeline(2, make) as local:
        local.answer([sequence(local, i, p, Pooling("mean")) for i, p in enumerate(PROMPTS[:4])])
    for i, prompt in enumerate(PROMPTS[:4]):
        expected = embed_slowly(make(), prompt, "mean")
        assert numbers_of(local.embeddings[i]) == pytest.approx(expected, abs=1e-4)


def test_recorded_hidden_states_are_returned_only_once() -> None:
    stage = Stage(LLAMA(), 0, 4)
    tokens = mx.array([[1, 2, 3]])
    stage(tokens, None, [])
    assert stage.pop_hidden() is None
    stage.record_hidden()
    stage(tokens, None, [])
    hidden = stage.pop_hidden()
    assert hidden is not None
    assert mx.allclose(hidden, LLAMA().model(tokens))
    assert stage.pop_hidden() is None


# --- one prompt in steps


STAGE = Stage(LLAMA(), 0, 4)


def begun(kind: Kind, num_tokens: int) -> EmbeddingsPart:
    """A part that is about to embed a prompt."""
    part = EmbeddingsPart(STAGE)
    begin(part, kind, num_tokens)
    return part


def begin(part: EmbeddingsPart, kind: Kind, num_tokens: int) -> None:
    part.obey(Embed(5, Pooling(kind), num_tokens))


def feed(part: EmbeddingsPart, row: Row, hidden: mx.array) -> dict[int, bytes | None]:
    step = Step(1, 0, (row,), (1,) * row.num_tokens, sample=False)
    only = ForwardPass((0,), [])
    mx.eval(part.after_rows(step, [only], [hidden[None, row.position :][:, : row.num_tokens]]))
    outputs = part.outputs(step, Result(1, ()))
    return {each.sequence: each.numbers for each in outputs}


@pytest.mark.parametrize("kind", KINDS)
def test_pooling_a_prompt_in_chunks_gives_the_same_as_pooling_it_at_once(kind: Kind) -> None:
    hidden = mx.random.normal((9, 4), key=mx.random.key(3))
    whole, parts = begun(kind, 9), begun(kind, 9)
    assert feed(parts, Row(5, 0, 4), hidden) == {}
    assert feed(parts, Row(5, 4, 1), hidden) == {}
    got = numbers_of(feed(parts, Row(5, 5, 4), hidden)[5])
    assert got == pytest.approx(numbers_of(feed(whole, Row(5, 0, 9), hidden)[5]), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_an_interrupted_prefill_are_not_pooled(kind: Kind) -> None:
    """The prompt went back to the queue while its second chunk was under way."""
    hidden = mx.random.normal((9, 4), key=mx.random.key(4))
    part, fresh = begun(kind, 9), begun(kind, 9)
    feed(part, Row(5, 0, 4), hidden)
    begin(part, kind, 9)
    assert feed(part, Row(5, 4, 4), hidden) == {}
    part.dropped(5)
    assert feed(part, Row(5, 0, 9), hidden) == feed(fresh, Row(5, 0, 9), hidden)


def test_no_embedding_is_given_if_numbers_are_not_finite() -> None:
    part = begun("mean", 2)
    assert feed(part, Row(5, 0, 2), mx.array([[1.0, mx.nan], [1, 2]])) == {5: None}


def test_a_dropped_prompt_is_no_longer_pooled() -> None:
    part = begun("mean", 2)
    for sequence in (4, 5):
        part.dropped(sequence)
    assert feed(part, Row(5, 0, 2), mx.ones((2, 2))) == {}
