"""`brigade demo`: starts ranks, shows which rank holds which layers, and asks one question.

The supervisor runs the ranks in the main thread. The conversation runs in another thread, as an
HTTP client like any other.
"""

import json
import shlex
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from launcher.command import HOST, exit_code, rank_command
from launcher.process import free_ports, local_ranks
from launcher.supervisor import Supervisor, write_line
from serve.client import Client
from serve.core.errors import BrigadeError, ClusterError, EngineError, UsageError

# In a clone these folders are links into examples/, in a wheel they contain files.
_PACKAGE = Path(__file__).resolve().parent
DEFAULT_MODEL = _PACKAGE / "tiny-chat"
ADAPTERS = _PACKAGE / "tiny-chat-adapters"
QUESTION = "What is the capital of France?"
ADAPTER_NAME = "guest"
SWAPPED = ("pirate", "poet")
DEFAULT_PORT = 8080  # the default of `serve`
READY_SECONDS = 300.0  # A first start reads everything from the disk.
POLL_SECONDS = 0.2
CALL_SECONDS = 5.0
ANSWER_SECONDS = 30.0  # the longest wait between two pieces of an answer
ASKED_TO_END = exit_code(-15)


class NotReadyError(ClusterError):
    """The ranks run, but do not become ready."""


class DemoServer:
    """A server on this machine. Each call opens a new connection."""

    def __init__(self, port: int) -> None:
        self._client = Client(f"http://{HOST}:{port}", uses_proxy=False)

    def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Sends a request and returns the status and the body."""
        timeout_seconds = CALL_SECONDS if body is None else ANSWER_SECONDS
        return self._client.call(path, body, timeout_seconds)

    def get(self, path: str) -> dict[str, Any]:
        answer = json.loads(self._right(path))
        assert isinstance(answer, dict)
        return answer

    def load_adapter(self, name: str, path: str) -> None:
        """Loads an adapter under this name, in place of an earlier adapter with the same name."""
        body = {
            "lora_name": name,
            "lora_path": path,
            "load_inplace": True,
        }
        self._right("/v1/load_lora_adapter", body)

    def _right(self, path: str, body: dict[str, Any] | None = None) -> str:
        status, text = self.call(path, body)
        if status != 200:
            raise EngineError(f"{'POST' if body else 'GET'} {path} answered {status}: {text[:300]}")
        return text

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the chunks of one streamed answer."""
        path = "/v1/chat/completions"
        with self._client.open(path, body, ANSWER_SECONDS) as response:
            if response.status_code != 200:
                text = response.read().decode("utf-8", "replace")[:300]
                raise EngineError(f"POST {path} answered {response.status_code}: {text}")
            yield from server_sent(response.iter_lines())


