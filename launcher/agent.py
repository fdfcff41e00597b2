"""What a launcher starts on each host of a hostfile: answers questions, then keeps one rank.

    launcher -> agent   one JSON object a line on stdin; an empty line says that it lives
    agent -> launcher   lines that begin with the agent's token are answers, all others the rank's

Nothing secret is on its command line. When the launcher is gone, or silent for too long, the
rank is asked to end, and killed if it does not.
"""

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from socket import socket
from typing import Any, cast

from launcher.command import exit_code, rank_environment
from launcher.facts import holder, host_facts, kill_former
from launcher.hop import Echo, measure_hop
from launcher.process import LocalProcess, bound, shared_ring
from serve.core.errors import BrigadeError

ALIVE_SECONDS = 5.0  # how often a launcher says that it lives,
SILENCE_SECONDS = 60.0  # and how long it may be silent
OUTPUT_SECONDS = 1.0

Message = dict[str, Any]


class Agent:
    def __init__(self, token: str) -> None:
        self._token = token
        self._unread = b""
        self._held: list[socket] = []  # ports that the rank will listen on
        self._echoes: list[Echo] = []
        self._write_lock = threading.Lock()
        self._answers: dict[str, Callable[..., Message]] = {
            "enter": self._enter,
            "facts": host_facts,
            "ports": self._ports,
            "listen": self._listen,
            "measure": measure_hop,
            "holder": lambda port: {"holder": holder(port)},
        }

    def run(self) -> int:
        self._write("")  # A shell profile may have left a line open.
        self._say(pid=os.getpid())
        while (message := self._hear()) is not None:
            name = message.pop("ask")
            if name == "run":
                return self._run(**message)
            try:
                self._say(**self._answers[name](**message))
            except (BrigadeError, OSError) as error:
                self._say(error=str(error))
        return 0

    # --- questions

    def _enter(self, folder: str, must_exist: bool) -> Message:
        if must_exist or os.path.isdir(folder):
            os.chdir(folder)
        return {"folder": os.getcwd()}

    def _ports(self, ips: list[str]) -> Message:
        """Free ports, kept until the rank starts."""
        new = [bound(ip) for ip in ips]
        self._held += new
        return {"ports": [each.getsockname()[1] for each in new]}

    def _listen(self, ip: str) -> Message:
        self._echoes.append(Echo(ip))
        return {"port": self._echoes[-1].port}

    # --- the rank

    def _run(
        self,
        *,
        rank: int,
        num_ranks: int,
        command: list[str],
        environment: dict[str, str],
        addresses: list[list[str]],
        control: str,
        secret: str,
        drain_seconds: float,
    ) -> int:
        for held in self._held:
            held.close()
        kill_former(secret, rank)
        with shared_ring(addresses, control, secret) as ring:
            told = rank_environment({**os.environ, **environment}, ring, rank, num_ranks)
            try:
                process = LocalProcess("", command, told, ring.leash)
            except OSError as error:
                self._say(error=str(error))
                return 1
            self._say(pid=process.pid)
            ended = threading.Event()
            reader = threading.Thread(target=self._copy, args=(process,), daemon=True)
            listener = (process, ended, drain_seconds)
            reader.start()
            threading.Thread(target=self._obey, args=listener, daemon=True).start()
            returncode = process.wait()
            ended.set()
            reader.join(OUTPUT_SECONDS)
        self._say(ended=returncode)
        return exit_code(returncode)

    def _copy(self, process: LocalProcess) -> None:
        for line in process.lines():
            self._write(line)

    def _obey(self, process: LocalProcess, ended: threading.Event, drain_seconds: float) -> None:
        try:
            while (message := self._hear()) is not None:
                if message["signal"] == signal.SIGKILL:
                    process.kill()
                else:
                    process.signal(message["signal"])
        finally:  # Nobody else ends the rank when nobody is heard any more.
            process.signal(signal.SIGTERM)
            if not ended.wait(drain_seconds):
                process.kill()

    # --- lines

    def _hear(self) -> Message | None:
        """None when the launcher is gone."""
        while True:
            while b"\n" not in self._unread:
                heard = select.select([0], [], [], SILENCE_SECONDS)[0]
                data = b""
                if heard:
                    data = os.read(0, 1 << 16)
                if not data:
                    return None
                self._unread += data
            line, _, self._unread = self._unread.partition(b"\n")
            if line.strip():  # An empty one only says that the launcher lives.
                return cast(Message, json.loads(line))

    def _say(self, **answer: Any) -> None:
        self._write(f"{self._token} {json.dumps(answer)}")

    def _write(self, line: str) -> None:
        # The launcher may be gone; the rank must be able to end all the same.
        with self._write_lock, suppress(OSError, ValueError):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def main() -> int:
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    return Agent(sys.argv[1]).run()


if __name__ == "__main__":
    sys.exit(main())
