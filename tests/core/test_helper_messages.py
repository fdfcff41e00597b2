"""Messages to and from helper processes survive the way there and back."""

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.core import helper_messages
from serve.core.helper_messages import (
    BodyRead,
    CallsParsed,
    CallUnreadable,
    ClaimsChecked,
    GrammarChecked,
    HelperMessage,
    ToHelper,
)
from serve.core.types import Sampling
from serve.front.api.reading import process
from serve.front.api.reading.reader import AnyReading
from serve.front.api.responses.body import ResponsePlan
from serve.front.api.responses.offer import OfferedTool
from serve.front.output.splitter import Splitting
from serve.front.pipeline.interface import Prompt

# JSON has integers of any size, and no infinite numbers.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)
OBJECTS = st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=3)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
FINITE_SAMPLING = st.builds(
    Sampling,
    **{name: FINITE for name, kind in typing.get_type_hints(Sampling).items() if kind is float},
    biases=st.lists(FINITE).map(tuple),
)
st.register_type_strategy(
    Prompt, st.builds(Prompt, samplings=st.lists(FINITE_SAMPLING, max_size=3).map(tuple))
)
st.register_type_strategy(Splitting, st.builds(Splitting, declared=OBJECTS.map(tuple)))
st.register_type_strategy(
    ResponsePlan,
    st.builds(
        ResponsePlan,
        repeated=st.dictionaries(st.text(), JSON, max_size=3),
        offered=st.dictionaries(st.text(), st.builds(OfferedTool), max_size=3),
    ),
)
READINGS = typing.get_args(AnyReading)
FROM_HELPER = (
    *typing.get_args(process.Answer),
    CallsParsed,
    CallUnreadable,
    GrammarChecked,
    ClaimsChecked,
)
HELPERS = (*typing.get_args(ToHelper), *FROM_HELPER)
SENDERS = (
    "The server ",
    "A helper process ",
    "A reading process ",
    "A parsing process ",
    "A checking process ",
)


def test_every_helper_message_is_tested_and_names_its_sender_and_direction() -> None:
    types = {kind for kind in vars(helper_messages).values() if isinstance(kind, type)}
    kinds = {kind for kind in types if issubclass(kind, HelperMessage)} - {HelperMessage}
    assert kinds == {typing.get_origin(kind) or kind for kind in HELPERS}
    for kind in kinds:
        assert (kind.__doc__ or "").startswith(SENDERS), kind


@pytest.mark.parametrize("kind", HELPERS, ids=lambda kind: kind.__name__)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_helper_message_is_the_same_after_encoding_and_decoding(
    kind: Any, data: st.DataObject
) -> None:
    if typing.get_origin(kind) is BodyRead:
        result = data.draw(st.one_of(*map(st.from_type, READINGS)))
        message = BodyRead(result)
    else:
        message = data.draw(st.builds(kind))
    sent = msgspec.json.encode(message)
    assert msgspec.json.decode(sent, type=kind) == message
