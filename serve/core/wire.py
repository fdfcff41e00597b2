"""The bytes that processes exchange: frames, steps, results. No sockets here.

A frame is a header (magic, kind, body length) and a body. Steps and results are
little-endian int32; everything that is not on the hot path is JSON. Nothing is
pickled, so a peer can send nonsense but not code.
"""

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from serve.core.errors import ClusterError
from serve.core.types import Row, Score, Step, Take

VERSION = 1
MAX_BODY_BYTES = 64 << 20
_HEADER = struct.Struct("<2sBBI")
_MAGIC = b"Bg"


class Kind(IntEnum):
    JSON = 1  # a Python dict: control, status, admissions
    STEP = 2  # front -> engine of rank 0
    HOP = 3  # stage -> next stage: a step and the tensors that follow it
    RESULT = 4  # engine of rank 0 -> front


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a hop. dtype is MLX's name of it, such as "float32"."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the tokens of a sequence from a position on."""

    sequence: int
    position: int
    scores: tuple[Score, ...]

    @property
    def is_finite(self) -> bool:
        """Whether the logits were. A score of -inf is one of a token that cannot come."""
        return not any(math.isnan(score.logprob) for score in self.scores)


@dataclass(frozen=True, slots=True)
class Result:
    """The tokens sampled in a step, one a row (or one of FAILURES); none when it did not sample.
    scores, which few ask for, travel in JSON frames before it."""

    number: int
    tokens: tuple[int, ...]
    scores: tuple[Scores, ...] = ()


def frame(kind: Kind, body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise ClusterError(f"A {kind.name} frame of {len(body)} bytes is over {MAX_BODY_BYTES}.")
    return _HEADER.pack(_MAGIC, VERSION, kind, len(body)) + body


def json_frame(message: dict[str, Any]) -> bytes:
    return frame(Kind.JSON, json.dumps(message, separators=(",", ":")).encode())


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"A peer sent a control message that is not JSON: {error}.") from error
    if not isinstance(message, dict):
        raise ClusterError("A peer sent a control message that is not a JSON object.")
    return message


class FrameReader:
    """Turns a stream of bytes into frames, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            magic, version, kind, size = _HEADER.unpack_from(self._buffer)
            _check_header(magic, version, kind, size)
            if len(self._buffer) < _HEADER.size + size:
                return
            body = bytes(self._buffer[_HEADER.size : _HEADER.size + size])
            del self._buffer[: _HEADER.size + size]
            yield Kind(kind), body


def _check_header(magic: bytes, version: int, kind: int, size: int) -> None:
    if magic != _MAGIC:
        raise ClusterError("A peer does not speak Brigade's protocol: check the address and port.")
    if version != VERSION:
        raise ClusterError(
            f"A peer speaks wire version {version}, this one {VERSION}: "
            "install the same mlx-brigade on all hosts."
        )
    if kind not in Kind.__members__.values() or size > MAX_BODY_BYTES:
        raise ClusterError(f"A peer sent a frame of kind {kind} with {size} bytes.")


# --- steps and results


def encode_step(step: Step) -> bytes:
    counts = (len(s) for s in (step.rows, step.tokens, step.drop, step.take, step.unload))
    rows = [n for r in step.rows for n in (r.sequence, r.position, r.num_tokens, r.adapter)]
    take = [n for take in step.take for n in (take.sequence, take.source, take.num_tokens)]
    head = (step.number, step.group, step.sample)
    return _ints([*head, *counts, *rows, *step.tokens, *step.drop, *take, *step.unload])


def decode_step(body: bytes) -> Step:
    numbers = _Ints(body)
    number, group, sample, num_rows, num_tokens, num_drop, num_take, num_unload = numbers.take(8)
    rows = numbers.take(4 * num_rows)
    step = Step(
        number=number,
        group=group,
        sample=bool(sample),
        rows=tuple(Row(*rows[i : i + 4]) for i in range(0, len(rows), 4)),
        tokens=numbers.take(num_tokens),
        drop=numbers.take(num_drop),
        take=tuple(Take(*numbers.take(3)) for _ in range(num_take)),
        unload=numbers.take(num_unload),
    )
    numbers.end()
    if sum(row.num_tokens for row in step.rows) != num_tokens:
        raise ClusterError(f"Step {number} carries {num_tokens} tokens, its rows say otherwise.")
    return step


def encode_hop(step: Step, specs: Sequence[TensorSpec]) -> bytes:
    """A step and what its tensors look like; the tensors travel by themselves."""
    described = json.dumps([[spec.dtype, *spec.shape] for spec in specs]).encode()
    return struct.pack("<I", len(described)) + described + encode_step(step)


def decode_hop(body: bytes) -> tuple[Step, tuple[TensorSpec, ...]]:
    try:
        (size,) = struct.unpack_from("<I", body)
        described = json.loads(body[4 : 4 + size])
        specs = tuple(TensorSpec(str(dtype), tuple(shape)) for dtype, *shape in described)
    except (struct.error, ValueError, TypeError) as error:
        raise ClusterError(f"A peer sent a hop that cannot be read: {error}.") from error
    return decode_step(body[4 + size :]), specs


def encode_result(result: Result) -> bytes:
    return _ints([result.number, *result.tokens])


def decode_result(body: bytes) -> Result:
    number, *tokens = _Ints(body).take(len(body) // 4)
    return Result(number, tuple(tokens))


def scores_frame(scores: Scores) -> bytes:
    told = [[score.token, score.logprob, score.top] for score in scores.scores]
    place = {"sequence": scores.sequence, "position": scores.position}
    return json_frame({"type": "scores", **place, "scores": told})


def parse_scores(message: dict[str, Any]) -> Scores:
    scores = tuple(
        Score(token, logprob, tuple((id, value) for id, value in top))
        for token, logprob, top in message["scores"]
    )
    return Scores(message["sequence"], message["position"], scores)


def _ints(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


class _Ints:
    """Reads int32 one run after another; too few or too many are an error."""

    def __init__(self, body: bytes) -> None:
        if len(body) % 4:
            raise ClusterError(f"A peer sent {len(body)} bytes where int32 were due.")
        self._values = struct.unpack(f"<{len(body) // 4}i", body)
        self._next = 0

    def take(self, count: int) -> tuple[int, ...]:
        taken = self._values[self._next : self._next + count]
        if count < 0 or len(taken) != count:
            raise ClusterError(f"A peer sent a message cut short: {count} numbers were due.")
        self._next += count
        return taken

    def end(self) -> None:
        if self._next != len(self._values):
            raise ClusterError("A peer sent a message with more numbers than it announced.")
