"""Messages survive the way there and back, in whatever pieces; nonsense is an error."""

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.core import agent_messages, messages, wire
from serve.core.addresses import Addresses
from serve.core.agent_messages import (
    AgentMessage,
    FromAgent,
    ToAgent,
)
from serve.core.errors import ClusterError
from serve.core.messages import (
    AnyMessage,
    Hop,
    Message,
    Note,
    Order,
    Result,
    TensorSpec,
)
from serve.core.ops import AnyOp
from serve.core.types import Row, Step
from tests.errors import fails

int32 = st.integers(-(2**31), 2**31 - 1)
small = st.integers(0, 2**31 - 1)
ops = st.one_of(*map(st.builds, typing.get_args(AnyOp)))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    row = st.builds(Row, small, small, st.integers(1, 5), small)
    rows = draw(st.lists(row, max_size=6))
    num_tokens = sum(row.num_tokens for row in rows)
    return Step(
        number=draw(small),
        group=draw(int32),
        rows=tuple(rows),
        tokens=tuple(draw(st.lists(int32, min_size=num_tokens, max_size=num_tokens))),
        sample=draw(st.booleans()),
        before=tuple(draw(st.lists(ops, max_size=4))),
        after=tuple(draw(st.lists(ops, max_size=4))),
    )


# MessagePack has 64 bits for an integer.
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(Step, steps())
# Where a field has a factory, hypothesis would take the factory itself for the default.
for with_factory in (messages.Left, Order):
    drawn = {
        field.name: st.from_type(field.type)
        for field in msgspec.structs.fields(with_factory)
        if field.default_factory is not msgspec.NODEFAULT
    }
    st.register_type_strategy(with_factory, st.builds(with_factory, **drawn))
ALL = typing.get_args(AnyMessage)
LINES = (*typing.get_args(ToAgent), *typing.get_args(FromAgent))
NOTES = typing.get_args(messages.AnyNote)
RELAYED = typing.get_args(messages.FromEngine)


def built(kind: type) -> st.SearchStrategy[Any]:
    """Messages of a type, with whatever its fields allow."""
    if kind is Step:
        return steps()
    if kind is messages.TaggedTensors:
        return st.builds(kind, notes=st.lists(st.one_of(*map(st.builds, NOTES))).map(tuple))
    if kind is messages.Report:
        return st.builds(kind, message=st.one_of(*map(built, RELAYED)))
    return st.builds(kind)


SENDERS = (
    "Rank 0's parent ",
    "Rank 0's engine ",
    "A parent ",
    "A caller ",
    "An engine ",
    "Every engine ",
    "A stage ",
    "A rank of a training run ",
    "Every rank of a training run ",
    "Rank 0 of a training run ",
    "A launcher ",
    "An agent ",
)


def kinds_of(base: type) -> set[type]:
    names = vars(agent_messages) | vars(messages)
    types = {kind for kind in names.values() if isinstance(kind, type)}
    return {kind for kind in types if issubclass(kind, base)} - {base}


def test_every_type_of_message_is_tested_and_names_its_sender() -> None:
    assert kinds_of(Message) | {Step} == set(ALL)
    assert kinds_of(AgentMessage) == set(LINES)
    assert kinds_of(Note) == set(NOTES)
    for kind in kinds_of(Message) | kinds_of(AgentMessage) | kinds_of(Note):
        assert (kind.__doc__ or "").startswith(SENDERS), kind


@pytest.mark.parametrize("kind", LINES, ids=lambda kind: kind.__name__)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_launcher_message_is_one_line_that_can_be_read_back(
    kind: type, data: st.DataObject
) -> None:
    finite = st.floats(allow_nan=False, allow_infinity=False)  # JSON has no others.
    fields = {f.name: finite for f in msgspec.structs.fields(kind) if f.type is float}
    message = data.draw(st.builds(kind, **fields))
    text = wire.line(message)
    assert "\n" not in text
    reader: wire.LineReader[ToAgent | FromAgent] = wire.LineReader(ToAgent | FromAgent)
    assert reader.read(text) == message


@given(st.text() | st.binary())
def test_random_lines_raise_a_cluster_error(said: str | bytes) -> None:
    reader: wire.LineReader[ToAgent] = wire.LineReader(ToAgent)
    with fails(ClusterError, "unreadable_message"):
        reader.read(said)


