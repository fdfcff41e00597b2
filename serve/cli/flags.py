"""Makes command line flags from the fields of a frozen config, and checks their values."""

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from serve import __version__
from serve.core.errors import UsageError

Config = TypeVar("Config")

_WRONG_NUMBER = re.compile(
    r"argument (?P<flag>[^:]+): invalid (?P<type>int|float) value: (?P<value>.*)", re.DOTALL
)


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag like every other error: in one line that says how to fix it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{plain(message)}: see `{self.prog} --help`.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reports an unknown flag first: it may be the missing flag, misspelt."""
        unknown = unknown_flags(args or (), self)
        if unknown:
            hint = did_you_mean(unknown[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return super().parse_known_args(args, namespace)


def plain(message: str) -> str:
    """Returns a message of argparse, in plain words if it is about a number."""
    wrong = _WRONG_NUMBER.fullmatch(message)
    if wrong is None:
        return message
    kind = "a whole number" if wrong["type"] == "int" else "a number"
    return f"{wrong['flag']} must be {kind}, not {wrong['value']}"


def unknown_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    names = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    return [name for name in names if name not in parser._option_string_actions]


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown word: a similar name, or nothing."""
    similar = difflib.get_close_matches(word, list(names), n=1, cutoff=0.7)
    if similar:
        return f" (did you mean {similar[0]}?)"
    return ""


def parse(
    config: type[Config],
    argv: Sequence[str],
    program: str,
    description: str,
    given: Mapping[str, Any] | None = None,
    usage: str = "",
) -> Config:
    """Parses a command line into a config, whose fields are made with serve.core.config.flag.
    Raises UsageError.

    `given` are values from elsewhere, such as a file. Flags take precedence over them.
    """
    given = given or {}
    parser = Parser(
        prog=program,
        description=description,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    parser.add_argument("--version", action="version", version=f"mlx-brigade {__version__}")
    kinds = typing.get_type_hints(config)
    for heading, members in by_heading(config).items():
        group = parser.add_argument_group(heading) if heading else parser
        for field in members:
            if not field.metadata.get("file_only"):
                _add_flag(group, field, kinds[field.name], field.name not in given)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if "hidden" in field.metadata:
            _add_flag(parser, field, field.metadata["reads"], False)
    for name, value in given.items():
        # argparse checks a default only if it is text. So numbers are passed as text.
        is_number = type(value) in (int, float)
        parser.set_defaults(**{name: str(value) if is_number else value})
    required = [action for action in parser._actions if action.required]
    needed = [f"{action.option_strings[-1]} {action.metavar}" for action in required]
    parser.usage = usage or " ".join(["%(prog)s", *needed, "[options]"])
    flags = vars(parser.parse_args(argv))
    for name, value in flags.items():
        if isinstance(value, list):
            flags[name] = tuple(value)
    return config(**flags)


def by_heading(config: Any) -> dict[str, list["dataclasses.Field[Any]"]]:
    """Returns the fields of a config that the help shows, by heading. A field without a heading
    belongs to the heading of the field before it. Fields of one heading may be apart."""
    groups: dict[str, list[dataclasses.Field[Any]]] = {}
    heading = ""
    for field in dataclasses.fields(config):
        if "hidden" not in field.metadata:
            heading = field.metadata.get("heading", heading)
            groups.setdefault(heading, []).append(field)
    return groups


def _add_flag(
    group: argparse._ActionsContainer,
    field: "dataclasses.Field[Any]",
    annotation: Any,
    may_be_required: bool,
) -> None:
    name = field.metadata.get("hidden", field.name.replace("_", "-"))
    names = [*field.metadata.get("short", ()), "--" + name]
    kind = _plain_type(annotation)
    if kind is bool:
        action = argparse.BooleanOptionalAction if field.default else "store_true"
        group.add_argument(
            *names, action=action, default=field.default, help=field.metadata["help"]
        )
        return
    has_default = field.default is not dataclasses.MISSING
    default: Any = field.default if has_default else None
    required = may_be_required and not has_default
    if typing.get_origin(annotation) is tuple:
        group.add_argument(
            *names,
            action="extend",
            nargs="+",
            required=required,
            default=None if default is None else list(default),
            metavar=_metavar(field, str),
            help=field.metadata["help"],
        )
        return
    may_be_alone = {}
    if "alone" in field.metadata:
        may_be_alone = {"nargs": "?", "const": field.metadata["alone"]}
    text = field.metadata["help"]
    if "hidden" in field.metadata:
        text = argparse.SUPPRESS
    elif default is not None:
        shown = f"{default:g}" if kind is float else default
        text += f" (default: {shown})"
    group.add_argument(
        *names,
        dest=field.name,
        type=kind,
        required=required,
        default=default,
        metavar=_metavar(field, kind),
        help=text,
        **may_be_alone,
    )


def _metavar(field: "dataclasses.Field[Any]", kind: type) -> str:
    """Returns the word that stands for the value of a flag in its help."""
    if "metavar" in field.metadata:
        return str(field.metadata["metavar"])
    if kind is str:
        return field.name.rpartition("_")[2].upper()
    if kind not in (int, float):
        return kind.__name__.upper()
    is_duration = field.metadata["help"].startswith("seconds")
    return "SECONDS" if is_duration else "N"


def _plain_type(kind: Any) -> type:
    """Returns the type of an annotation without None: int for `int | None`."""
    if isinstance(kind, types.UnionType):
        parts = typing.get_args(kind)
        kind = next(part for part in parts if part is not type(None))
    return typing.cast(type, kind)
