"""The command `brigade`: one table of subcommands, with the flags of each and the function that
runs it."""

from serve.core import ctrl_c

_catch_ctrl_c = ctrl_c.ends_silently()

import argparse
import errno
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from launcher.command import (
    HOST,
    PROGRAMS,
    check_num_ranks,
    check_variable,
    forwarded,
    rank_command,
    with_shards,
)
from launcher.demo import DEFAULT_MODEL, Demo
from launcher.doctor import ask, check_before, diagnose
from launcher.facts import host_facts
from launcher.hostfile import Host, read_hostfile
from launcher.process import Start, local_ranks
from launcher.record import launches, recorded, stop
from launcher.remote import SshAccess, connected, on_each, remote_ranks
from launcher.supervisor import DRAIN_SECONDS, END_SECONDS, MAX_RESTARTS, Supervisor, write_line
from serve import __version__
from serve.core.config import TENSOR_PARALLEL_HELP, check_range
from serve.core.errors import BrigadeError, UsageError

_catch_ctrl_c()

# The errors with which writing to standard output fails.
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EIO)


class Parser(argparse.ArgumentParser):
    """A parser that reports every error in one line."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation would change its meaning when a flag is added.
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        from serve.cli.flags import plain

        message = " ".join(plain(message).split())
        self.exit(2, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One subcommand. `run` gets the parsed flags, with the words after `--` as `command`."""

    purpose: str
    usage: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def launch(flags: argparse.Namespace) -> int:
    if flags.status or flags.stop is not None:
        check_alone(flags)
        if flags.status:
            return show_launches()
        return stop_launch(flags.stop)
    environment = dict(check_variable(word, "--env") for word in flags.env)
    if flags.tensor_parallel_size is not None:
        flags.command = with_shards(flags.command, flags.tensor_parallel_size)
    command = rank_command(flags.command, flags.python)
    if flags.hostfile is None:
        if flags.cwd or flags.ssh:
            raise UsageError("--cwd and --ssh are for --hostfile: leave them out with -n.")
        num_ranks = check_num_ranks(flags.num_ranks)
        terms = check_words(flags.command, num_ranks)
        environment = {**os.environ, **environment}
        check_before([host_facts(None, [])], environment)
        ranks = local_ranks(command, num_ranks, environment)
        return keep(flags.command, [HOST] * num_ranks, ranks, terms)
    hostfile = read_hostfile(flags.hostfile)
    # The model's files can be checked only if a rank runs on this machine.
    here = next((rank for rank, host in enumerate(hostfile.hosts) if host.is_local), None)
    if here is None:
        num_here = None
    else:
        num_here = len(hostfile.hosts)
    terms = check_words(flags.command, num_here, here or 0)
    serves = flags.command[0] == "serve"
    with connected(hostfile.hosts, ssh_access(flags), write_line, serves=serves) as connections:
        environment = {
            **forwarded(os.environ),
            **hostfile.environment,
            **environment,
        }
        check_before(on_each(connections, ask), environment)
        ranks = remote_ranks(connections, command, environment, terms.drain_seconds)
        return keep(flags.command, [h.ssh for h in hostfile.hosts], ranks, terms)


def check_alone(flags: argparse.Namespace) -> None:
    """Raises UsageError for flags that --status and --stop would ignore."""
    if flags.command:
        raise UsageError("--status and --stop take no command: leave out `--` and the rest.")
    given = {
        "--env": bool(flags.env),
        "--cwd": flags.cwd is not None,
        "--ssh": flags.ssh is not None,
        "--python": flags.python != sys.executable,
        "--tensor-parallel-size": flags.tensor_parallel_size is not None,
    }
    ignored = [name for name, is_given in given.items() if is_given]
    if ignored:
        raise UsageError(f"--status and --stop do not take {ignored[0]}: leave it out.")


@dataclass(frozen=True, slots=True)
class Terms:
    """The program's flags that the launcher obeys: the seconds that ranks may take to end and to
    reach rank 0, and whether rank 0 goes on without another rank."""

    drain_seconds: float = DRAIN_SECONDS
    join_seconds: float = 0.0
    replans: bool = False


def check_words(words: Sequence[str], num_ranks: int | None, rank: int = 0) -> Terms:
    """Checks the words after `--` once, before any rank starts. With num_ranks it also checks them
    against the model and the files of that rank's host. Raises BrigadeError."""
    if words[0] == "fine-tune":
        from serve.cli.fine_tune import check as check_fine_tune

        if num_ranks is not None:
            check_fine_tune(words[1:], num_ranks, rank)
        return Terms()
    from serve.cli.flags import parse
    from serve.cli.main import check
    from serve.core.config import ServeConfig

    if num_ranks is None:
        config = parse(ServeConfig, words[1:], "brigade serve", "")
    else:
        config, _ = check(words[1:], num_ranks)
    return Terms(
        config.drain_timeout + END_SECONDS,
        config.start_patience(is_launched=True),
        config.replan,
    )