def server_sent(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the data of server-sent events. Raises EngineError if a stream lacks its `[DONE]`."""
    for line in lines:
        field, _, value = line.strip().partition(":")
        if field != "data":
            continue
        if value.strip() == "[DONE]":
            return
        chunk = json.loads(value)
        if "error" in chunk:
            raise EngineError(f"The answer broke off: {chunk['error']}")
        yield chunk
    raise EngineError("The answer broke off without [DONE].")


def pieces(chunks: Iterator[dict[str, Any]]) -> Iterator[tuple[str, int | None]]:
    """Yields the text of each chunk, and the number of tokens so far if the chunk contains it."""
    for chunk in chunks:
        usage = chunk.get("usage") or {}
        choices = chunk.get("choices") or [{}]
        text = choices[0].get("delta", {}).get("content") or ""
        yield text, usage.get("completion_tokens")


def ranks(count: int) -> str:
    if count == 1:
        return "1 rank"
    return f"{count} ranks"


def curl_line(port: int, model: str) -> str:
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    words = ["curl", "-N", f"http://{HOST}:{port}/v1/chat/completions"]
    words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return shlex.join(words)


def python_lines(port: int, model: str) -> str:
    return f"""\
from openai import OpenAI

client = OpenAI(base_url="http://{HOST}:{port}/v1", api_key="none")
messages = [{{"role": "user", "content": {json.dumps(QUESTION)}}}]
for chunk in client.chat.completions.create(model={model!r}, messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()"""


def chosen_port() -> int:
    """Returns the port of README's examples, or another one if it is taken."""
    with suppress(OSError), socket.create_connection((HOST, DEFAULT_PORT), CALL_SECONDS):
        return free_ports(1)[0]
    with socket.socket() as tried:
        # As in the server: connections that ended recently do not block the port.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, DEFAULT_PORT))
        except OSError:
            return free_ports(1)[0]
    return DEFAULT_PORT


def speed(num_tokens: int, first_seconds: float, all_seconds: float) -> str:
    """Describes one answer, by the seconds from the request to the first and last token."""
    text = f"{num_tokens} tokens, the first after {first_seconds * 1000:.0f} ms"
    if num_tokens > 1 and all_seconds > first_seconds:
        text += f", then {(num_tokens - 1) / (all_seconds - first_seconds):.1f} tokens/s"
    return text


class DeferredOutput:
    """Writes the ranks' lines, and holds them back while an answer is being written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deferred: list[str] | None = None

    def write(self, line: str) -> None:
        with self._lock:
            if self._deferred is None:
                write_line(line)
            else:
                self._deferred.append(line)

    def __enter__(self) -> None:
        with self._lock:
            self._deferred = []

    def __exit__(self, *error: object) -> None:
        with self._lock:
            for line in self._deferred or []:
                write_line(line)
            self._deferred = None


class Demo:
    """One run of the demo. port None means the default port if it is free, 0 any free port.

    `command` makes a rank's command line from the words `serve …`; tests start other programs.
    """

    def __init__(
        self,
        model: Path,
        num_ranks: int,
        port: int | None,
        *,
        once: bool,
        command: Callable[[Sequence[str]], list[str]] = rank_command,
    ) -> None:
        if model == DEFAULT_MODEL and not model.is_dir():
            raise UsageError(f"no model at {model}: give the folder of one with --model.")
        if port is None:
            self._port = chosen_port()
        else:
            self._port = port or free_ports(1)[0]
        self._is_moved = port is None and self._port != DEFAULT_PORT
        self._server = DemoServer(self._port)
        self._num_ranks = num_ranks
        self._once = once
        self._console = Console(highlight=False, soft_wrap=True)
        self._output = DeferredOutput()
        self._failure: BrigadeError | None = None
        self._swaps = model == DEFAULT_MODEL  # The embedded adapters fit no other model.
        words = ["serve", "--model", str(model), "--host", HOST, "--port", str(self._port)]
        words += ["--adapter-root", str(ADAPTERS)] if self._swaps else []
        ranks = local_ranks(command(words), num_ranks)
        self._supervisor = Supervisor(ranks, self._output.write, serves=True)

    def run(self) -> int:
        talk = threading.Thread(target=self._talk_then_end, daemon=True)
        talk.start()
        code = self._supervisor.run()
        talk.join(POLL_SECONDS + ANSWER_SECONDS)
        if self._supervisor.interrupted:
            return code
        if isinstance(self._failure, NotReadyError):
            raise self._failure  # This error is the cause, even if ranks had to be killed.
        if self._failure is not None and code in (0, ASKED_TO_END):
            raise self._failure
        # Otherwise a rank failed first: its exit code says more than the demo's failure.
        return 0 if code == ASKED_TO_END else code

    def _talk_then_end(self) -> None:
        try:
            self._talk()
        except BrigadeError as error:
            self._failure = error
        except SystemExit:  # rich raises this for a broken pipe
            self._failure = BrigadeError("the reader of the demo's output has gone.")
        except Exception as error:  # the top of a thread: every error ends the demo
            self._failure = EngineError(f"the demo's conversation failed: {error!r}.")
        if self._once or self._failure is not None:
            self._supervisor.stop()

    def _talk(self) -> None:
        self._wait_until_ready()
        model = self._server.get("/v1/models")["data"][0]["id"]
        with self._output:
            self._show_answer(model)
            for path in SWAPPED if self._swaps else ():
                self._swap(path)
            if not self._once:
                curl = curl_line(self._port, model)
                lines = python_lines(self._port, model)
                self._console.print(f"\nTry it:\n\n{curl}\n", markup=False)
                self._console.print(f"Or in Python:\n\n{lines}\n", markup=False)
                self._console.print(
                    f"Serving on http://{HOST}:{self._port}; "
                    "open it in a browser to see the pipeline at work. Ctrl-C ends."
                )

    def _wait_until_ready(self) -> None:
        if self._is_moved:
            self._console.print(f"Port {DEFAULT_PORT} is taken: this demo uses {self._port}.")
        self._console.print(
            f"Waiting until {ranks(self._num_ranks)} on this machine have loaded their layers"
        )
        deadline = monotonic() + READY_SECONDS
        last = "nothing listens there yet"
        while monotonic() < deadline:
            try:
                status, text = self._server.call("/ready")
            except OSError:
                pass
            else:
                if status == 200:
                    return
                last = f"{status} {' '.join(text.split())[:200]}"
            if self._supervisor.ended.wait(POLL_SECONDS):
                raise ClusterError(
                    "the ranks ended before they were ready; their log lines give the reason."
                )
        raise NotReadyError(
            f"the ranks are not ready after {READY_SECONDS:g} s; the last answer to GET /ready "
            f"was: {last}."
        )

    def _swap(self, path: str) -> None:
        """Loads an adapter in place of the previous one and asks it the same question."""
        begin = monotonic()
        self._server.load_adapter(ADAPTER_NAME, path)
        milliseconds = (monotonic() - begin) * 1000
        self._console.print(
            f"\nloaded {path} as {ADAPTER_NAME} ({milliseconds:.0f} ms)",
            end="",
        )
        self._show_answer(ADAPTER_NAME)

    def _show_answer(self, model: str) -> None:
        """Asks the question, and prints the answer as it arrives."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 64,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._console.print(f"\nuser       {QUESTION}\nassistant  ", end="", markup=False)
        answer = ""
        num_tokens = 0
        first = 0.0
        begin = last = monotonic()
        for text, counted in pieces(self._server.chat(body)):
            if text:
                last = monotonic()
                first = first or last
                num_tokens += 1
                answer += text
                self._console.print(text, end="", markup=False)
            num_tokens = counted or num_tokens
        self._console.print()
        if not answer.strip():
            raise EngineError("the answer is empty.")
        self._console.print("           " + speed(num_tokens, first - begin, last - begin))
