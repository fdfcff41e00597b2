"""Runs sections, each measurement with a limit, in processes that may hang or abort.

As a program, `python -m serve.selftest.runner JOB SECONDS` runs a section for a self-test on
another host, and prints its lines as JSON.
"""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from typing import IO

import msgspec

from launcher.process import signal_group
from serve.core.blas import with_openblas
from serve.selftest.report import Line, Scrubber, failed, not_tried
from serve.selftest.section import SECTIONS, AllMeasured, Began, Context, Message, SectionRun, Told

_SECTION = "serve.selftest.section"
_END_SECONDS = 20.0  # the time that engines may take to end by themselves
_POLL_SECONDS = 0.1
OVER = "the time was over"


def run_section(name: str, context: Context, deadline: float) -> Iterator[Line]:
    """Yields the lines of a section. A measurement that hangs, or ends its process, gives a line
    that says so, and the next one runs in another process. The deadline is monotonic."""
    first: int | None = 0
    while first is not None:
        first = yield from _run_from(SectionRun(name, context, first), deadline)


def _run_from(job: SectionRun, deadline: float) -> Generator[Line, None, int | None]:
    """Runs one process. Returns the number of the measurement to go on with, or None."""
    with tempfile.TemporaryFile() as errors:
        process = _Process(job, errors)
        try:
            began, reason = yield from _listen(process, SECTIONS[job.section].seconds, deadline)
        finally:
            process.end()
    if not reason:
        return None
    id = f"{job.section}.{began.name if began else 'start'}"
    is_over = time.monotonic() > deadline
    yield not_tried(id, OVER) if is_over else failed(id, reason)
    return began.index + 1 if began and not is_over else None


def _listen(
    process: "_Process", max_seconds: float, deadline: float
) -> Generator[Line, None, tuple[Began | None, str]]:
    """Yields the lines of a process. Returns the latest measurement, and why no line follows."""
    began: Began | None = None
    while True:
        seconds = max(0.0, min(max_seconds, deadline - time.monotonic()))
        try:
            message = process.next_message(seconds)
        except queue.Empty:
            return began, f"no end within {seconds:.0f} s"
        match message:
            case Line():
                yield message
            case Began():
                began = message
            case Told(text):
                sys.stderr.write(f"{text}\n")
            case AllMeasured():
                return began, ""
            case None:
                return began, process.how_it_ended()


class _Process:
    """The process of a section, in a process group of its own."""

    def __init__(self, job: SectionRun, errors: IO[bytes]) -> None:
        self._errors = errors
        self._process = subprocess.Popen(
            [sys.executable, "-m", _SECTION, msgspec.json.encode(job).decode()],
            env=with_openblas(os.environ),
            stdin=subprocess.PIPE,  # Its end shows that this process has ended.
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(Message)
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for text in pipe:
                if text.endswith(b"\n"):  # Otherwise the process was killed within the line.
                    self._messages.put(decoder.decode(text))
        self._messages.put(None)

    def next_message(self, seconds: float) -> Message | None:
        """Returns None when the process has closed its output. Raises queue.Empty."""
        return self._messages.get(timeout=seconds)

    def how_it_ended(self) -> str:
        code = self._process.wait()
        how = f"ended with code {code}"
        if code < 0:
            how = f"ended by {signal.Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}: {last}" if last else how

    def end(self) -> None:
        """Ends the process and all that it has started: asks first, because macOS may lose the
        memory of a process that is killed."""
        group = self._process.pid
        deadline = time.monotonic() + _END_SECONDS
        signal_group(group, signal.SIGTERM)
        while self._is_alive(group) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        signal_group(group, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _is_alive(self, group: int) -> bool:
        self._process.poll()
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):  # macOS, for a group of zombies
            return False
        return True


def main() -> int:
    job = msgspec.json.decode(sys.argv[1], type=SectionRun)
    deadline = time.monotonic() + float(sys.argv[2])
    scrubber = Scrubber(())  # Only here are the names of this machine known.
    for line in run_section(job.section, job.context, deadline):
        sys.stdout.write(msgspec.json.encode(scrubber.value(line)).decode() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
