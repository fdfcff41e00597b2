"""The declared ranges of sampling parameters, on which the APIs and the model's defaults agree."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from serve.core.parameters import MAX_INT, Parameter, Range, parameters
from serve.core.types import Sampling
from serve.front.api.openai import ChatBody, CompletionBody
from serve.front.api.responses.body import ResponsesBody


@dataclass
class Declared:
    sharpness: Annotated[float, Range(0, 2)] = 1.0
    num_beams: Annotated[int, Range(1, MAX_INT)] = 1
    name: Annotated[str, "no range"] = ""
    seed: int = 0


def test_parameters_are_the_fields_with_a_range() -> None:
    assert dict(parameters(Declared)) == {
        "sharpness": Parameter(float, Range(0, 2)),
        "num_beams": Parameter(int, Range(1, MAX_INT)),
    }


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody])
def test_every_body_has_a_field_for_each_parameter(body: type) -> None:
    names = parameters(Sampling).keys()
    assert "repetition_penalty" in names
    assert names <= body.model_fields.keys()


@pytest.mark.parametrize(
    ("parameter", "right", "wrong"),
    [
        (
            Parameter(float, Range(0, 2)),
            [0, 2, 1.5],
            [-0.1, 2.1, math.nan, math.inf, "1", True, None],
        ),
        (Parameter(float, Range(0, 1, excludes_min=True)), [1e-9, 1], [0, 1.01]),
        (Parameter(int, Range(-1, MAX_INT)), [-1, MAX_INT], [-2, MAX_INT + 1, 1.0, False]),
    ],
)
def test_parameters_allow_only_values_of_their_type_within_their_range(
    parameter: Parameter, right: list[object], wrong: list[object]
) -> None:
    assert all(parameter.allows(value) for value in right)
    assert not any(parameter.allows(value) for value in wrong)


@pytest.mark.parametrize(
    ("parameter", "text"),
    [
        (Parameter(float, Range(0, 2)), "from 0 to 2"),
        (Parameter(float, Range(0, 1, excludes_min=True)), "above 0 and at most 1"),
        (Parameter(int, Range(-1, MAX_INT)), "a whole number from -1"),
    ],
)
def test_parameter_describes_its_range_in_words(parameter: Parameter, text: str) -> None:
    assert str(parameter) == text
