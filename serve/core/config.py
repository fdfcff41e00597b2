"""The configuration of a rank: the flags of `serve` and the environment of its cluster.

Flags and environment are read once, checked, and frozen. No other module defines defaults.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from serve.core.addresses import Addresses
from serve.core.constants import Constants, quick_start
from serve.core.errors import UsageError
from serve.core.layouts import check_layout, parse_num_shards
from serve.core.tool_parsers import call_formats

_KEY = re.compile(r"[!-~]{1,512}")  # the characters that fit into a header
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_HOST_NAME = re.compile(r"\*|[\w.-]{1,253}|(?=.*:.*:)[0-9a-fA-F:.]{2,45}", re.ASCII)
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][\w.:@-]{0,127}(/[A-Za-z0-9][\w.:@-]{0,127})?", re.ASCII)
NO_ADAPTER_NAME = (
    "cannot be an adapter's name: use letters, digits and . _ : @ -, at most one /, and not the "
    "model's name."
)
DEFAULT_NUM_SEQUENCES = 32
FIRST_HEADING = "needed most"
MEMORY_HELP = "memory for weights, keys and values: 24GB, or 24GB,48GB by rank"
SPLIT_HELP = "layers of each stage: auto, even, or numbers such as 20,12, rank 0's first"
KV_BITS_HELP = "quantise keys and values to 8 or 4 bits"
TRAINING_JOIN_SECONDS = 60.0  # how long a rank of a training run waits for the others at its start
TENSOR_PARALLEL_HELP = "ranks that share each layer; must divide the number of ranks"
DRAFT_MODEL_HELP = (
    "source of guessed tokens: a small model with the same vocabulary (a folder on rank 0's "
    "host, or org/name[@REVISION]), or mtp, the model's own prediction head"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def flag(help: str, default: Any = ..., **checks: Any) -> Any:
    """Makes a config field that is also a command line flag; no default makes it required."""
    metadata = {"help": help, **checks}
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata, repr=not checks.get("secret"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The flags that say where a command finds its model."""

    model: Path = flag(
        "folder of the model, or org/name of one on the Hugging Face hub",
        heading=FIRST_HEADING,
    )
    revision: str | None = flag(
        "branch, tag or commit of a model on the hub",
        None,
        heading="model",
    )
    cache_dir: Path | None = flag(
        "folder for files fetched from the hub (default: HF_HOME/brigade)",
        None,
    )

    @property
    def hub_id(self) -> str | None:
        """The model's `org/name` if it is on the hub, or None if it is a folder."""
        return hub_id(self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(ModelSource):
    served_model_name: str | None = flag(
        "the model's name for clients (default: org/name, or the folder's)",
        None,
        heading=FIRST_HEADING,
    )
    host: str = flag("address of the server", "127.0.0.1")
    port: int = flag("port of the server; 0 picks a free one", 8080, min=0, max=65535)
    api_key: tuple[str, ...] = flag(
        "API key that clients must send; also read from BRIGADE_API_KEY. Users of this host see it "
        "in the list of processes: prefer --api-key-file",
        (),
        secret=True,
    )
    memory: str | None = flag(f"{MEMORY_HELP} (default: the free memory)", None, metavar="SIZE")
    max_model_len: int | None = flag(
        "maximum tokens of prompt and answer together (default: the model's context)",
        None,
        min=2,
        heading="model",
    )
    generation_config: str = flag(
        "defaults of sampling: the model's generation_config.json, or OpenAI's",
        "auto",
        among=("auto", "none"),
        metavar="auto|none",
    )
    tool_call_parser: str | None = flag(
        f"format of tool calls: {', '.join(call_formats())} (default: detected)",
        None,
        among=call_formats(),
        metavar="NAME",
    )
    pooling: str | None = flag(
        "how prompts become embeddings (default: as the model's files say)",
        None,
        among=("mean", "last", "cls"),
        metavar="mean|last|cls",
    )
    split: str = flag(SPLIT_HELP, "auto", heading="layers")
    tensor_parallel_size: str = flag(
        f"{TENSOR_PARALLEL_HELP}; auto: the fastest layout, by forecast",
        "1",
        metavar="T",
    )
    kv_bits: int | None = flag(KV_BITS_HELP, None, among=(4, 8))
    max_num_seqs: int = flag(
        "number of sequences that may run at the same time",
        DEFAULT_NUM_SEQUENCES,
        min=1,
        heading="requests",
    )
    max_queue: int = flag("number of requests that may wait; more get 429", 256, min=0)
    max_inter_token: float | None = flag(
        "maximum seconds between two tokens of a stream while prompts are prefilled (default: "
        "about twice the usual time)",
        None,
        min=0.001,
        max=60,
    )
    draft_model: str | None = flag(
        f"{DRAFT_MODEL_HELP}, or none to guess nothing (default: guess from the text so far)",
        None,
        metavar="M",
    )
    enable_prefix_caching: bool = flag(
        "reuse common prefixes of prompts (default: on)",
        True,
        heading="common prefixes",
    )
    prefix_cache_scope: str = flag(
        "share prefixes among all clients, or only between requests with the same API key",
        "all",
        among=("all", "key"),
        metavar="all|key",
    )
    prefix_cache_dir: Path | None = flag(
        "folder on each host for prefixes that outlive a restart (default: none)",
        None,
    )
    prefix_cache_disk: str = flag(
        "maximum size of --prefix-cache-dir: 50GB, or 50GB,20GB by rank",
        "50GB",
        metavar="SIZE",
    )
    lora_modules: tuple[str, ...] = flag(
        "LoRA adapters to load at the start, by name",
        (),
        metavar="NAME=PATH",
        heading="LoRA adapters",
    )
    adapter_root: Path | None = flag(
        "folder below which adapters may be loaded over HTTP (default: none)",
        None,
    )
    allow_hub_adapters: bool = flag("allow adapters on the hub, by org/name", False)
    adapter_memory: str | None = flag(
        "maximum memory for adapters: 1GB, or 1GB,2GB by rank (default: no limit)",
        None,
        metavar="SIZE",
    )
    api_key_file: Path | None = flag("file with API keys, one per line", None, heading="access")
    admin_key: tuple[str, ...] = flag(
        "key for admin calls; also read from BRIGADE_ADMIN_KEY. Without one they need an API key; "
        "without any key, only this host may make them",
        (),
        secret=True,
    )
    admin_key_file: Path | None = flag("file with admin keys, one per line", None)
    allowed_host: tuple[str, ...] = flag(
        "name to accept in the Host header when there are no API keys; * for any",
        (),
    )
    allowed_origins: tuple[str, ...] = flag(
        "origin whose web pages may call the server: https://a.example; * for any",
        (),
        metavar="ORIGIN",
    )
    no_ui: bool = flag("do not serve the web page at /", False)
    join_timeout: float = flag(
        "seconds to wait for a rank to connect; at the start under `brigade launch`, at least 300",
        60.0,
        min=1,
        max=10**6,
        heading="start, loss of a rank, end",
    )
    replan: bool = flag(
        "give the layers of a rank that does not return within --join-timeout to the others",
        False,
    )
    drain_timeout: float = flag(
        "seconds that requests get to finish when the server ends",
        5.0,
        min=0.05,
        max=10**6,
    )
    constants: Constants = flag("", Constants(), hidden="quick-start", reads=quick_start, alone="")

    def __post_init__(self) -> None:
        check_ranges(self)
        check_revision(self.model, self.revision)
        _check_origins(self.allowed_origins)
        _check_hosts(self.allowed_host)
        _check_adapters(self.lora_modules, self.model_name)
        check_layout(self.num_shards, self.split)

    @property
    def url(self) -> str:
        if ":" in self.host:
            host = f"[{self.host}]"
        else:
            host = self.host
        return f"http://{host}:{self.port}"

    @property
    def num_shards(self) -> int | None:
        """The number of shards of each stage; None if it is chosen when all ranks have joined."""
        return parse_num_shards(self.tensor_parallel_size)

    @property
    def has_drafter(self) -> bool:
        """Whether rank 0 has a draft model or a prediction head that guesses."""
        return self.draft_model not in (None, "none")

    def start_patience(self, *, is_launched: bool) -> float:
        """Returns for how many seconds ranks wait for a rank that has not connected.

        They wait longer if `brigade launch` started every rank: it ends all ranks when one ends, so
        a rank that has not connected is still busy. They also wait longer for rank 0 to fetch the
        small files of a hub model.
        """
        if is_launched or self.hub_id:
            return max(self.join_timeout, self.constants.load_timeout)
        return self.join_timeout

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.hub_id or self.model.resolve().name


def _check_origins(origins: tuple[str, ...]) -> None:
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--allowed-origins {origin!r} is not an origin: write https://HOST[:PORT], or *.",
                code="malformed",
            )