def keep(
    words: Sequence[str],
    hosts: Sequence[str],
    ranks: AbstractContextManager[list[Start]],
    terms: Terms,
) -> int:
    with recorded(words, hosts, terms.drain_seconds) as record:
        supervisor = Supervisor(
            ranks,
            write_line,
            terms.drain_seconds,
            record,
            MAX_RESTARTS,
            serves=words[0] == "serve",
            replans=terms.replans,
            trains=words[0] == "fine-tune",
            join_seconds=terms.join_seconds,
        )
        return supervisor.run()


def ssh_access(flags: argparse.Namespace) -> SshAccess:
    return SshAccess(tuple(shlex.split(flags.ssh or "ssh")), flags.python, flags.cwd)


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


def stop_launch(pid: int) -> int:
    print(f"launch {stop(pid or None).pid} has ended.")
    return 0


def doctor(flags: argparse.Namespace) -> int:
    if flags.hostfile:
        hosts = read_hostfile(flags.hostfile).hosts
    else:
        hosts = (Host(0, HOST, ()),)
    return diagnose(
        hosts,
        ssh_access(flags),
        flags.model,
        flags.port,
        as_json=flags.json,
        prefix_cache_dir=flags.prefix_cache_dir,
    )


def demo(flags: argparse.Namespace) -> int:
    num_ranks = check_num_ranks(flags.num_ranks)
    for name in ("BRIGADE_API_KEY", "BRIGADE_ADMIN_KEY"):
        os.environ.pop(name, None)  # The curl lines that the demo shows have no key.
    return Demo(flags.model, num_ranks, flags.port, once=flags.once).run()


def add_num_ranks(parser: Any, default: int | None = None) -> None:
    text = f" (default: {default})" if default else ""
    parser.add_argument(
        *("-n", "--num-ranks"),
        type=int,
        default=default,
        metavar="N",
        help=f"number of ranks to start on this machine{text}",
    )


