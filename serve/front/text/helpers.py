"""Helper processes do slow work for the server: such work does not hold the server's GIL, and can
be stopped. This module contains both ends of the connection. Questions and answers are messages of
serve.core.helper_messages in JSON, in frames over standard input and output."""

import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any, Generic, TypeVar

import msgspec

from serve.core.errors import stopping
from serve.core.helper_messages import HelperMessage, ToHelper

_LENGTH = struct.Struct(">Q")
_NICENESS = 10  # Processes that compute answers have priority.

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class HelperEnded(Exception):
    """A helper process ended before it answered the question. code is negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"The process ended with {code}.")
        self.code = code

    @property
    def is_overrun(self) -> bool:
        """Whether the answer took more time than `answer_questions` allows."""
        return self.code == -signal.SIGPROF


class Helpers(Generic[Answer]):
    """Processes that run module with these arguments. `expected` is the type of their answers, or a
    union. A process starts when all others are busy, and runs until this object ends. If a process
    ends earlier, only its own question fails."""

    def __init__(self, expected: Any, module: str, *arguments: str) -> None:
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(expected)
        self._command = [sys.executable, "-m", module, *arguments]
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _end_all, self._all)  # also when this process ends

    def warm_up(self) -> None:
        """Starts a process, and does not wait until it has loaded its data."""
        self._idle.append(self._idle_or_new())

    def close(self) -> None:
        """Ends the processes, and the open questions with UnavailableError."""
        with self._lock:
            self._is_closed = True
        _end_all(self._all)

    def call(self, question: ToHelper, *data: bytes) -> Answer:
        """Sends a question and waits for the answer without a limit: call it in threads, of which
        there may be several. data are the bytes that the question announces. Raises HelperEnded,
        and UnavailableError after `close`."""
        process = self._idle_or_new()
        answer = self._answer(process, msgspec.json.encode(question), data)
        if answer is None and self._is_closed:
            raise stopping()
        if answer is None:
            self._end(process)
            raise HelperEnded(process.returncode)
        self._idle.append(process)
        return self._decoder.decode(answer)

    def _idle_or_new(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._is_closed:
                raise stopping()
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                self._end(process)
            # In a session of its own: a terminal's SIGINT is for the server.
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, start_new_session=True
            )
            self._all.append(process)
            return process

    def _answer(
        self, process: "subprocess.Popen[bytes]", question: bytes, data: tuple[bytes, ...]
    ) -> bytes | None:
        """Returns the answer to an encoded question; None if the process ends before the answer."""
        assert process.stdin
        assert process.stdout
        try:
            write_frame(process.stdin, question)
            write_frame(process.stdin, *data)
            return read_frame(process.stdout)
        except (OSError, ValueError):  # The process has ended, or `close` has closed its files.
            return None

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        if process in self._all:  # Otherwise `close` ends it.
            self._all.remove(process)
            _end_all([process])


def _end_all(processes: "list[subprocess.Popen[bytes]]") -> None:
    while processes:
        process = processes.pop()
        process.kill()
        process.communicate()


# --- the other end


def answer_questions(
    expected: type[Question],
    answer: Callable[[Question, bytes], HelperMessage],
    max_seconds: float,
) -> None:
    """Answers questions of the expected type from standard input; `answer` also gets their data.
    SIGPROF ends the process if an answer takes more than max_seconds of CPU time."""
    os.nice(_NICENESS)
    decoder = msgspec.json.Decoder(expected)
    while (question := read_frame(sys.stdin.buffer)) is not None:
        data = read_frame(sys.stdin.buffer)
        if data is None:
            return
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        answered = msgspec.json.encode(answer(decoder.decode(question), data))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sys.stdout.buffer, answered)


def write_frame(file: IO[bytes], *parts: bytes) -> None:
    """Writes the parts one by one: joining long ones would hold the GIL."""
    file.write(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        file.write(part)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """Returns the content of the next frame; None at the end of the file."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = file.read(length)
    return content if len(content) == length else None
