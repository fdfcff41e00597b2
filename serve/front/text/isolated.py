"""A process that answers questions for this one, so that slow work for one client does not delay
others and can be stopped. Both of its ends are here: questions and answers are messages of
serve.core.messages in JSON, in frames over its standard input and output."""

import os
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any, Generic, NoReturn, TypeVar

import msgspec

from serve.core.helper_messages import HelperMessage, HelperReady, ToHelper

_LENGTH = struct.Struct(">Q")
_NICENESS = 10  # The processes that compute answers come first.

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class ProcessEnded(Exception):
    """The process ended before it answered the question."""

    def __init__(self, code: int) -> None:
        super().__init__(f"The process ended with {code}.")
        self.code = code  # negative for a signal


class IsolatedProcess(Generic[Answer]):
    """A process that runs module with these arguments and answers one question at a time, from any
    thread. expected is the type of its answers, or a union.

    The process starts with the first question or with `is_ready`, ends with this object, and is
    restarted after it has ended.
    """

    def __init__(self, expected: Any, module: str, *arguments: str) -> None:
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(expected)
        self._command = [sys.executable, "-m", module, *arguments]
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._has_reported = False
        weakref.finalize(self, _end, self._running)  # also when this process ends

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it does not run."""
        return self._running[0].pid if self._running else None

    def is_ready(self) -> bool:
        """Whether it answers without loading anything first. Raises ProcessEnded."""
        with self._lock:
            process = self._started()
            assert process.stdout
            if not self._has_reported and select.select([process.stdout], [], [], 0)[0]:
                self._wait_until_ready(process)
            return self._has_reported

    def ask(self, question: ToHelper, *data: bytes) -> Answer:
        """Sends a question and waits for the answer without a limit: call it in a thread. data is
        what the question announces, in parts. Raises ProcessEnded."""
        with self._lock:
            process = self._started()
            if not self._has_reported:
                self._wait_until_ready(process)
            assert process.stdin
            try:
                write_frame(process.stdin, msgspec.json.encode(question))
                write_frame(process.stdin, *data)
            except OSError:
                self._give_up(process)
            answer = self._read(process)
        return self._decoder.decode(answer)

    def close(self) -> None:
        _end(self._running)

    def _started(self) -> "subprocess.Popen[bytes]":
        # One that ended while it was idle was not ended by a question.
        if self._running and self._running[0].poll() is not None:
            _end(self._running)
        if not self._running:
            self._has_reported = False
            pipe = subprocess.PIPE
            # In a session of its own: a terminal's SIGINT is for the server.
            process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
            )
            self._running.append(process)
        return self._running[0]

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        msgspec.json.decode(self._read(process), type=HelperReady)
        self._has_reported = True

    def _read(self, process: "subprocess.Popen[bytes]") -> bytes:
        assert process.stdout
        answer = read_frame(process.stdout)
        if answer is None:
            self._give_up(process)
        return answer

    def _give_up(self, process: "subprocess.Popen[bytes]") -> NoReturn:
        _end(self._running)
        raise ProcessEnded(process.returncode)


class IsolatedPool(Generic[Answer]):
    """Processes that run the same module: as many as questions are asked at the same time. They end
    with this object."""

    def __init__(self, expected: Any, module: str, *arguments: str) -> None:
        self._make: Callable[[], IsolatedProcess[Answer]]
        self._make = lambda: IsolatedProcess(expected, module, *arguments)
        self._lock = threading.Lock()
        self.idle: list[IsolatedProcess[Answer]] = []

    def ask(self, question: ToHelper) -> Answer:
        """Asks an idle process or a new one, from any thread. Raises ProcessEnded."""
        with self._lock:
            process = self.idle.pop() if self.idle else self._make()
        answer = process.ask(question)
        with self._lock:
            self.idle.append(process)
        return answer


def _end(running: "list[subprocess.Popen[bytes]]") -> None:
    while running:
        process = running.pop()
        process.kill()
        process.communicate()


# --- the other end


def answer_questions(
    expected: type[Question],
    answer: Callable[[Question, bytes], HelperMessage],
    max_seconds: float,
) -> None:
    """Answers questions of the expected type until the standard input ends. answer also gets the
    data that a question announces. SIGPROF ends the process when an answer takes more than
    max_seconds of a core, however much else runs."""
    os.nice(_NICENESS)
    decoder = msgspec.json.Decoder(expected)
    write_frame(sys.stdout.buffer, msgspec.json.encode(HelperReady()))
    while (question := read_frame(sys.stdin.buffer)) is not None:
        data = read_frame(sys.stdin.buffer)
        if data is None:
            return
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        answered = msgspec.json.encode(answer(decoder.decode(question), data))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sys.stdout.buffer, answered)


def write_frame(file: IO[bytes], *parts: bytes) -> None:
    """Writes the parts one by one: Python's lock is held while long ones are joined."""
    length = sum(map(len, parts))
    for part in (_LENGTH.pack(length), *parts):
        view = memoryview(part)
        while view:
            # A pipe without a buffer takes as much as there is room for.
            view = view[file.write(view) :]
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """Returns the content of the next frame; None at the end of the file."""
    head = _read_exactly(file, _LENGTH.size)
    return None if head is None else _read_exactly(file, _LENGTH.unpack(head)[0])


def _read_exactly(file: IO[bytes], size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = file.read(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
