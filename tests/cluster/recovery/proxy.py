"""A bad link: a TCP proxy that delays, stops or resets what goes through it."""

import socket
import struct
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

CONNECT_SECONDS = 120.0  # An engine that imports MLX on a busy machine takes long.

Piece = tuple[float, bytes]


class Proxy:
    """From its own port to another one of this host, both ways."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.delay_seconds = 0.0
        self.num_bytes = 0
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Drops all data silently."""
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    def reset(self) -> None:
        """Ends every connection as a router does that has forgotten it."""
        for each in self._take_all():
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RD)
            each.close()

    def close(self) -> None:
        self._listening.close()
        self.thaw()
        self.reset()

    def _take_all(self) -> list[socket.socket]:
        taken, self._sockets = self._sockets, []
        return taken

    def _accept(self) -> None:
        while True:
            try:
                left, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(left,), daemon=True).start()

    def _connect(self, left: socket.socket) -> None:
        """The proxy is there first. The process behind it may start a little later."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                right = socket.create_connection(("127.0.0.1", self._target))
                break
            except OSError:
                if time.monotonic() > deadline:
                    left.close()
                    return
                time.sleep(0.02)
        self._sockets += [left, right]
        threads: list[threading.Thread] = []
        for source, target in ((left, right), (right, left)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pieces: SimpleQueue[Piece] = SimpleQueue()
            threads.append(threading.Thread(target=self._read, args=(source, pieces), daemon=True))
            threads.append(threading.Thread(target=self._write, args=(target, pieces), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Both sides have ended. A test with hundreds of rings would run out of descriptors.
        left.close()
        right.close()
        self._sockets = [each for each in self._sockets if each.fileno() >= 0]

    def _read(self, source: socket.socket, pieces: "SimpleQueue[Piece]") -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            self.num_bytes += len(data)
            pieces.put((time.monotonic() + self.delay_seconds, data))

    def _write(self, target: socket.socket, pieces: "SimpleQueue[Piece]") -> None:
        while True:
            due, data = pieces.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self._open.wait()
            try:
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
            except OSError:
                return
