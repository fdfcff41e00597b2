"""The messages between a launcher and its agents.

They are lines of JSON, because the output of a shell profile may appear between them.
"""

from typing import TypeAlias

import msgspec

from serve.core.addresses import Addresses


class AgentMessage(msgspec.Struct, frozen=True, tag=True):
    """The base of the messages between a launcher and an agent. The receiver ignores unknown
    fields, so that an agent of another version can report its version."""


class EnterFolder(AgentMessage, frozen=True):
    """A launcher asks an agent to work in this folder, which may be missing unless must_exist is
    set. This is the first message; the answer is FolderEntered."""

    folder: str
    must_exist: bool


class DescribeHost(AgentMessage, frozen=True):
    """A launcher asks an agent for HostFacts. ips are addresses that the host should have, model is
    the folder of a model to digest, prefix_cache_dir a folder for prefixes, and port one that
    should be free."""

    model: str | None
    ips: list[str]
    prefix_cache_dir: str | None = None
    port: int | None = None


class ListAddresses(AgentMessage, frozen=True):
    """A launcher asks an agent for the addresses of its host. The answer is AddressesListed."""


class ReservePorts(AgentMessage, frozen=True):
    """A launcher asks an agent to reserve a free port of each of these addresses until the rank
    starts. The answer is PortsReserved."""

    ips: list[str]


class StartEcho(AgentMessage, frozen=True):
    """A launcher asks an agent for an echo at this address. The answer is EchoStarted."""

    ip: str


class MeasureHop(AgentMessage, frozen=True):
    """A launcher asks an agent to measure the hop to another agent's echo, by sending for some
    seconds. The answer is HopSpeed."""

    ip: str
    port: int
    seconds: float


class RunRank(AgentMessage, frozen=True):
    """A launcher asks an agent to start and supervise a rank: the agent's own Python with these
    words. The answers are RankStarted and, at the end, RankEnded. control is the address at which
    this rank finds rank 0's parent; for rank 0, the addresses on which its parent listens,
    separated by commas. secret distinguishes this launch from others. A rank that is asked to end
    is killed after drain_seconds. num_returns is how often the rank was started before."""

    rank: int
    num_ranks: int
    words: list[str]
    environment: dict[str, str]
    addresses: Addresses
    control: str
    secret: str
    drain_seconds: float
    num_returns: int = 0


class SendSignal(AgentMessage, frozen=True):
    """A launcher asks an agent to signal its rank, or for SIGKILL its whole process group."""

    number: int


class FolderEntered(AgentMessage, frozen=True):
    """An agent reports the folder in which it works."""

    folder: str


class MacFacts(msgspec.Struct, frozen=True):
    """The facts of a Mac, each as its tool prints it, or "" if the tool failed. wired_limit is the
    limit of wired memory in units of 2**20 bytes ("0" is the system's default), `sleep` the minutes
    until it sleeps ("0" means never). power_mode is "1" for low power. machine is the processor
    that Python was built for. wired_bytes counts all that is wired, has_ranks says whether any rank
    or engine runs on the host."""

    wired_limit: str
    sleep: str
    version: str = ""
    machine: str = ""
    power_mode: str = ""
    has_firewall: bool = False
    wired_bytes: int = 0
    has_ranks: bool = False


class PrefixFolder(msgspec.Struct, frozen=True):
    """A folder for prefixes on a host: the bytes of its files, the bytes that are free there, and
    the reason why it cannot be used, or None."""

    path: str
    num_bytes: int
    free_bytes: int
    problem: str | None


class HostFacts(AgentMessage, frozen=True):
    """An agent reports the facts of its host. max_files is negative if there is no limit. blas is
    the library that replaces MLX's own. interfaces maps each requested address to its network
    interface, and unusable maps an address to the reason why it cannot be used. model holds the
    digests of the model's files; model_error says why there are none. hub_model is the id of a
    model on the hub. time is in seconds since the epoch. port is the requested port, and
    port_holder the program that listens on it, if any. backend is the extra with which MLX was
    installed, such as "cpu", or "". load is the number of processes that wanted to run in the last
    minute. rdma names the devices for RDMA, and `ranks` what runs there: "rank 1 of mini's launch".
    """

    host: str
    system: str
    python: str
    executable: str
    versions: dict[str, str]
    memory_bytes: int
    free_memory_bytes: int
    free_disk_bytes: int
    max_files: int
    blas: str | None
    variables: dict[str, str]
    strays: list[int]
    interfaces: dict[str, str | None]
    unusable: dict[str, str]
    time: float
    model: dict[str, str] | None = None
    model_error: str | None = None
    hub_model: str | None = None
    prefix_folder: PrefixFolder | None = None
    mac: MacFacts | None = None
    port: int | None = None
    port_holder: str | None = None
    backend: str = ""
    chip: str = ""
    load: float = 0.0
    rdma: list[str] = []
    ranks: list[str] = []


class NetworkAddress(msgspec.Struct, frozen=True):
    """An IPv4 address of a host, with the length of its network's prefix in bits. kind is what
    macOS calls the port, such as Thunderbolt 1, Ethernet or Wi-Fi."""

    ip: str
    prefix_length: int
    interface: str
    kind: str

    def __str__(self) -> str:
        return f"{self.ip}/{self.prefix_length} on {self.interface}"


class AddressesListed(AgentMessage, frozen=True):
    """An agent reports the addresses of its host's interfaces that are up."""

    addresses: list[NetworkAddress]


class PortsReserved(AgentMessage, frozen=True):
    """An agent reports the ports that it has reserved, in the order of the addresses."""

    ports: list[int]


class EchoStarted(AgentMessage, frozen=True):
    """An agent reports the port on which its echo listens."""

    port: int


class HopSpeed(AgentMessage, frozen=True):
    """An agent reports the speed of a hop that it has measured."""

    round_trip_seconds: float
    bytes_per_second: float


class RankStarted(AgentMessage, frozen=True):
    """An agent reports the process of its rank."""

    pid: int


class RankEnded(AgentMessage, frozen=True):
    """An agent reports that its rank has ended. returncode is negative if a signal ended it."""

    returncode: int


class AgentError(AgentMessage, frozen=True):
    """An agent reports why it could not fulfil the launcher's request."""

    reason: str


ToAgent: TypeAlias = (
    EnterFolder
    | DescribeHost
    | ListAddresses
    | ReservePorts
    | StartEcho
    | MeasureHop
    | RunRank
    | SendSignal
)
FromAgent: TypeAlias = (
    FolderEntered
    | HostFacts
    | AddressesListed
    | PortsReserved
    | EchoStarted
    | HopSpeed
    | RankStarted
    | RankEnded
    | AgentError
)
