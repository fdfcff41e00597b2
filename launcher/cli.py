"""The command `brigade`: one table of its commands, and the flags of those that start ranks."""

from serve.core import ctrl_c

_catch_ctrl_c = ctrl_c.ends_silently()

import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path

from launcher.access import HostAccess
from launcher.checks import check_kinds
from launcher.command import HOST, PROGRAMS, check_variable, forwarded, rank_words
from launcher.demo import DEFAULT_MODEL, Demo
from launcher.doctor import check_before, diagnose, log_warnings, query_host
from launcher.facts import host_facts
from launcher.hostfile import Host, Hostfile, read_hostfile
from launcher.process import local_ranks
from launcher.program import check_words, supervise
from launcher.record import launches, stop
from launcher.remote import connected, find_routes, on_each, remote_ranks
from launcher.routes import needed_pairs
from launcher.ssh import SshAccess
from launcher.supervisor import event_line, write_line
from serve import __version__
from serve.cli.flags import did_you_mean, parse
from serve.cli.old_flags import current
from serve.core.blas import with_openblas
from serve.core.config import ServeConfig, check_ranges, flag
from serve.core.errors import BrigadeError, UsageError

_catch_ctrl_c()

# The errors of a failed write to standard output.
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EIO)

LAUNCH_USAGE = """brigade launch (-n N | --nodes all | --hostfile F) [options] [--] serve …
       brigade launch --status | --stop [PID]"""
