"""Fourteen clients of all kinds, and two ranks whose links run through proxies. The tests with many
faults share them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.recovery.proxy import Proxy
from tests.cluster.recovery.test_links import Ranks
from tests.cluster.recovery.test_recovery import ANSWER_TOKENS, Stream
from tests.cluster.servers import TINY_CHAT, Server, started
from tests.ports import free_ports

NUM_STREAMS = 14
MAX_SILENT_SECONDS = 240.0
ADAPTERS = TINY_CHAT.parent / "adapters"
ADAPTER_FLAGS = (
    "--lora-modules",
    f"pirate={ADAPTERS / 'pirate'}",
    "--lora-modules",
    f"poet={ADAPTERS / 'poet'}",
)
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 9999},
    "minItems": 60,
}


class AnyStream(Stream):
    """Streams 0 to 7 are those of the base class. Streams 8 to 10 use an adapter, greedy or seeded.
    Streams 11 to 13 have a grammar, and stream 13 an adapter as well."""

    def body(self) -> dict[str, Any]:
        fields = super().body()
        if self.number in (8, 9, 10, 13):
            fields["model"] = "poet" if self.number == 10 else "pirate"
        if self.number >= 11:
            fields["ignore_eos"] = False
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "numbers", "schema": NUMBERS},
            }
        return fields


def run_crowd(
    server: Server,
    disturb: Callable[[list[AnyStream]], None],
    numbers: Sequence[int] = range(NUM_STREAMS),
    num_tokens: int = ANSWER_TOKENS,
) -> list[AnyStream]:
    """Starts the streams of these numbers and disturbs them. Returns them when all have ended, or
    when no token has come for four minutes: a machine with other work may be very slow."""
    streams = [AnyStream(server, number, num_tokens) for number in numbers]
    for stream in streams:
        stream.start()
    disturb(streams)
    num_arrived = 0
    arrived_at = time.monotonic()
    while any(stream.is_alive() for stream in streams):
        count = sum(len(stream.times) for stream in streams)
        if count > num_arrived:
            num_arrived = count
            arrived_at = time.monotonic()
        if time.monotonic() > arrived_at + MAX_SILENT_SECONDS:
            break
        time.sleep(0.05)
    return streams


def is_lost(stream: Stream) -> bool:
    return stream.is_alive() or stream.end != "data: [DONE]"


def has_changed(stream: Stream, undisturbed: Stream) -> bool:
    """Whether a stream got another text than an undisturbed one, or other log-probabilities."""
    if stream.text != undisturbed.text or len(stream.scores) != len(undisturbed.scores):
        return True
    pairs = zip(stream.scores, undisturbed.scores, strict=True)
    return any(abs(score - expected) > 1e-3 for score, expected in pairs)


def longest_gap(streams: Sequence[Stream], began: float, ended: float) -> float:
    """Returns the longest time in seconds between two tokens of one stream, of all gaps that
    overlap with a period of the monotonic clock."""
    gaps = [0.0]
    for stream in streams:
        for before, after in pairwise(stream.times):
            if after > began and before < ended:
                gaps.append(after - before)
    return max(gaps)


class Pair:
    """A cluster of two ranks that are started one by one, as on two hosts. Their ring and the
    connection of their parents run through proxies. Rank 1 may be started again."""

    def __init__(self, stack: ExitStack, ranks: Ranks) -> None:
        self.ranks = ranks
        self._second = stack.enter_context(ExitStack())
        self.other = self._second.enter_context(started(ranks.command(1)))
        first = started(ranks.command(0), ranks.ports[-1])
        self.server = stack.enter_context(first)

    def start_other_again(self) -> None:
        """Starts rank 1 after its parent has ended."""
        self._second.close()
        self.other = self._second.enter_context(started(self.ranks.command(1)))

    def family(self) -> dict[int, list[psutil.Process]]:
        """Returns the processes of each rank, its parent first."""
        return {0: self.server.family(), 1: self.other.family()}

    def engines(self) -> dict[int, psutil.Process]:
        """Returns the engine of each rank that works. A spare one is younger."""
        found: dict[int, psutil.Process] = {}
        for rank, processes in self.family().items():
            workers = [process for process in processes if is_engine(process)]
            if workers:
                found[rank] = min(workers, key=lambda process: process.create_time())
        return found


def is_engine(process: psutil.Process) -> bool:
    try:
        return "serve.rank.worker" in process.cmdline()
    except psutil.Error:  # It has ended.
        return False


@contextmanager
def pair(
    folder: Path,
    *flags: str,
    model: Path = TINY_CHAT,
) -> Iterator[Pair]:
    """Starts two ranks with the adapters of the model, and waits until they are ready."""
    ports = free_ports(4)
    with ExitStack() as stack:
        *proxies, control_proxy = [Proxy(port) for port in ports[:3]]
        for proxy in (*proxies, control_proxy):
            stack.callback(proxy.close)
        own_flags = (*ADAPTER_FLAGS, *flags)
        ranks = Ranks(folder, ports, proxies, own_flags, model, control_proxy)
        running = Pair(stack, ranks)
        running.server.wait_until_ready()
        yield running
