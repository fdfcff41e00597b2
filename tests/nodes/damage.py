"""What can go wrong between two machines: wrong answers, flipped bits, connections that break."""

import hashlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.hub.digests import content_digest


@dataclass
class Answer:
    status: int
    headers: MutableHeaders
    body: bytes


def digest_of(body: bytes) -> str:
    return content_digest(hashlib.sha256(body).hexdigest())


Spoil = Callable[[Answer, random.Random], None]


def spoiling(inner: ASGIApp, spoil: Spoil, source: random.Random, path: str) -> ASGIApp:
    """Spoils each answer about a path that contains this text."""

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path not in scope["path"]:
            await inner(scope, receive, send)
            return
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await inner(scope, receive, keep)
        start = messages[0]
        headers = MutableHeaders(raw=list(start["headers"]))
        body = b"".join(each.get("body", b"") for each in messages[1:])
        answer = Answer(start["status"], headers, body)
        spoil(answer, source)
        headers["content-length"] = str(len(answer.body))
        await send({**start, "status": answer.status, "headers": headers.raw})
        await send({"type": "http.response.body", "body": answer.body})

    return outer


def flip(data: bytes, source: random.Random) -> bytes:
    spoiled = bytearray(data)
    spoiled[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(spoiled)


def flipped_body(answer: Answer, source: random.Random) -> None:
    answer.body = flip(answer.body, source)


def shortened(answer: Answer, source: random.Random) -> None:
    answer.body = answer.body[: source.randrange(len(answer.body))]


def shortened_with_digest(answer: Answer, source: random.Random) -> None:
    shortened(answer, source)
    answer.headers["content-digest"] = digest_of(answer.body)


def lengthened(answer: Answer, source: random.Random) -> None:
    answer.body += source.randbytes(source.randrange(1, 100))
    answer.headers["content-digest"] = digest_of(answer.body)


def other_place(answer: Answer, source: random.Random) -> None:
    """As of a server that takes another range for the one that was asked for."""
    where, _, size = answer.headers["content-range"].removeprefix("bytes ").partition("/")
    first, last = (int(number) + 1 for number in where.split("-"))
    answer.headers["content-range"] = f"bytes {first}-{last}/{size}"
    flipped_body(answer, source)
    answer.headers["content-digest"] = digest_of(answer.body)


def other_size(answer: Answer, source: random.Random) -> None:
    where, _, size = answer.headers["content-range"].partition("/")
    answer.headers["content-range"] = f"{where}/{int(size) + source.randrange(1, 9)}"
    flipped_body(answer, source)
    answer.headers["content-digest"] = digest_of(answer.body)


def other_version(answer: Answer, source: random.Random) -> None:
    answer.headers["etag"] = f'"{source.randbytes(32).hex()}"'
    flipped_body(answer, source)
    answer.headers["content-digest"] = digest_of(answer.body)


def other_commit(answer: Answer, source: random.Random) -> None:
    answer.headers["x-repo-commit"] = source.randbytes(20).hex()
    flipped_body(answer, source)
    answer.headers["content-digest"] = digest_of(answer.body)


def other_digest(answer: Answer, source: random.Random) -> None:
    answer.headers["content-digest"] = digest_of(source.randbytes(9))


def no_digest(answer: Answer, source: random.Random) -> None:
    flipped_body(answer, source)
    del answer.headers["content-digest"]


def error_page(answer: Answer, source: random.Random) -> None:
    answer.status = source.choice([200, 204, 302, 403, 429, 500])
    answer.body = b"<html>Bad gateway</html>" if answer.status != 204 else b""


ALL: list[Spoil] = [
    flipped_body,
    shortened,
    shortened_with_digest,
    lengthened,
    other_place,
    other_size,
    other_version,
    other_commit,
    other_digest,
    no_digest,
    error_page,
]


@dataclass
class Wire:
    """What a proxy does to the next connection. flip_at and cut_at are bytes of its answers."""

    flip_at: int | None = None
    cut_at: int | None = None
    bit: int = 1
    num_spoiled: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def proxy(target: Path, place: Path, wire: Wire) -> Iterator[None]:
    """Passes connections to a unix socket on, and spoils what comes back."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen()

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(target))
            threading.Thread(target=pump, args=(client, server, None), daemon=True).start()
            threading.Thread(target=pump, args=(server, client, wire), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


def pump(source: socket.socket, target: socket.socket, wire: Wire | None) -> None:
    position = 0
    try:
        while data := source.recv(1 << 16):
            if wire and wire.flip_at is not None and 0 <= wire.flip_at - position < len(data):
                spoiled = bytearray(data)
                spoiled[wire.flip_at - position] ^= wire.bit
                data = bytes(spoiled)
                wire.num_spoiled += 1
            if wire and wire.cut_at is not None and wire.cut_at < position + len(data):
                target.sendall(data[: max(0, wire.cut_at - position)])
                wire.num_spoiled += 1
                wire.cut_at = None
                break
            position += len(data)
            target.sendall(data)
    except OSError:
        return  # The other side has closed the connection.
    finally:
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
