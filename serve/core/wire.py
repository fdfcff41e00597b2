"""Frames: they separate messages in a stream of bytes, and detect bytes of other programs.

A frame is a header (magic, version, length of the body) and a message of serve.core.messages as
MessagePack. A launcher and its agents send lines of JSON instead. Nothing is pickled, so a peer
cannot send code.
"""

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from serve.core.agent_messages import AgentMessage
from serve.core.errors import ClusterError
from serve.core.messages import AnyMessage

VERSION = 2
MAX_BODY_BYTES = 64 << 20
_HEADER = struct.Struct("<2sBI")
_MAGIC = b"Bg"
_ENCODER = msgspec.msgpack.Encoder()

Received = TypeVar("Received")


def frame(message: AnyMessage) -> bytes:
    """Returns the bytes of a message with its header. Raises ClusterError if it is too large."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_BODY_BYTES:
        kind = type(message).__name__
        raise ClusterError(
            f"A {kind} message of {len(body)} bytes is larger than the limit of {MAX_BODY_BYTES}.",
            code="too_large",
        )
    return _HEADER.pack(_MAGIC, VERSION, len(body)) + body


class FrameReader(Generic[Received]):
    """Turns a stream of bytes, in any pieces, into messages of the expected types, a union in
    serve.core.messages. A longer body than max_body_bytes is refused by its header."""

    def __init__(self, expected: Any, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(expected)
        self._buffer = bytearray()
        self.max_body_bytes = max_body_bytes

    @property
    def num_missing(self) -> int:
        """The number of bytes to read next: the rest of the header, and then of the body. It never
        includes bytes after the message."""
        if len(self._buffer) < _HEADER.size:
            return _HEADER.size - len(self._buffer)
        _, _, size = _HEADER.unpack_from(self._buffer)
        return _HEADER.size + int(size) - len(self._buffer)

    def feed(self, data: bytes | bytearray) -> Iterator[Received]:
        """Yields the messages that are complete. Raises ClusterError on anything else."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            magic, version, size = _HEADER.unpack_from(self._buffer)
            _check_header(magic, version, size, self.max_body_bytes)
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield self._decode(body)

    def _decode(self, body: bytes) -> Received:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ClusterError(
                f"A peer sent a message that cannot be read: {error}.", code="unreadable_message"
            ) from error


def _check_header(magic: bytes, version: int, size: int, max_size: int) -> None:
    if magic != _MAGIC:
        raise ClusterError(
            "A peer does not speak Brigade's protocol: check the address and port.",
            code="foreign_protocol",
        )
    if version != VERSION:
        raise ClusterError(
            f"A peer uses wire version {version}, this rank {VERSION}: install the same "
            "mlx-brigade on all hosts.",
            code="wire_version",
        )
    if size > max_size:
        raise ClusterError(
            f"A peer sent a frame of {size} bytes, larger than the limit of {max_size}.",
            code="too_large",
        )


def line(message: AgentMessage) -> str:
    """Returns a message between a launcher and an agent as a line of JSON, without its end."""
    return msgspec.json.encode(message).decode()


class LineReader(Generic[Received]):
    """Turns lines into messages of the expected types, a union of serve.core.agent_messages."""

    def __init__(self, expected: Any) -> None:
        self._decoder: msgspec.json.Decoder[Received] = msgspec.json.Decoder(expected)

    def read(self, text: str | bytes) -> Received:
        """Returns the message in a line. Raises ClusterError for anything but these types."""
        try:
            return self._decoder.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ClusterError(
                f"A message cannot be read ({error}): install the same mlx-brigade on all hosts.",
                code="unreadable_message",
            ) from error
