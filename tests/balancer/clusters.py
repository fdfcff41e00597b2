"""Two real clusters that can be drained, killed and started again at the same address."""

from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx2

from tests.balancer.programs import CLUSTER_KEY
from tests.cluster.servers import TINY_CHAT, Server, brigade_launch, gone, serve_flags, started
from tests.ports import free_ports

NUM_RANKS = (2, 1)
MAX_RUNNING, MAX_WAITING = 4, 12
HEADERS = {"authorization": f"Bearer {CLUSTER_KEY}"}
LIMITS = ("--max-num-seqs", str(MAX_RUNNING), "--max-queue", str(MAX_WAITING))
DRAIN_SECONDS = 300


@dataclass
class Clusters:
    """The clusters by number. A cluster keeps its port when it is started again."""

    ports: list[int] = field(default_factory=lambda: free_ports(len(NUM_RANKS)))
    servers: dict[int, Server] = field(default_factory=dict)
    _stacks: dict[int, ExitStack] = field(default_factory=dict)

    def start(self, number: int) -> None:
        port = self.ports[number]
        flags = serve_flags(port, TINY_CHAT, "--api-key", CLUSTER_KEY, *LIMITS)
        stack = self._stacks[number] = ExitStack()
        command = brigade_launch(NUM_RANKS[number], flags)
        self.servers[number] = stack.enter_context(started(command, port))
        self.servers[number].wait_until_ready()

    def drain(self, number: int) -> str:
        """Waits until the cluster has ended by itself, and returns its log."""
        server = self.servers[number]
        address = f"{server.url}/admin/drain?seconds={DRAIN_SECONDS}"
        httpx2.post(address, headers=HEADERS).raise_for_status()
        assert server.process.wait(DRAIN_SECONDS) == 0
        self._stacks.pop(number).close()
        return server.text

    def kill(self, number: int) -> None:
        """Kills every process of the cluster."""
        family = self.servers[number].family()
        for process in family:
            process.kill()
        assert gone(family, seconds=30)
        self._stacks.pop(number).close()

    def close(self) -> None:
        for stack in self._stacks.values():
            stack.close()