def add_host_flags(parser: Any) -> None:
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="path of the Python with mlx-brigade on the hosts (default: the path of this Python)",
    )
    parser.add_argument(
        "--cwd",
        type=Path,
        help="working folder on the hosts (default: the current folder, if it exists there)",
    )
    parser.add_argument("--ssh", help="ssh command, such as 'ssh -F FILE' (default: ssh)")


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    add_num_ranks(what)
    what.add_argument(
        "--hostfile",
        type=Path,
        metavar="F",
        help="JSON file with the hosts; starts one rank on each",
    )
    what.add_argument("--status", action="store_true", help="list the running launches")
    what.add_argument(
        "--stop",
        nargs="?",
        type=int,
        const=0,
        metavar="PID",
        help="end a launch and wait until it has ended",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable for all ranks (may be repeated)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        metavar="T",
        help=f"{TENSOR_PARALLEL_HELP}; auto is for `serve` only. The same as after the command",
    )
    add_host_flags(parser)


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="F",
        help="JSON file with the hosts (default: only this host)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of a model whose copies on all hosts are compared",
    )
    parser.add_argument(
        "--prefix-cache-dir",
        type=Path,
        metavar="D",
        help="folder for prefixes, as for `brigade serve`",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8080,
        help="port of the server on rank 0, checked to be free (default: 8080)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_host_flags(parser)


def add_demo_flags(parser: argparse.ArgumentParser) -> None:
    add_num_ranks(parser, 2)
    parser.add_argument(
        "--once",
        action="store_true",
        help="exit after the answers instead of serving on",
    )
    parser.add_argument(
        "--port",
        type=int,
        help="port of the server (default: 8080, or a free port if 8080 is taken)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=DEFAULT_MODEL,
        help="folder of the model (default: the embedded model)",
    )


# Subcommands of serve.cli, which read the words after the subcommand themselves: their purpose,
# module and function. They are imported late, because a launcher does not need them.
HANDED_OVER = {
    "serve": ("serve a model as one rank", "main", "main"),
    "fine-tune": ("train an adapter, or all weights, as one rank", "fine_tune", "main"),
    "plan": ("show which rank would get which layers, and the memory needed", "plan", "run"),
    "bench": ("put load on one or two servers and measure them", "bench", "run"),
    "convert-adapter": (
        "convert a LoRA adapter from mlx-lm's format to PEFT's, or back",
        "convert",
        "run",
    ),
}

SUBCOMMANDS = {
    "launch": Subcommand(
        purpose="start and supervise ranks on this machine or over ssh",
        usage="brigade launch (-n N | --hostfile F) [--tensor-parallel-size T] [--env NAME=VALUE] "
        "[--] serve …\n"
        "       brigade launch --status | --stop [PID]",
        add_flags=add_launch_flags,
        run=launch,
    ),
    "doctor": Subcommand(
        purpose="check hosts and links, and say how to fix problems",
        usage="brigade doctor [--hostfile F] [--model M] [--port P] [--json]",
        add_flags=add_doctor_flags,
        run=doctor,
    ),
    "demo": Subcommand(
        purpose="serve the embedded model on two ranks and show a few answers",
        usage="brigade demo [--once] [--model M] [-n N] [--port P]",
        add_flags=add_demo_flags,
        run=demo,
    ),
}


def build_parsers() -> tuple[Parser, dict[str, Parser]]:
    """Returns the parser of `brigade`, and the parsers of the launcher's own subcommands."""
    parser = Parser(prog="brigade", description="Pipelined language model serving on MLX.")
    parser.add_argument("--version", action="version", version=f"brigade {__version__}")
    choices = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    # Only for --help: these subcommands read their own flags.
    for name, (purpose, *_) in HANDED_OVER.items():
        choices.add_parser(name, help=f"{purpose}; see `brigade {name} --help`", add_help=False)
    parsers = {}
    for name, subcommand in SUBCOMMANDS.items():
        purpose = subcommand.purpose
        own = choices.add_parser(
            name,
            help=purpose,
            description=purpose,
            usage=subcommand.usage,
        )
        subcommand.add_flags(own)
        parsers[name] = own
    return parser, parsers


# The flags of `launch` that are followed by a word of any kind.
LAUNCH_FLAGS_WITH_WORD = (
    "-n",
    "--num-ranks",
    "--hostfile",
    "--tensor-parallel-size",
    "--env",
    "--python",
    "--cwd",
    "--ssh",
)


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides the words into the launcher's own and those after the first `--`, which are not read
    here. If `launch` has no `--`, its command begins with the program's name, as in mlx.launch."""
    words = list(words)
    if "--" in words:
        dashes = words.index("--")
        return words[:dashes], words[dashes + 1 :]
    end = program_at(words) if words[:1] == ["launch"] else len(words)
    return words[:end], words[end:]


def program_at(words: Sequence[str]) -> int:
    """Returns the index of the program's name among the words of a command line, or the number of
    words if there is none. A word that is the value of a flag is not a name."""
    for at, word in enumerate(words):
        if word in PROGRAMS and words[at - 1] not in LAUNCH_FLAGS_WITH_WORD:
            return at
    return len(words)


def check_own_words(words: Sequence[str], parsers: Mapping[str, Parser]) -> None:
    """Raises UsageError for a misspelt flag. argparse would report a missing one instead."""
    from serve.cli.flags import unknown_flags

    if words and words[0] in parsers:
        parser = parsers[words[0]]
        for word in unknown_flags(words, parser):
            raise unknown_word(parser, words[0], word)


def unknown_word(parser: Parser, subcommand: str, word: str) -> UsageError:
    from serve.cli.flags import did_you_mean

    if subcommand == "launch" and word in PROGRAMS:
        return UsageError(f"write `--` only once, before `{word}`: brigade launch -n 2 -- {word}.")
    hint = did_you_mean(word, parser._option_string_actions)
    return UsageError(f"{word!r} is not a flag of `brigade {subcommand}`{hint}: see its --help.")


def check_subcommand(words: Sequence[str]) -> None:
    from serve.cli.flags import did_you_mean

    names = [*HANDED_OVER, *SUBCOMMANDS]
    if words and not words[0].startswith("-") and words[0] not in names:
        hint = did_you_mean(words[0], names)
        raise UsageError(f"{words[0]!r} is not a command{hint}: use one of {', '.join(names)}.")


def run(words: Sequence[str]) -> int:
    if words and words[0] in HANDED_OVER:
        _, module, function = HANDED_OVER[words[0]]
        handed_over = getattr(import_module(f"serve.cli.{module}"), function)
        return int(handed_over(list(words[1:])))
    check_subcommand(words)
    if words[:1] == ["launch"]:
        # Imported here, because `brigade --help` does not need it.
        from serve.cli.old_flags import current

        words = current("launch", words)
    own, command = split_at_dashes(words)
    parser, parsers = build_parsers()
    check_own_words(own, parsers)
    flags, unknown = parser.parse_known_args(own, argparse.Namespace(command=command))
    name = flags.subcommand
    if unknown:
        raise unknown_word(parsers[name], name, unknown[0])
    if command and name != "launch":
        raise UsageError(
            f"`brigade {name}` takes no command: leave out `--` and everything after it."
        )
    if "port" in flags:
        check_range("port", flags.port, {"min": 0, "max": 65535})
    return SUBCOMMANDS[name].run(flags)


def program_name(words: Sequence[str]) -> str:
    """Returns the name of the program to print before an error, such as `brigade launch`."""
    is_known = bool(words) and words[0] in (*HANDED_OVER, *SUBCOMMANDS)
    if is_known:
        return f"brigade {words[0]}"
    return "brigade"


def answer(words: Sequence[str]) -> int:
    try:
        return run(words)
    except BrigadeError as error:
        print(f"{program_name(words)}: {error}", file=sys.stderr)
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