def _check_hosts(hosts: tuple[str, ...]) -> None:
    for name in hosts:
        if not _HOST_NAME.fullmatch(name):
            raise UsageError(
                f"--allowed-host {name!r} is not a host: write a name such as llm.example.org "
                "or an address, without http:// and port, or * for any.",
                code="malformed",
            )


def _check_adapters(words: tuple[str, ...], model_name: str) -> None:
    names: set[str] = set()
    for word in words:
        name, separator, path = word.partition("=")
        if not (name and separator and path):
            raise UsageError(
                f"--lora-modules {word!r} is wrong: write NAME=PATH.", code="malformed"
            )
        if not may_name_adapter(name, model_name):
            raise UsageError(f"--lora-modules {name!r} {NO_ADAPTER_NAME}", code="adapter_name")
        if name in names:
            raise UsageError(f"--lora-modules has the name {name!r} twice: give each its own.")
        names.add(name)


def may_name_adapter(name: str, model_name: str) -> bool:
    return name != model_name and bool(_ADAPTER_NAME.fullmatch(name))


def hub_id(path: Path, root: Path = Path()) -> str | None:
    """Returns `org/name` if path names a repository on the hub; None for a folder below root."""
    # Only a text of this form is looked up in the file system: a long one would raise OSError.
    if not _HUB_ID.fullmatch(str(path)):
        return None
    return None if (root / path).exists() else str(path)