def test_unknown_fields_in_a_line_from_another_version_are_ignored() -> None:
    reader: wire.LineReader[ToAgent] = wire.LineReader(ToAgent)
    said = '{"type": "StartEcho", "ip": "a", "protocol": "udp"}'
    assert reader.read(said) == agent_messages.StartEcho("a")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_frame_preserves_every_type_of_message(kind: type, data: st.DataObject) -> None:
    message = data.draw(built(kind))
    assert list(wire.FrameReader(AnyMessage).feed(wire.frame(message))) == [message]


@pytest.mark.parametrize("kind", NOTES, ids=lambda kind: kind.__name__)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_frame_preserves_every_training_note(kind: type, data: st.DataObject) -> None:
    message = messages.TaggedTensors("tag", (data.draw(st.builds(kind)),), ())
    assert list(wire.FrameReader(AnyMessage).feed(wire.frame(message))) == [message]


@given(steps(), st.integers(1, 40))
def test_a_truncated_step_is_never_decoded(step: Step, num_lost: int) -> None:
    body = msgspec.msgpack.encode(step)
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(body[:-num_lost], type=Step)


def test_a_step_whose_rows_and_tokens_differ_in_number_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in number"):
        Step(1, 0, (Row(1, 0, 2),), (5,), sample=False)
    body = msgspec.msgpack.encode(["Step", 1, 0, [[1, 0, 2, 0]], [5], False])
    with fails(ClusterError, "unreadable_message"):
        list(wire.FrameReader(Step).feed(framed(body)))


def framed(body: bytes) -> bytes:
    return wire._HEADER.pack(wire._MAGIC, wire.VERSION, len(body)) + body


@given(st.binary(max_size=60))
def test_random_bodies_either_decode_to_a_message_or_raise_a_cluster_error(body: bytes) -> None:
    try:
        (message,) = wire.FrameReader(AnyMessage).feed(framed(body))
    except ClusterError:
        return
    assert isinstance(message, ALL)


def test_a_type_name_that_is_not_utf_8_raises_a_cluster_error() -> None:
    with fails(ClusterError, "unreadable_message"):
        list(wire.FrameReader(AnyMessage).feed(framed(b"\x91\xa4\x00\x00\x00\x80")))


def test_deeply_nested_bodies_raise_a_cluster_error() -> None:
    body = b"\x91" * 100_000 + b"\x01"
    with pytest.raises(ClusterError):
        list(wire.FrameReader(AnyMessage).feed(framed(body)))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Result(1, (2,)), messages.ToEngine),
        (messages.Stop(), messages.FromRank),
        (messages.Pong(), messages.ToRank),
        (messages.Ping(), messages.AroundRing),
    ],
)
def test_a_message_in_the_wrong_direction_is_an_error(message: Any, expected: Any) -> None:
    with fails(ClusterError, "unreadable_message"):
        list(wire.FrameReader(expected).feed(wire.frame(message)))


@given(st.lists(steps(), max_size=8), st.integers(1, 17))
def test_frames_can_be_read_in_pieces_of_any_size(sent: list[Step], size: int) -> None:
    stream = b"".join(map(wire.frame, sent))
    reader: wire.FrameReader[Step] = wire.FrameReader(Step)
    got: list[Step] = []
    for start in range(0, len(stream), size):
        got += reader.feed(stream[start : start + size])
    assert got == sent


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "foreign_protocol"),
        (b"Bg\x01\x00\x00\x00\x00\x00", "wire_version"),
        (wire._HEADER.pack(b"Bg", wire.VERSION, wire.MAX_BODY_BYTES + 1), "too_large"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes, code: str) -> None:
    with fails(ClusterError, code):
        list(wire.FrameReader(AnyMessage).feed(data))


def test_a_message_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 10)
    with fails(ClusterError, "too_large", match="Hop"):
        wire.frame(Hop(Step(1, 0, (), (), sample=False), (TensorSpec("float32", (1, 2, 3)),)))


def test_an_order_is_named_by_the_launch_number_of_its_rank() -> None:
    nowhere = Addresses(2, (), ())
    order = Order(1, (0, 2), ("a", "b"), nowhere, 1, "m", None, None, "c", (0, 1), None, 1.0)
    assert order.name == "Rank 2"


def test_no_byte_beyond_the_end_of_a_message_is_asked_for() -> None:
    data = wire.frame(Hop(Step(7, 0, (), (), sample=False), ())) + b"what follows"
    reader: wire.FrameReader[Hop] = wire.FrameReader(Hop)
    found: list[Hop] = []
    num_read = 0
    while not found:
        end = num_read + reader.num_missing
        found += reader.feed(data[num_read:end])
        num_read = end
    assert found[0].step.number == 7
    assert data[num_read:] == b"what follows"
