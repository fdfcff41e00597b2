"""Builds the command line and the environment of each rank. All functions are pure.

`launcher.supervisor` decides which processes run, and for how long.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve.core.errors import UsageError

HOST = "127.0.0.1"

# The module that a rank runs, by the first word after `--`.
PROGRAMS = {"serve": "serve.cli.main", "fine-tune": "serve.cli.fine_tune"}
RING_CHECK = "serve.ring.check"

# Variables that a rank or MLX reads. With the caller's values, a rank could join another cluster.
RANK_VARIABLES = (
    "BRIGADE_CONTROL",
    "BRIGADE_LEASH",
    "BRIGADE_LISTEN",
    "BRIGADE_RETURNS",
    "BRIGADE_SECRET",
    "MLX_HOSTFILE",
    "MLX_IBV_DEVICES",
    "MLX_JACCL_COORDINATOR",
    "MLX_RANK",
    "MLX_WORLD_SIZE",
)

# The name of the machine whose launcher has started a rank, where machines have names.
LAUNCHER = "BRIGADE_LAUNCHER"

# The folder of sockets to other machines' weights. Each machine's node sets its own.
NEIGHBOURS = "BRIGADE_NEIGHBOURS"

# The launcher's variables that ranks on other hosts get too.
FORWARDED = frozenset(
    {
        *("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN", "LANG", "NO_COLOR", "TZ"),
        *("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHONWARNINGS"),
    }
)
FORWARDED_PREFIXES = ("BRIGADE_", "LC_", "MLX_", "OMP_", "OPENBLAS_")


@dataclass(frozen=True, slots=True)
class Ring:
    """The settings that the ranks of one launch share.

    control is where rank 0's parent listens, secret distinguishes this launch from others, and
    leash is the descriptor of a pipe that ends with the launcher. `listen` is JSON: the addresses
    at which each other rank finds this one. If it is empty, all ranks use the hostfile's.
    """

    hostfile: str
    control: str
    secret: str
    leash: int
    listen: str = ""


def rank_command(words: Sequence[str], python: str = sys.executable) -> list[str]:
    """Returns the command line of every rank on this machine, from the words after `--`."""
    return [python, *rank_words(words)]


def rank_words(words: Sequence[str]) -> list[str]:
    """Returns what follows the Python in the command line of every rank, on any host."""
    names = " or ".join(f"`{name} …`" for name in PROGRAMS)
    if not words:
        raise UsageError(f"there is no command to launch: write `--` and then {names}.")
    if words[0] not in PROGRAMS:
        raise UsageError(f"{words[0]!r} cannot be launched: write {names} after `--`.")
    return ["-m", PROGRAMS[words[0]], *words[1:]]


def rank_environment(
    base: Mapping[str, str],
    ring: Ring,
    rank: int,
    num_ranks: int,
    num_returns: int = 0,
) -> dict[str, str]:
    """Returns the environment of one rank: the caller's, without variables of another cluster and
    with the variables of this one. num_returns is how often the rank was started before."""
    environment = {name: text for name, text in base.items() if name not in RANK_VARIABLES}
    # A rank writes into a pipe. Python would otherwise write only when its buffer is full.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment["BRIGADE_LEASH"] = str(ring.leash)
    if num_ranks > 1:
        environment["BRIGADE_CONTROL"] = ring.control
        environment["BRIGADE_SECRET"] = ring.secret
        environment["MLX_HOSTFILE"] = ring.hostfile
        environment["MLX_RANK"] = str(rank)
        if ring.listen:
            environment["BRIGADE_LISTEN"] = ring.listen
    if num_returns:
        environment["BRIGADE_RETURNS"] = str(num_returns)
    return environment


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that mean the same on another host. Other variables are
    paths and preferences of this host."""
    return {
        name: text
        for name, text in environment.items()
        if name not in (*RANK_VARIABLES, NEIGHBOURS)
        and (name in FORWARDED or name.startswith(FORWARDED_PREFIXES))
    }


def check_variable(word: str, where: str) -> tuple[str, str]:
    """Returns the name and the value in NAME=VALUE. Raises UsageError."""
    name, equals, text = word.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in text:
        raise UsageError(
            f"{where}: {word!r} is not a variable: write NAME=VALUE.", code="malformed"
        )
    if name in RANK_VARIABLES:
        raise UsageError(
            f"{where}: {name} is set for each rank by the launcher: leave it out.",
            code="reserved_name",
        )
    return name, text


def exit_code(returncode: int) -> int:
    """Converts an exit code from subprocess's form to a shell's: 128 + n after signal n."""
    if returncode < 0:
        return 128 - returncode
    return returncode