def draft_on_hub(draft_model: str | None) -> tuple[str, str | None] | None:
    """Returns `org/name` and the revision of a draft model on the hub. None if it is a folder, or
    if --draft-model names no model."""
    # Path.exists() raises OSError for a long text.
    if draft_model is None or os.path.exists(draft_model):
        return None
    repo, _, revision = draft_model.partition("@")
    return (repo, revision or None) if hub_id(Path(repo)) else None


def draft_folder(draft_model: str | None) -> Path | None:
    """Returns the folder of a draft model. None if it is on the hub, or if --draft-model names no
    model."""
    if draft_model is None or draft_model in ("none", "mtp") or draft_on_hub(draft_model):
        return None
    return Path(draft_model)


def check_revision(model: Path, revision: str | None) -> None:
    if revision and not hub_id(model):
        raise UsageError(f"--revision is for models on the hub, and {model} is not one.")


def check_ranges(config: Any) -> None:
    """Raises UsageError if a field has a value that its flag does not allow."""
    for name, field_ in type(config).__dataclass_fields__.items():
        check_range(name, getattr(config, name), field_.metadata)


def check_range(name: str, value: Any, checks: Mapping[str, Any]) -> None:
    flag_name = "--" + name.replace("_", "-")
    lower = checks.get("min")
    upper = checks.get("max")
    among = checks.get("among")
    if value is None:
        return
    if among and value not in among:
        raise UsageError(
            f"{flag_name} {value} is not one of {', '.join(map(str, among))}.", code="unknown_name"
        )
    # NaN is neither larger nor smaller than a bound, and must be refused.
    is_large_enough = lower is None or value >= lower
    is_small_enough = upper is None or value <= upper
    if not is_large_enough or not is_small_enough:
        if upper is None:
            bounds = f"at least {lower}"
        else:
            bounds = f"from {lower} to {upper}"
        raise UsageError(
            f"{flag_name} {value} is out of range: it must be {bounds}.", code="out_of_range"
        )


# --- keys


def with_keys(config: ServeConfig, environment: Mapping[str, str]) -> ServeConfig:
    """Adds the keys from files and from the environment to those from flags. Only rank 0 calls it:
    the other ranks need no keys, and may not have the files. Raises UsageError."""
    api_key = _keys("api", config.api_key, config.api_key_file, environment)
    admin_key = _keys("admin", config.admin_key, config.admin_key_file, environment)
    if config.prefix_cache_scope == "key" and not api_key:
        raise UsageError("--prefix-cache-scope key needs API keys: give --api-key-file.")
    return replace(config, api_key=api_key, admin_key=admin_key)


def _keys(
    kind: str,
    given: tuple[str, ...],
    file: Path | None,
    environment: Mapping[str, str],
) -> tuple[str, ...]:
    flag_name = f"--{kind}-key"
    variable = f"BRIGADE_{kind.upper()}_KEY"
    sources: dict[str, tuple[str, ...]] = {}
    if given:
        sources[flag_name] = given
    if variable in environment:
        sources[variable] = (environment[variable],)
    if file is not None:
        sources[f"{flag_name}-file {file}"] = _read_lines(file, f"{flag_name}-file")
    for source, keys in sources.items():
        _check_keys(source, keys)
    return tuple(chain.from_iterable(sources.values()))


def _check_keys(source: str, keys: tuple[str, ...]) -> None:
    """Raises UsageError if a source contains no valid key: a mistake must not open the server to
    everybody."""
    if not keys or not all(_KEY.fullmatch(key) for key in keys):
        raise UsageError(
            f"{source} has no key: give 1 to 512 characters without spaces.", code="no_key"
        )


def _read_lines(file: Path, flag_name: str) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(
            f"{flag_name} {file} cannot be read: {reason}.", code="unreadable"
        ) from error
    return tuple(filter(None, lines))


