"""Ranks on other hosts: an agent on each host starts and supervises one rank."""

import functools
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

from launcher.access import HostAccess
from launcher.agent import ALIVE_SECONDS
from launcher.hostfile import Host
from launcher.process import Start, is_loss, shown, signal_group
from launcher.routes import (
    Network,
    Pair,
    Routes,
    addresses_of,
    choose,
    listening_ips,
)
from launcher.ssh import CONNECT_SECONDS
from launcher.supervisor import event_line
from serve.core.agent_messages import (
    AddressesListed,
    AgentError,
    EchoStarted,
    EnterFolder,
    FolderEntered,
    FromAgent,
    HopSpeed,
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
from serve.core.errors import ClusterError
from serve.core.wire import LineReader, line

GREETING_SECONDS = CONNECT_SECONDS + 10.0
ANSWER_SECONDS = 20.0
GOODBYE_SECONDS = 2.0
CHECK_SECONDS = 0.2
KILL_SECONDS = 5.0  # how long an agent may take to kill its rank

Result = TypeVar("Result")
Answer = TypeVar("Answer", bound=FromAgent)
_MESSAGES: LineReader[FromAgent] = LineReader(FromAgent)


class HostError(ClusterError):
    code = "host"

    def __init__(self, where: str, what: str, fix: str = "") -> None:
        self.where = where
        self.what = what
        self.fix = fix
        super().__init__(": ".join(filter(None, (where, what, fix))) + ".")


class LostHostError(HostError):
    """The connection to a host's agent was lost, or the agent does not answer."""


class HostsError(ClusterError):
    """Several hosts failed, each with its error."""

    code = HostError.code

    def __init__(self, errors: Sequence[HostError]) -> None:
        self.errors = errors
        super().__init__(" ".join(map(str, errors)))


class AgentConnection:
    """The launcher's end of one agent. Raises HostError."""

    def __init__(self, host: Host, access: HostAccess) -> None:
        self.host = host
        self._access = access
        self._token = secrets.token_hex(8)
        command = access.command(host, self._token)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._write_lock = threading.Lock()
        self.noise: list[str] = []
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            what = f"{command[0]} cannot be run ({error})"
            raise HostError(self.name, what, access.missing(host)) from error
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def name(self) -> str:
        return self.host.label

    @property
    def reached(self) -> str:
        return self._access.reached

    def greet(self) -> None:
        """Waits until the agent has started and has entered the working folder."""
        folder = self._access.folder
        question = EnterFolder(str(folder or os.getcwd()), must_exist=folder is not None)
        self.request(question, FolderEntered, GREETING_SECONDS)

    def request(
        self,
        question: ToAgent,
        expected: type[Answer],
        timeout_seconds: float = ANSWER_SECONDS,
    ) -> Answer:
        """Sends a question and returns the agent's answer, which must be of the expected type."""
        self.tell(question)
        return self._answer(expected, timeout_seconds)

    def tell(self, message: ToAgent | None) -> None:
        """Sends a message. None only says that the launcher is alive."""
        text = ""
        if message is not None:
            text = line(message)
        assert self.process.stdin is not None
        # If the agent is gone, its missing answer will show it.
        with self._write_lock, suppress(OSError, ValueError):
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def next_line(self, timeout_seconds: float | None = None) -> str | FromAgent | None:
        """Returns the next line of a rank or message of an agent, or None at the end. Raises
        queue.Empty after the time-out."""
        text = self._lines.get(timeout=timeout_seconds)
        if text is None:
            self._lines.put(None)  # The next call returns None too, and does not wait in vain.
            return None
        token, _, message = text.partition(" ")
        if token != self._token:
            return text
        try:
            return _MESSAGES.read(message)
        except ClusterError as error:
            return AgentError(str(error))

    def check(self) -> None:
        """Raises LostHostError if the connection has ended."""
        if self.process.poll() is not None:
            said = "\n".join(self.noise)
            raise LostHostError(self.name, *self._access.meaning(self.host, said))

    def again(self) -> "AgentConnection":
        """Returns a new connection to the same host: an agent runs only one rank."""
        self.close()
        return AgentConnection(self.host, self._access)

    def lost_line(self) -> str:
        """Returns the line that says that the connection was lost, and what to do."""
        line = f"the connection to {self.host.ssh} was lost"
        if self.host.is_local:
            return f"{line}."
        _, fix = self._access.meaning(self.host, "")
        return f"{line}: {fix}."

    def close(self) -> None:
        """Closes the agent's input, which ends the agent and its rank."""
        assert self.process.stdin is not None
        with self._write_lock, suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _answer(self, expected: type[Answer], timeout_seconds: float) -> Answer:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                answer = self.next_line(max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                what = f"it did not answer within {timeout_seconds:g} s"
                fix = self._access.silent(self.host)
                raise LostHostError(self.name, what, fix) from None
            match answer:
                case None:
                    output = "\n".join(self.noise)
                    raise LostHostError(self.name, *self._access.meaning(self.host, output))
                case str():
                    self.noise += filter(None, [answer])  # the text of a shell profile, or an error
                case AgentError(reason):
                    raise HostError(self.name, reason.rstrip("."))
                case _ if isinstance(answer, expected):
                    return answer
                case _:
                    kinds = f"{type(answer).__name__} instead of {expected.__name__}"
                    raise HostError(self.name, f"its agent answered with {kinds}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            for data in pipe:
                text = data.decode("utf-8", "replace")
                is_cut = not text.endswith("\n") and text.startswith(self._token)
                if not is_cut:  # A killed agent may leave half of a message.
                    self._lines.put(shown(text))
        self._lines.put(None)


class RemoteProcess:
    """A rank that runs under an agent. The rank ends when the agent's connection ends."""

    def __init__(self, connection: AgentConnection, order: RunRank) -> None:
        host = connection.host
        self.name = f"rank {host.rank} {host.ssh}"
        self._connection = connection
        self._returncode: int | None = None
        self._read_all = threading.Event()
        self.pid = connection.request(order, RankStarted).pid

    @property
    def lost(self) -> bool:
        return self._returncode is None or is_loss(self._returncode)

    def lines(self) -> Iterator[str]:
        while (said := self._connection.next_line()) is not None:
            match said:
                case str():
                    yield said
                case RankEnded(returncode):
                    self._returncode = returncode
                case AgentError(reason):
                    yield reason
                case _:
                    yield f"its agent sent {type(said).__name__} while the rank ran."
        if self._returncode is None:
            yield f"brigade launch: {self._connection.lost_line()}"
        self._read_all.set()

    def signal(self, signum: int) -> None:
        self._connection.tell(SendSignal(int(signum)))

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        threading.Thread(target=self._leave_behind, daemon=True).start()

    def _leave_behind(self) -> None:
        """Closes the connection if the rank does not end in time. In that case its agent hangs too,
        as in a frozen container. The rank counts as lost, and the host's next agent kills it."""
        if not self._read_all.wait(KILL_SECONDS):
            self._connection.close()

    def wait(self) -> int:
        self._read_all.wait()
        if self._returncode is None:
            return ClusterError.exit_code
        return self._returncode


@contextmanager
def connected(
    hosts: Sequence[Host],
    access: HostAccess,
    tell: Callable[[str], object],
    *,
    serves: bool = False,
    leave_out: Callable[[HostError], bool] = lambda _: False,
) -> Iterator[list[AgentConnection]]:
    """Starts an agent on each host and waits for it. At the end of the context the agents and
    their ranks end. Until ranks run, a signal ends this process. For a server, SIGTERM is a normal
    end with code 0. leave_out is asked whether to go on without a host that cannot be reached.
    Raises HostsError."""
    connections: list[AgentConnection] = []
    living = threading.Event()
    signals: list[int] = []

    def end(number: int, _: object = None) -> None:
        """Closes the connections. It raises nothing: an error in a callback could be lost."""
        signals.append(number)
        for connection in connections:
            signal_group(connection.process.pid, signal.SIGKILL)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}

    def live() -> None:
        while not living.wait(ALIVE_SECONDS):
            for connection in connections:
                connection.tell(None)

    names = ",".join(host.ssh for host in hosts)
    tell(event_line(f"event=connecting hosts={names} timeout={GREETING_SECONDS:g}"))
    try:
        for host in hosts:
            connections.append(AgentConnection(host, access))
            if signals:  # The signal came before this connection was in the list.
                end(signals[0])
        _greet_all(connections, leave_out)
        threading.Thread(target=live, daemon=True).start()
        yield connections
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        living.set()
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(AgentConnection.close, connections))
        if signals:
            sys.exit(0 if serves and signals[0] == signal.SIGTERM else 128 + signals[0])


def _greet_all(
    connections: list[AgentConnection],
    leave_out: Callable[[HostError], bool],
) -> None:
    """Waits for all agents. Closes and removes connections to hosts that are left out."""

    def greet(connection: AgentConnection) -> AgentConnection | None:
        try:
            connection.greet()
        except HostError as error:
            if not leave_out(error):
                raise
            return connection
        return None

    for lost in filter(None, on_each(connections, greet)):
        connections.remove(lost)
        lost.close()


def on_each(
    connections: Sequence[AgentConnection],
    call: Callable[[AgentConnection], Result],
) -> list[Result]:
    """Calls a function with all connections at once, and returns the results. Raises HostsError."""
    results: list[Result] = []
    errors = []
    pool = ThreadPoolExecutor(len(connections))
    futures = [pool.submit(call, connection) for connection in connections]
    pool.shutdown(wait=False)  # Ctrl-C does not wait for calls that still run.
    for future in futures:
        try:
            results.append(future.result())
        except HostError as error:
            errors.append(error)
    if errors:
        raise HostsError(errors)
    return results


def while_connected(
    connections: Sequence[AgentConnection],
    work: Callable[[], Result],
) -> Result:
    """Returns the result of work on this machine that may take long, such as asking the hub. Stops
    waiting when a connection ends, as it does after a signal. Raises HostError, and what work
    raises."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # The top of the thread: the caller raises it.
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not wait([done], CHECK_SECONDS).done:
        for connection in connections:
            connection.check()
    return done.result()


def find_routes(connections: Sequence[AgentConnection], needed: Sequence[Pair]) -> Routes:
    """Chooses the addresses at which the ranks find each other. Raises HostsError for needed pairs
    of ranks whose hosts have no network in common, and HostError."""
    hosts = [each.host for each in connections]
    networks = list_networks(connections)
    failures: dict[Pair, str] = {}

    def reaches(pair: Pair, ip: str) -> bool:
        caller, called = (connections[rank] for rank in pair)
        try:
            hop_speed(caller, called, ip, seconds=0.0)
        except LostHostError:
            raise
        except HostError as error:
            failures[pair] = f"; {hosts[pair[0]]} tried {ip}: {error.what}"
            return False
        return True

    routes = choose(hosts, networks, reaches)
    check_routes(hosts, networks, routes, needed, failures)
    return routes


def check_routes(
    hosts: Sequence[Host],
    networks: Sequence[Network],
    routes: Routes,
    needed: Sequence[Pair],
    failures: Mapping[Pair, str],
) -> None:
    """Raises HostsError for needed pairs of ranks without a route. failures say why trials of
    addresses have failed."""
    errors: dict[Pair, HostError] = {}
    for one, other in needed:
        if (one, other) not in routes and (other, one) not in errors:
            reason = failures.get((one, other), "")
            errors[one, other] = _no_route(hosts[one], hosts[other], networks, reason)
    if errors:
        raise HostsError(list(errors.values()))


def list_networks(connections: Sequence[AgentConnection]) -> list[Network]:
    """Returns the addresses of each host. Raises HostsError."""

    def ask(connection: AgentConnection) -> Network:
        return connection.request(ListAddresses(), AddressesListed).addresses

    return on_each(connections, ask)


def hop_speed(
    caller: AgentConnection,
    called: AgentConnection,
    ip: str,
    seconds: float,
) -> HopSpeed:
    """Measures the hop to an address of a host, by sending for some seconds. Raises HostError.
    A LostHostError among them says nothing about the hop."""
    port = called.request(StartEcho(ip), EchoStarted).port
    return caller.request(MeasureHop(ip, port, seconds), HopSpeed)


def _no_route(one: Host, other: Host, networks: Sequence[Network], reason: str) -> HostError:
    """Returns the error for two hosts that have to be connected. reason says why a trial failed."""
    addresses = [", ".join(map(str, networks[host.rank])) for host in (one, other)]
    what = (
        "they have no network in common in which one reaches the other "
        f"({one} has {addresses[0]}; {other} has {addresses[1]}{reason})"
    )
    need = "neighbouring ranks" if one.rank and other.rank else "rank 0 and every other rank"
    fix = (
        f"{need} exchange messages: connect these hosts, and give each cable its own subnet "
        "(mlx.distributed_config --over thunderbolt --backend ring --auto-setup)"
    )
    if "No route to host" in reason:
        fix += "; on macOS, allow the terminal under Privacy & Security, Local Network"
    return HostError(f"{one} and {other}", what, fix)


@contextmanager
def remote_ranks(
    connections: list[AgentConnection],
    routes: Routes,
    words: Sequence[str],
    environment: Mapping[str, str],
    drain_seconds: float,
) -> Iterator[list[Start]]:
    """Prepares one rank on each host: the Python there with these words. Each restart needs a new
    connection."""
    ports = on_each(connections, functools.partial(_reserve_ports, routes))
    control_ports = _reserve_ports(routes, connections[0])
    order = functools.partial(
        RunRank,
        num_ranks=len(connections),
        words=list(words),
        environment=dict(environment),
        secret=secrets.token_hex(16),
        drain_seconds=drain_seconds,
    )

    num_starts: Counter[int] = Counter()
    is_over = threading.Event()

    def start(rank: int) -> RemoteProcess:
        num_returns = num_starts[rank]
        if num_returns:
            # The connection is listed before it has answered, which may take long, so that it is
            # closed with the others.
            connections[rank] = connections[rank].again()
            if is_over.is_set():
                connections[rank].close()
            connections[rank].greet()
        num_starts[rank] += 1
        place = order(
            rank=rank,
            addresses=addresses_of(rank, routes, ports),
            control=control_addresses(rank, routes, control_ports),
            num_returns=num_returns,
        )
        return RemoteProcess(connections[rank], place)

    try:
        yield [functools.partial(start, rank) for rank in range(len(connections))]
    finally:
        is_over.set()


def control_addresses(rank: int, routes: Routes, ports: Mapping[str, int]) -> str:
    """Returns where rank 0 listens for the others, for rank 0, and where a rank reaches it. In
    training, a rank that is no neighbour of rank 0 has no route to it, and needs none."""
    ips = list(ports)
    if rank:
        ips = list(routes[rank, 0].ips[:1]) if (rank, 0) in routes else []
    return ",".join(f"{ip}:{ports[ip]}" for ip in ips)


def _reserve_ports(routes: Routes, connection: AgentConnection) -> dict[str, int]:
    """Reserves a port at each address where other ranks find this one."""
    ips = listening_ips(routes, connection.host.rank)
    ports = connection.request(ReservePorts(ips), PortsReserved).ports
    return dict(zip(ips, ports, strict=True))
