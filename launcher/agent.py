"""The program that a launcher starts on each host of a hostfile: it answers questions, then
supervises one rank.

    launcher -> agent   one message a line on stdin; an empty line says that the launcher is alive
    agent -> launcher   lines that begin with the agent's token are messages, all others the rank's

The messages are those of `serve.core.agent_messages`.

No secret is on an agent's command line. If the launcher is gone, or silent for too long, the agent
asks its rank to end, and kills it if it does not.
"""

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from socket import socket

from launcher.command import exit_code, rank_environment
from launcher.facts import host_facts, kill_former, network_addresses
from launcher.hop import Echo, measure_hop
from launcher.process import LocalProcess, bound, shared_ring
from serve.core.agent_messages import (
    AddressesListed,
    AgentError,
    AgentMessage,
    DescribeHost,
    EchoStarted,
    EnterFolder,
    FolderEntered,
    FromAgent,
    ListAddresses,
    MeasureHop,
    PortsReserved,
    RankEnded,
    RankStarted,
    ReservePorts,
    RunRank,
    SendSignal,
    StartEcho,
    ToAgent,
)
from serve.core.errors import BrigadeError, ClusterError
from serve.core.open_files import allow_files
from serve.core.wire import LineReader, line

ALIVE_SECONDS = 5.0  # how often a launcher sends an empty line to say that it is alive
SILENCE_SECONDS = 60.0  # after this time without a line, an agent assumes that its launcher is gone
OUTPUT_SECONDS = 1.0


class Agent:
    """The agent of one rank. The launcher recognises an agent's messages by the agent's token."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._unread = b""
        self._reserved: list[socket] = []  # ports that the rank will listen on
        self._echoes: list[Echo] = []
        self._write_lock = threading.Lock()
        self._messages: LineReader[ToAgent] = LineReader(ToAgent)

    def run(self) -> int:
        """Serves one launcher until it has gone or its rank has ended. Returns the exit code."""
        self._write("")  # Output of a shell profile may have ended without a newline.
        try:
            while (message := self._hear()) is not None:
                if isinstance(message, RunRank):
                    return self._run(message)
                self._say(self._answer(message))
        except ClusterError as error:  # Lines after a wrong one could not be read either.
            self._say(AgentError(str(error)))
            return error.exit_code
        return 0

    # --- questions

    def _answer(self, question: ToAgent) -> FromAgent:
        try:
            match question:
                case EnterFolder():
                    return self._enter(question)
                case DescribeHost(model, ips, prefix_cache_dir, port):
                    return host_facts(model, ips, prefix_cache_dir, port)
                case ListAddresses():
                    return AddressesListed(network_addresses())
                case ReservePorts(ips):
                    return self._reserve(ips)
                case StartEcho(ip):
                    self._echoes.append(Echo(ip))
                    return EchoStarted(self._echoes[-1].port)
                case MeasureHop(ip, port, seconds):
                    return measure_hop(ip, port, seconds)
                case RunRank() | SendSignal():
                    return AgentError("No rank runs here yet.")
        except (BrigadeError, OSError) as error:
            return AgentError(str(error))

    def _enter(self, question: EnterFolder) -> FolderEntered:
        if question.must_exist or os.path.isdir(question.folder):
            os.chdir(question.folder)
        return FolderEntered(os.getcwd())

    def _reserve(self, ips: list[str]) -> PortsReserved:
        new = [bound(ip) for ip in ips]
        self._reserved += new
        return PortsReserved([each.getsockname()[1] for each in new])

    # --- the rank

    def _run(self, order: RunRank) -> int:
        for reserved in self._reserved:
            reserved.close()
        kill_former(order.secret, order.rank)
        addresses = order.addresses
        listen = addresses.own_as_json()
        with shared_ring(addresses.theirs, order.control, order.secret, listen) as ring:
            base = {**os.environ, **order.environment}
            place = (order.rank, order.num_ranks, order.num_returns)
            environment = rank_environment(base, ring, *place)
            try:
                # The Python of this host: others may have theirs in another place.
                command = [sys.executable, *order.words]
                process = LocalProcess("", command, environment, ring.leash)
            except OSError as error:
                self._say(AgentError(str(error)))
                return 1
            self._say(RankStarted(process.pid))
            ended = threading.Event()
            reader = threading.Thread(target=self._copy, args=(process,), daemon=True)
            listener = (process, ended, order.drain_seconds)
            reader.start()
            threading.Thread(target=self._obey, args=listener, daemon=True).start()
            returncode = process.wait()
            ended.set()
            reader.join(OUTPUT_SECONDS)
        self._say(RankEnded(returncode))
        return exit_code(returncode)

    def _copy(self, process: LocalProcess) -> None:
        for text in process.lines():
            self._write(text)

    def _obey(
        self,
        process: LocalProcess,
        ended: threading.Event,
        drain_seconds: float,
    ) -> None:
        try:
            while (message := self._hear()) is not None:
                match message:
                    case SendSignal(signal.SIGKILL):
                        process.kill()
                    case SendSignal(number):
                        process.signal(number)
                    case _:
                        name = type(message).__name__
                        self._say(AgentError(f"A rank runs here already, so {name} is refused."))
        except ClusterError as error:
            self._say(AgentError(str(error)))
        finally:  # When the launcher is gone, nobody else ends the rank.
            process.signal(signal.SIGTERM)
            if not ended.wait(drain_seconds):
                process.kill()

    # --- lines

    def _hear(self) -> ToAgent | None:
        """Returns a launcher's next message; None if the launcher is gone. Raises ClusterError."""
        while True:
            while b"\n" not in self._unread:
                heard = select.select([0], [], [], SILENCE_SECONDS)[0]
                data = b""
                if heard:
                    data = os.read(0, 1 << 16)
                if not data:
                    return None
                self._unread += data
            text, _, self._unread = self._unread.partition(b"\n")
            if text.strip():  # An empty line only says that the launcher is alive.
                return self._messages.read(text)

    def _say(self, message: AgentMessage) -> None:
        self._write(f"{self._token} {line(message)}")

    def _write(self, text: str) -> None:
        # The launcher may be gone, and the rank must still be able to end.
        with self._write_lock, suppress(OSError, ValueError):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def main() -> int:
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    allow_files()  # The rank inherits the limit.
    return Agent(sys.argv[1]).run()


if __name__ == "__main__":
    sys.exit(main())
