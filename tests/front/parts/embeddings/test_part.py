"""The requests for embeddings that are refused, and the messages for rank 0's engine."""

from pathlib import Path

import pytest

from serve.core.errors import RequestError
from serve.core.messages import Embed, Loaded
from serve.core.sections import HiddenSize
from serve.core.types import Pooling, Sampling
from serve.front.parts.embeddings.part import EmbeddedPrompts
from serve.front.pipeline.interface import Prompt
from serve.front.pipeline.status import StageStatus
from tests.configs import serve_config
from tests.front.pipeline.simulation import make_sequence


def on_model(hidden_size: int) -> EmbeddedPrompts:
    part = EmbeddedPrompts(serve_config(model=Path("model")))
    sections = (HiddenSize(hidden_size),) if hidden_size else ()
    loaded = Loaded(0, None, 0, 0, "none", sections=sections)
    part.settle([StageStatus(0, "h", loaded=loaded)])
    return part


def to_embed(pooling: Pooling | None) -> Prompt:
    return Prompt([1, 2, 3], 0, (), frozenset(), pooling=pooling)


def test_the_part_for_embeddings_takes_only_prompts_to_embed() -> None:
    assert on_model(8).takes(to_embed(Pooling("mean", 8)))
    assert not on_model(8).takes(Prompt([1], 9, (Sampling(),), frozenset()))


@pytest.mark.parametrize(
    ("hidden_size", "pooling", "param"),
    [(0, Pooling("mean"), "model"), (8, Pooling("mean", 9), "dimensions")],
)
def test_embeddings_that_the_model_cannot_make_are_refused(
    hidden_size: int, pooling: Pooling, param: str
) -> None:
    with pytest.raises(RequestError) as raised:
        on_model(hidden_size).takes(to_embed(pooling))
    assert raised.value.param == param


def test_the_engine_is_told_each_time_that_a_prompt_to_embed_begins() -> None:
    part = on_model(8)
    embedded, answered = make_sequence(1, 3, 0), make_sequence(2, 3, 5)
    part.added(embedded, to_embed(Pooling("cls")))
    part.added(answered, Prompt(answered.prompt, 5, (Sampling(),), frozenset()))
    for _ in range(2):
        assert part.begun(embedded) == [Embed(1, Pooling("cls"), 3)]
        assert part.begun(answered) == []
        part.reset(embedded)
    part.ended(embedded)
    assert part.begun(embedded) == []
