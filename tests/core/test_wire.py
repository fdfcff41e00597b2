"""Bytes survive the way there and back, in whatever pieces; nonsense is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core import wire
from serve.core.errors import ClusterError
from serve.core.types import Row, Step

int32 = st.integers(-(2**31), 2**31 - 1)
small = st.integers(0, 2**31 - 1)


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
        drop=tuple(draw(st.lists(small, max_size=4))),
        unload=tuple(draw(st.lists(small, max_size=3))),
    )


specs = st.lists(
    st.builds(
        wire.TensorSpec,
        st.sampled_from(["float32", "bfloat16", "int32"]),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
    ),
    max_size=3,
).map(tuple)


@given(steps())
def test_a_step_survives(step: Step) -> None:
    assert wire.decode_step(wire.encode_step(step)) == step


@given(steps(), specs)
def test_a_hop_survives(step: Step, tensors: tuple[wire.TensorSpec, ...]) -> None:
    assert wire.decode_hop(wire.encode_hop(step, tensors)) == (step, tensors)


@given(small, st.lists(int32, max_size=9).map(tuple))
def test_a_result_survives(number: int, tokens: tuple[int, ...]) -> None:
    result = wire.Result(number, tokens)
    assert wire.decode_result(wire.encode_result(result)) == result


@given(steps(), st.integers(1, 40))
def test_every_cut_of_a_step_is_noticed(step: Step, num_lost: int) -> None:
    with pytest.raises(ClusterError):
        wire.decode_step(wire.encode_step(step)[:-num_lost])


@given(st.binary(max_size=60))
def test_random_bytes_are_an_error_of_ours_or_a_message(body: bytes) -> None:
    for decode in (wire.decode_step, wire.decode_hop, wire.parse_json):
        try:
            decode(body)
        except ClusterError:
            continue


@given(
    st.lists(st.tuples(st.sampled_from(list(wire.Kind)), st.binary(max_size=50)), max_size=8),
    st.integers(1, 17),
)
def test_frames_survive_any_pieces(frames: list[tuple[wire.Kind, bytes]], size: int) -> None:
    stream = b"".join(wire.frame(kind, body) for kind, body in frames)
    reader = wire.FrameReader()
    got = [f for at in range(0, len(stream), size) for f in reader.feed(stream[at : at + size])]
    assert got == frames


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak Brigade"),
        (b"Bg\x63\x01\x00\x00\x00\x00", "wire version 99"),
        (b"Bg\x01\x63\x00\x00\x00\x00", "kind 99"),
        (b"Bg\x01\x01\xff\xff\xff\xff", "4294967295 bytes"),
    ],
)
def test_a_stranger_is_recognised_by_the_header(data: bytes, reason: str) -> None:
    with pytest.raises(ClusterError, match=reason):
        list(wire.FrameReader().feed(data))
