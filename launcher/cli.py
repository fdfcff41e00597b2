"""The front door `brigade`: one table of subcommands, each with its flags and what it runs."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from launcher.command import PROGRAMS, check_num_ranks, rank_command
from launcher.demo import DEFAULT_MODEL, Demo
from launcher.supervisor import END_SECONDS, Supervisor
from serve import __version__
from serve.core.errors import BrigadeError, UsageError


class Parser(argparse.ArgumentParser):
    """argparse, with every error in one line."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation would change its meaning when a flag is added.
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())
        self.exit(2, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


@dataclass(frozen=True, slots=True)
class Subcommand:
    """`run` gets the parsed flags, with the words after `--` as `command`."""

    purpose: str
    usage: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def serve(words: Sequence[str]) -> int:
    # A launcher must start without what only a rank needs.
    from serve.cli.main import main as serve_main

    return serve_main(list(words))


def plan(words: Sequence[str]) -> int:
    from serve.cli.plan import run as run_plan

    return run_plan(list(words))


def fine_tune(words: Sequence[str]) -> int:
    from serve.cli.fine_tune import main as fine_tune_main

    return fine_tune_main(list(words))


def bench(words: Sequence[str]) -> int:
    from serve.cli.bench import run as run_bench

    return run_bench(list(words))


def convert_adapter(words: Sequence[str]) -> int:
    from serve.cli.convert import run as run_convert

    return run_convert(list(words))


def launch(flags: argparse.Namespace) -> int:
    num_ranks = check_num_ranks(flags.num_ranks)
    command = rank_command(flags.command)
    # All ranks are on this machine: what is wrong is said once, before any has started.
    if flags.command[0] == "fine-tune":
        from serve.cli.fine_tune import check as check_fine_tune

        check_fine_tune(flags.command[1:], num_ranks)
        return Supervisor(command, num_ranks).run()
    from serve.cli.main import check

    config, _ = check(flags.command[1:], num_ranks)
    return Supervisor(command, num_ranks, drain_seconds=config.drain_timeout + END_SECONDS).run()


def demo(flags: argparse.Namespace) -> int:
    if flags.command:
        raise UsageError("`brigade demo` takes no command: leave `--` and what follows away.")
    num_ranks = check_num_ranks(flags.num_ranks)
    for name in ("BRIGADE_API_KEY", "BRIGADE_ADMIN_KEY"):
        os.environ.pop(name, None)  # It shows curl lines that work as they are.
    return Demo(flags.model, num_ranks, flags.port, once=flags.once).run()


def add_num_ranks(parser: argparse.ArgumentParser, default: int | None) -> None:
    parser.add_argument(
        "-n",
        "--num-ranks",
        type=int,
        default=default,
        required=default is None,
        metavar="N",
        help="ranks on this machine" + (f" (default: {default})" if default else ""),
    )


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    add_num_ranks(parser, None)


def add_demo_flags(parser: argparse.ArgumentParser) -> None:
    add_num_ranks(parser, 2)
    parser.add_argument("--once", action="store_true", help="end after the answer")
    parser.add_argument(
        "--port", type=int, default=0, help="port of the server (default: a free one)"
    )
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="model folder (default: the embedded one)"
    )


# What serve.cli does, with the words after the subcommand as they are.
HANDED_OVER: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "serve": ("run one rank", serve),
    "fine-tune": ("train an adapter, or layers, as one rank", fine_tune),
    "plan": ("who would get which layers", plan),
    "bench": ("put load on servers, and measure", bench),
    "convert-adapter": ("mlx-lm's format of a LoRA adapter to PEFT's and back", convert_adapter),
}

SUBCOMMANDS = {
    "launch": Subcommand(
        purpose="start ranks on this machine and keep them",
        usage="brigade launch -n N -- serve …",
        add_flags=add_launch_flags,
        run=launch,
    ),
    "demo": Subcommand(
        purpose="two ranks, the embedded model, one answer",
        usage="brigade demo [--once] [--model M] [-n N] [--port P]",
        add_flags=add_demo_flags,
        run=demo,
    ),
}


def build_parser() -> Parser:
    parser = Parser(prog="brigade", description="Pipelined language model serving on MLX.")
    parser.add_argument("--version", action="version", version=f"brigade {__version__}")
    choices = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    # Only for --help: these read their own flags.
    for name, (purpose, _) in HANDED_OVER.items():
        choices.add_parser(name, help=f"{purpose}; see `brigade {name} --help`", add_help=False)
    for name, subcommand in SUBCOMMANDS.items():
        purpose = subcommand.purpose
        own = choices.add_parser(name, help=purpose, description=purpose, usage=subcommand.usage)
        subcommand.add_flags(own)
    return parser


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own words, and those after the first `--`, which are not read here."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def unknown_word(subcommand: str, word: str) -> UsageError:
    if subcommand == "launch" and word in PROGRAMS:
        return UsageError(f"write `--` before `{word}`: brigade launch -n 2 -- {word}.")
    return UsageError(f"{word!r} is not a flag of `brigade {subcommand}`: see its --help.")


def run(words: Sequence[str]) -> int:
    if words and words[0] in HANDED_OVER:
        return HANDED_OVER[words[0]][1](words[1:])
    own, command = split_at_dashes(words)
    flags, unknown = build_parser().parse_known_args(own, argparse.Namespace(command=command))
    if unknown:
        raise unknown_word(flags.subcommand, unknown[0])
    return SUBCOMMANDS[flags.subcommand].run(flags)


def main(words: Sequence[str] | None = None) -> int:
    try:
        return run(sys.argv[1:] if words is None else words)
    except BrigadeError as error:
        print(f"brigade: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