# --- the cluster, from the environment that the launcher sets


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The place of this rank in its cluster.

    control is where rank 0's parent listens: on rank 0 all addresses, on another rank the address
    that it can reach. secret distinguishes one launch from another. leash is a file descriptor that
    is closed when the launcher ends. addresses are those of the hostfile when this rank started:
    the file may be gone when an engine restarts. num_returns is how often the launcher has started
    this rank again.
    """

    rank: int = 0
    num_ranks: int = 1
    hosts: tuple[str, ...] = ("127.0.0.1",)
    control: tuple[Address, ...] = ()
    secret: str = ""
    leash: int | None = None
    addresses: Addresses = Addresses(0, (), ())
    num_returns: int = 0


def read_cluster(environment: Mapping[str, str]) -> Cluster:
    """Reads the cluster from MLX_RANK and MLX_HOSTFILE, which mlx.launch and brigade launch set.

    mlx.launch -n 1 gives an empty hostfile, which means a cluster of one rank.
    """
    leash = None
    if environment.get("BRIGADE_LEASH"):
        leash = _number(environment, "BRIGADE_LEASH")
    num_returns = _number({"BRIGADE_RETURNS": "0", **environment}, "BRIGADE_RETURNS")
    if "MLX_RANK" not in environment and "MLX_HOSTFILE" not in environment:
        return Cluster(leash=leash, num_returns=num_returns)
    rank = _number(environment, "MLX_RANK")
    hostfile = environment.get("MLX_HOSTFILE")
    if hostfile is None:
        raise UsageError(
            "MLX_RANK is set but MLX_HOSTFILE is not: start the ranks with `brigade launch` "
            "or with `mlx.launch --backend ring`."
        )
    ring, listed = _read_hostfile(Path(hostfile))
    if rank not in range(max(1, len(ring))):
        raise UsageError(
            f"MLX_RANK={rank} is not one of the {len(ring)} ranks in {hostfile}.",
            code="out_of_range",
        )
    if len(ring) <= 1:
        return Cluster(leash=leash)
    # mlx.launch numbers its ports upwards from rank 0's, so it does not use the port below.
    control = environment.get("BRIGADE_CONTROL") or f"{ring[0].host}:{ring[0].port - 1}"
    addresses = Addresses.known_to_all(rank, listed)
    if environment.get("BRIGADE_LISTEN"):
        own = _read_own_addresses(environment["BRIGADE_LISTEN"], len(ring))
        addresses = Addresses(rank, listed, own)
    return Cluster(
        rank=rank,
        num_ranks=len(ring),
        hosts=_hosts(ring, addresses),
        control=tuple(parse_address(each, "BRIGADE_CONTROL") for each in control.split(",")),
        secret=environment.get("BRIGADE_SECRET", ""),
        leash=leash,
        addresses=addresses,
        num_returns=num_returns,
    )


def _hosts(ring: Sequence[Address], addresses: Addresses) -> tuple[str, ...]:
    """Returns the host of each rank. Ranks on this host get this rank's name for it, because it may
    have an address for each pair."""
    mine = ring[addresses.rank].host
    own = {parse_address(each, "BRIGADE_LISTEN").host for pair in addresses.own for each in pair}
    return tuple(mine if address.host in own else address.host for address in ring)


def _read_own_addresses(text: str, num_ranks: int) -> tuple[tuple[str, ...], ...]:
    try:
        own = msgspec.json.decode(text, type=tuple[tuple[str, ...], ...])
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"BRIGADE_LISTEN is not a JSON list of lists of 'ip:port': {error}.",
            code="wrong_format",
        ) from error
    if len(own) != num_ranks or not all(own):
        raise UsageError(
            f"BRIGADE_LISTEN does not have addresses for {num_ranks} ranks: "
            "it is set by the launcher.",
            code="wrong_format",
        )
    return own


def parse_address(text: str, where: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) not in range(1, 65536):
        raise UsageError(
            f"{where}: {text!r} is not an address: write HOST:PORT, port 1 to 65535.",
            code="malformed",
        )
    return Address(host, int(port))


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UsageError(
            f"{name}={text!r} is not a number: it is set by the launcher.", code="malformed"
        )
    return int(text)


def _read_hostfile(path: Path) -> tuple[list[Address], tuple[tuple[str, ...], ...]]:
    """Returns each rank's first address in MLX's JSON list of lists of "ip:port", and the list."""
    try:
        text = path.read_text().strip()
        entries = msgspec.json.decode(text or "[]", type=tuple[tuple[str, ...], ...])
        first = [parse_address(addresses[0], str(path)) for addresses in entries]
    except OSError as error:
        raise UsageError(f"MLX_HOSTFILE={path} cannot be read: {error.strerror}.") from error
    except (msgspec.MsgspecError, ValueError, LookupError) as error:
        raise UsageError(
            f"MLX_HOSTFILE={path} is not a JSON list of lists of 'ip:port': {error}.",
            code="wrong_format",
        ) from error
    return first, entries
