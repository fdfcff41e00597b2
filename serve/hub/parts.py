"""Reads a shard's part of a tensor: some ranges of one axis. Outside the ranges, only small gaps
between them are read."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from serve.core.checkpoint import TensorRange
from serve.core.errors import ModelError
from serve.hub.ranges import Range

_MAX_GAP_BYTES = 4096  # Reading a gap of this size takes less time than a system call.
_MAX_BLOCK_BYTES = 1 << 20
_MIN_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The ranges [start, end) of one axis of a tensor in a file."""

    tensor: TensorRange
    axis: int
    ranges: tuple[Range, ...]

    def pieces(self) -> Iterator[Range]:
        """Yields the byte ranges of the file that contain the part, in the order of elements."""
        shape = self.tensor.shape
        element_bytes = self.tensor.num_bytes // math.prod(shape)
        step_bytes = math.prod(shape[self.axis + 1 :]) * element_bytes
        slice_bytes = shape[self.axis] * step_bytes
        for number in range(math.prod(shape[: self.axis])):
            first = self.tensor.start + number * slice_bytes
            for start, end in self.ranges:
                yield first + start * step_bytes, first + end * step_bytes

    @property
    def is_in_few_pieces(self) -> bool:
        """Whether the pieces are large enough for requests over a network."""
        num_pieces = math.prod(self.tensor.shape[: self.axis]) * len(self.ranges)
        return num_pieces == len(self.ranges) or self.num_bytes >= num_pieces * _MIN_PIECE_BYTES

    @property
    def num_bytes(self) -> int:
        own = sum(end - start for start, end in self.ranges)
        return self.tensor.num_bytes * own // self.tensor.shape[self.axis]

    def read(self) -> bytearray:
        data = bytearray(self.num_bytes)
        view = memoryview(data)
        path = self.tensor.file
        try:
            with path.open("rb", buffering=0) as file:
                for block in _blocks(self.pieces()):
                    start = block[0][0]
                    end = block[-1][1]
                    file.seek(start)
                    if len(block) == 1:
                        _fill(file, view[: end - start], path)
                        view = view[end - start :]
                        continue
                    read = memoryview(bytearray(end - start))
                    _fill(file, read, path)
                    for first, last in block:
                        size = last - first
                        view[:size] = read[first - start : last - start]
                        view = view[size:]
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
        return data


def _fill(file: FileIO, view: memoryview, path: Path) -> None:
    while view:
        num_read = file.readinto(view)
        if not num_read:
            raise ModelError(f"{path} ends too early: fetch it again.", code="cut_short")
        view = view[num_read:]


def _blocks(pieces: Iterator[Range]) -> Iterator[list[Range]]:
    """Groups pieces that are read together, because the gaps between them are small."""
    block: list[Range] = []
    for piece in pieces:
        if block:
            first, last = block[0][0], block[-1][1]
            is_near = 0 <= piece[0] - last <= _MAX_GAP_BYTES
            if not is_near or piece[1] - first > _MAX_BLOCK_BYTES:
                yield block
                block = []
        block.append(piece)
    if block:
        yield block
