"""Deltas: what each type says, and where an update begins and ends an answer."""

import dataclasses
from typing import Any, get_args

import pytest

from serve.front.output import deltas
from serve.front.output.deltas import (
    AnswerBegin,
    AnswerEnd,
    CallBegin,
    CallEnd,
    CallText,
    PromptProgress,
    Text,
    Thought,
    TokenUsage,
    Update,
)

USAGE = TokenUsage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
EACH = [
    PromptProgress(total=3, done=2, cached=1, seconds=0.5),
    AnswerBegin(USAGE),
    Text("a"),
    Thought("a"),
    CallBegin("id", "name"),
    CallText("{}"),
    CallEnd(),
    AnswerEnd("stop", None, USAGE),
]


def test_the_union_of_deltas_lists_every_type() -> None:
    assert [type(each) for each in EACH] == list(get_args(deltas.Delta))


@pytest.mark.parametrize("delta", EACH, ids=lambda each: type(each).__name__)
def test_deltas_are_frozen_and_compare_by_value(delta: Any) -> None:
    fields = {field.name: getattr(delta, field.name) for field in dataclasses.fields(delta)}
    assert type(delta)(**fields) == delta
    for name in fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(delta, name, None)


def test_deltas_of_different_types_differ() -> None:
    assert Text("a") != Thought("a") != CallText("a")


@pytest.mark.parametrize("delta", EACH, ids=lambda each: type(each).__name__)
def test_an_update_finds_the_begin_and_the_end_of_its_answer(delta: Any) -> None:
    update = Update(0, (delta,))
    assert update.begin == (delta if isinstance(delta, AnswerBegin) else None)
    assert update.end == (delta if isinstance(delta, AnswerEnd) else None)
    begin, end = EACH[1], EACH[-1]
    whole = Update(0, (begin, delta, end))
    assert (whole.begin, whole.end) == (begin, end)


def test_an_update_can_be_empty() -> None:
    """While text is held back."""
    empty = Update(1, (), tokens=(5,))
    assert (empty.begin, empty.end) == (None, None)