UP_USAGE = "brigade up MODEL [--nodes NAME,NAME] [flags of `brigade serve`]"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFlags:
    """The flags that say which hosts there are, and how to reach them."""

    nodes: str | None = flag(
        "machines of the group besides this one, or `all`, each with a rank",
        None,
        metavar="NAME,NAME",
    )
    hostfile: Path | None = flag("JSON file with the hosts, one for each rank", None)
    python: str | None = flag(
        "path of the Python with mlx-brigade on the hosts (default: the path of this Python)",
        None,
    )
    cwd: Path | None = flag(
        "working folder on the hosts (default: the current folder, if it exists there)",
        None,
    )
    ssh: str | None = flag("ssh command, such as 'ssh -F FILE' (default: ssh)", None)

    def __post_init__(self) -> None:
        check_ranges(self)
        split_names(self.nodes)
        for name in ("hostfile", "python", "cwd", "ssh"):
            if self.nodes and getattr(self, name):
                raise UsageError(f"--{name} is not for --nodes: leave one of them out.")

    @property
    def access(self) -> HostAccess:
        if self.nodes:
            # Imported here, because hosts reached by ssh do not need it.
            from launcher.nodes.access import NodeAccess

            return NodeAccess()
        ssh = shlex.split(self.ssh or "ssh")
        return SshAccess(tuple(ssh), self.python or sys.executable, self.cwd)

    @property
    def node_names(self) -> list[str]:
        """The names after --nodes; none for `all`."""
        return split_names(self.nodes)

    def hosts(self) -> Sequence[Host]:
        """Returns the hosts, or this machine alone. Raises BrigadeError."""
        if self.nodes:
            from launcher.nodes.up import hosts_of, members

            return hosts_of(members(self.node_names, None))
        if self.hostfile:
            return _read(self.hostfile).hosts
        return (Host(0, HOST, ()),)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags(HostFlags):
    """The flags of `brigade launch`, before the command that it launches."""

    num_ranks: int | None = flag(
        "number of ranks to start on this machine",
        None,
        short=("-n",),
        min=1,
    )
    env: tuple[str, ...] = flag(
        "environment variables for all ranks",
        (),
        metavar="NAME=VALUE",
    )
    status: bool = flag("list the running launches", False)
    stop: int | None = flag(
        "end the launch with this process id, or the only one, and wait until it has ended",
        None,
        metavar="PID",
        alone=0,
    )

    def __post_init__(self) -> None:
        HostFlags.__post_init__(self)
        where = (self.num_ranks, self.nodes, self.hostfile, self.status or None, self.stop)
        if len(where) - where.count(None) != 1:
            raise UsageError("give one of -n, --nodes, --hostfile, --status and --stop.")
        if self.num_ranks and (self.cwd or self.ssh):
            raise UsageError("--cwd and --ssh are for --hostfile: leave them out with -n.")
        for name in ("env", "cwd", "ssh", "python"):
            if self.starts_nothing and getattr(self, name):
                raise UsageError(f"--status and --stop do not take --{name}: leave it out.")

    @property
    def starts_nothing(self) -> bool:
        return self.status or self.stop is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags(HostFlags):
    """The flags of `brigade doctor`."""

    model: Path | None = flag("model folder, whose copies on all hosts are compared", None)
    prefix_cache_dir: Path | None = flag("folder for prefixes, as for `brigade serve`", None)
    port: int = flag("port of the server on rank 0, which must be free", 8080, min=0, max=65535)
    json: bool = flag("print the report as JSON", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestFlags(HostFlags):
    """The flags of `brigade selftest`."""

    model: str | None = flag(
        "folder on all hosts, or org/name of a model on the hub (default: the embedded model)",
        None,
        heading="what is measured",
        metavar="MODEL",
    )
    minutes: float = flag("minutes for all sections", 15.0, metavar="N", min=1, max=600)
    faults: bool = flag(
        "also kill and stop processes of its own servers, and take a link away; asks first", False
    )
    yes: bool = flag("do not ask", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFlags:
    """The flags of `brigade node`."""

    name: str | None = flag("name of this machine (default: its host name)", None)
    port: int = flag("port on which other machines reach this node", 8422, min=0, max=65535)
    join: str | None = flag(
        "a node in another network, whose multicast does not reach this machine",
        None,
        metavar="HOST[:PORT]",
    )
    once: bool = flag("end when the first launch has ended", False)
    code: bool = flag("print the code for pairing with the running node, and exit", False)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpFlags:
    """The flags of `brigade up` that are not those of `serve`."""

    nodes: str | None = flag(
        "the machines that take part, besides this one (default: all that are paired and there)",
        None,
        metavar="NAME,NAME",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesFlags:
    """The flags of `brigade nodes`."""

    pair: str | None = flag("pair with a machine, by the code that it shows", None, metavar="NAME")
    forget: str | None = flag("stop all machines from trusting this one", None, metavar="NAME")
    json: bool = flag("print the table as JSON", False)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.pair is not None and self.forget is not None:
            raise UsageError("give --pair or --forget, not both.")
        for name in ("pair", "forget"):
            if getattr(self, name) == "":
                raise UsageError(f"--{name} names no machine: `brigade nodes` lists them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DownFlags:
    """`brigade down` has no flags of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFlags:
    """The flags of `brigade demo`."""

    num_ranks: int = flag("number of ranks to start on this machine", 2, short=("-n",), min=1)
    once: bool = flag("exit after the answers instead of continuing to serve", False)
    port: int | None = flag(
        "port of the server (default: 8080, or a free port if 8080 is taken)",
        None,
        min=0,
        max=65535,
    )
    model: Path | None = flag("folder of the model (default: the embedded model)", None)

    def __post_init__(self) -> None:
        check_ranges(self)


def launch(words: Sequence[str]) -> int:
    own, command = split_at_command(words)
    if command[:1] == ["serve"]:
        command = current("serve", command, ServeConfig)
    flags = parse(LaunchFlags, own, "brigade launch", PURPOSES["launch"], usage=LAUNCH_USAGE)
    if flags.starts_nothing:
        if command:
            raise UsageError("--status and --stop take no command: leave out `--` and the rest.")
        return show_launches() if flags.status else stop_launch(flags.stop)
    environment = dict(check_variable(word, "--env") for word in flags.env)
    if flags.nodes:
        from launcher.nodes.up import up as launch_on_nodes

        return launch_on_nodes(command, flags.node_names, command, environment)
    access = flags.access
    program = rank_words(command)
    if flags.num_ranks:
        program_flags = check_words(command, flags.num_ranks)
        environment = {**os.environ, **environment}
        check_before([host_facts(None, [])], environment)
        if command[0] == "fine-tune":  # Otherwise each rank would have to start itself again.
            environment = with_openblas(environment)
        python = flags.python or sys.executable
        ranks = local_ranks([python, *program], flags.num_ranks, environment)
        return supervise(command, [HOST] * flags.num_ranks, ranks, program_flags)
    assert flags.hostfile is not None
    hostfile = _read(flags.hostfile)
    hosts = hostfile.hosts
    # The model's files can be checked only if a rank runs on this machine.
    here = next((rank for rank, host in enumerate(hosts) if host.is_local), None)
    program_flags = check_words(command, None if here is None else len(hosts), here or 0)
    serves = command[0] == "serve"
    with connected(hosts, access, write_line, serves=serves) as connections:
        environment = {**forwarded(os.environ), **hostfile.environment, **environment}
        check_before([facts for facts, _ in on_each(connections, query_host)], environment)
        needed = needed_pairs(len(hosts), program_flags.num_shards, serves=serves)
        routes = find_routes(connections, needed)
        log_warnings(check_kinds(hosts, routes, needed))
        drain_seconds = program_flags.drain_seconds
        ranks = remote_ranks(connections, routes, program, environment, drain_seconds)
        return supervise(command, [host.ssh for host in hosts], ranks, program_flags)


def _read(path: Path) -> Hostfile:
    hostfile = read_hostfile(path)
    if hostfile.is_for_rdma:
        what = f"{path} is for RDMA: ranks use TCP over the same cables instead"
        write_line(event_line(f"event=note what={json.dumps(what)}"))
    return hostfile


def split_at_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides the words after `launch` at `--`, or else before the name of a program."""
    takes_word = {"-n"}
    for field in fields(LaunchFlags):
        if field.default is not False:
            takes_word.add("--" + field.name.replace("_", "-"))
    words = list(words)
    if "--" in words:
        dashes = words.index("--")
        return words[:dashes], words[dashes + 1 :]
    for at, word in enumerate(words):
        is_value = at > 0 and words[at - 1] in takes_word
        if word in PROGRAMS and not is_value:
            return words[:at], words[at:]
    return words, []


def show_launches() -> int:
    running = launches()
    if not running:
        print("You have no running launch on this machine.")
    for launch in running:
        minutes = int(time.time() - launch.since) // 60
        place = ""
        if launch.url:
            place = f", {launch.url}"
        print(f"launch {launch.pid}: {launch.state}, started {minutes} min ago{place}")
        print(f"  {shlex.join(launch.words)}")
        for rank, host in enumerate(launch.hosts):
            print(f"  rank {rank} on {host}: {launch.ranks.get(str(rank), 'not started')}")
    return 0


def stop_launch(pid: int | None) -> int:
    print(f"launch {stop(pid or None).pid} has ended.")
    return 0


def doctor(words: Sequence[str]) -> int:
    flags = parse(DoctorFlags, words, "brigade doctor", PURPOSES["doctor"])
    return diagnose(
        flags.hosts(),
        flags.access,
        flags.model,
        flags.port,
        as_json=flags.json,
        prefix_cache_dir=flags.prefix_cache_dir,
    )


def selftest(words: Sequence[str]) -> int:
    flags = parse(SelftestFlags, words, "brigade selftest", PURPOSES["selftest"])
    if flags.hostfile:
        read_hostfile(flags.hostfile)
    if flags.faults and not flags.yes and not os.isatty(0):
        raise UsageError("--faults asks first, and nobody can answer here: add --yes.")
    # Imported here, because other commands do not need them.
    from serve.selftest.run import selftest as run_sections
    from serve.selftest.section import Context

    context = Context(
        model=flags.model,
        hostfile=str(flags.hostfile.resolve()) if flags.hostfile else None,
        nodes=tuple(host.ssh for host in flags.hosts()) if flags.nodes else (),
        ssh=tuple(shlex.split(flags.ssh or "ssh")),
        python=flags.python or sys.executable,
        folder=str(flags.cwd) if flags.cwd else None,
        minutes=flags.minutes,
    )
    return run_sections(context, faults=flags.faults, asks=not flags.yes)


def node(words: Sequence[str]) -> int:
    flags = parse(NodeFlags, words, "brigade node", PURPOSES["node"])
    # Imported here, because other commands do not need them.
    if flags.code:
        from launcher.nodes import client

        print(client.own_code())
        return 0
    from launcher.nodes import node as running

    name = running.default_name() if flags.name is None else flags.name
    running.run(name, flags.port, flags.join, once=flags.once)
    return 0


def up(words: Sequence[str]) -> int:
    model, own, rest = split_model(words)
    flags = parse(UpFlags, own, "brigade up", PURPOSES["up"], usage=UP_USAGE)
    if not model or model.startswith("-"):
        raise UsageError(f"name the model first: {UP_USAGE}.")
    command = current("serve", ["serve", "--model", model, *rest], ServeConfig)
    # Imported here, because other commands do not need it.
    from launcher.nodes.up import up as serve_on_nodes

    return serve_on_nodes(command, split_names(flags.nodes), ["up", *words], {})


def split_names(text: str | None) -> list[str]:
    """Returns the names that a value of --nodes lists; none for `all`, and without a value. Raises
    UsageError."""
    if text in (None, "all"):
        return []
    names = [name for name in text.split(",") if name]
    if not names:
        raise UsageError(f"--nodes {text!r} names no machine: give names, or all.")
    return names


def split_model(words: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Divides the words after `up` into the model, the flags of `up`, and those of `serve`."""
    own: list[str] = []
    rest: list[str] = []
    for word in words:
        is_own = word.partition("=")[0] in ("--nodes", "-h", "--help", "--version")
        if is_own or own[-1:] == ["--nodes"]:
            own.append(word)
        else:
            rest.append(word)
    return (rest[0] if rest else None), own, rest[1:]


def down(words: Sequence[str]) -> int:
    parse(DownFlags, words, "brigade down", PURPOSES["down"])
    from launcher.nodes.up import down as stop_serving

    print(stop_serving())
    return 0


def nodes(words: Sequence[str]) -> int:
    flags = parse(NodesFlags, words, "brigade nodes", PURPOSES["nodes"])
    from launcher.nodes import table

    if flags.pair:
        print(table.pair(flags.pair))
    elif flags.forget:
        print(table.forget(flags.forget))
    else:
        table.show(as_json=flags.json)
    return 0


def demo(words: Sequence[str]) -> int:
    flags = parse(DemoFlags, words, "brigade demo", PURPOSES["demo"])
    for name in ("BRIGADE_API_KEY", "BRIGADE_ADMIN_KEY"):
        os.environ.pop(name, None)  # The curl lines that the demo shows have no key.
    return Demo(flags.model or DEFAULT_MODEL, flags.num_ranks, flags.port, once=flags.once).run()


PURPOSES = {
    "serve": "serve a model as one rank",
    "fine-tune": "train an adapter, or all weights, as one rank",
    "plan": "show which rank would get which layers, and the memory needed",
    "bench": "put load on one or two servers and measure them",
    "convert-adapter": "convert a LoRA adapter from mlx-lm's format to PEFT's, or back",
    "launch": "start and supervise ranks on this machine or over ssh",
    "node": "let the machines of a group find this one and start ranks here",
    "nodes": "list the machines of the group, pair a new one, or forget one",
    "up": "serve a model on the machines of the group",
    "down": "end what `brigade up` has started",
    "doctor": "check hosts and links, and say how to fix problems",
    "demo": "serve the embedded model on two ranks and show a few answers",
    "selftest": "measure machines, links and servers, and write a report to send back",
}
OWN: Mapping[str, Callable[[Sequence[str]], int]] = {
    "launch": launch,
    "node": node,
    "nodes": nodes,
    "up": up,
    "down": down,
    "doctor": doctor,
    "demo": demo,
    "selftest": selftest,
}
# The commands of serve.cli, imported late, because a launcher does not need them.
OTHERS = {
    "serve": ("main", "main"),
    "fine-tune": ("fine_tune", "main"),
    "plan": ("plan", "run"),
    "bench": ("bench", "run"),
    "convert-adapter": ("convert", "run"),
}


def run(words: Sequence[str]) -> int:
    name, *rest = words or [""]
    if name in OWN:
        return OWN[name](rest)
    if name in OTHERS:
        module, function = OTHERS[name]
        return int(getattr(import_module(f"serve.cli.{module}"), function)(rest))
    if name in ("-h", "--help"):
        show_help()
        return 0
    if name == "--version":
        print(f"brigade {__version__}")
        return 0
    problem = "a command is missing"
    if name:
        problem = f"{name!r} is not a command{did_you_mean(name, PURPOSES)}"
    raise UsageError(f"{problem}: use one of {', '.join(PURPOSES)}.")


def show_help() -> None:
    print("usage: brigade COMMAND [options]\n\nPipelined language model serving on MLX.\n")
    for name, purpose in PURPOSES.items():
        print(f"  {name:<16} {purpose}")
    print("\n`brigade COMMAND --help` lists the options of a command.")


def answer(words: Sequence[str]) -> int:
    try:
        return run(words)
    except BrigadeError as error:
        program = "brigade"
        if words and words[0] in PURPOSES:
            program += f" {words[0]}"
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    finally:
        print(end="", flush=True)  # At the end of the process, Python would show a traceback.


def main(words: Sequence[str] | None = None) -> int:
    try:
        return answer(sys.argv[1:] if words is None else words)
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        if error.errno != errno.EPIPE:  # In `brigade … | head -1` the reader has enough.
            write_line(f"brigade: cannot write the output: {error.strerror}.")
        # The rest of the buffer, which Python writes at the end of the process, goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
