"""Makes command line flags from the fields of a frozen config, and checks their values."""

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from serve import __version__
from serve.core.errors import UsageError

Config = TypeVar("Config")


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag as every other error: one line, and how to fix it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see `{self.prog} --help`.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An unknown flag is reported first: argparse would name required ones that are missing,
        which one that is misspelt may stand for."""
        unknown = unknown_flags(args or (), self)
        if unknown:
            hint = did_you_mean(unknown[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return super().parse_known_args(args, namespace)


def unknown_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    names = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    return [name for name in names if name not in parser._option_string_actions]


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown word; empty when no name is like it."""
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
) -> Config:
    """An instance of a config whose fields are serve.core.config.flag. Raises UsageError.

    given are values from elsewhere, such as a file; flags come first.
    """
    given = given or {}
    parser = Parser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mlx-brigade {__version__}")
    kinds = typing.get_type_hints(config)
    group: Any = parser
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        # A heading in the help is for this flag and the flags after it.
        if heading := field.metadata.get("heading"):
            group = parser.add_argument_group(heading)
        if not field.metadata.get("file_only"):
            _add_flag(group, field, kinds[field.name], field.name not in given)
    # As text, so that what a flag refuses is refused in a file too.
    parser.set_defaults(**{k: str(v) if type(v) in (int, float) else v for k, v in given.items()})
    flags = vars(parser.parse_args(argv))
    return config(**{k: tuple(v) if isinstance(v, list) else v for k, v in flags.items()})


def _add_flag(
    group: argparse._ActionsContainer,
    field: "dataclasses.Field[Any]",
    annotation: Any,
    may_be_required: bool,
) -> None:
    names = [*field.metadata.get("short", ()), "--" + field.name.replace("_", "-")]
    kind = _plain_type(annotation)
    if kind is bool:
        group.add_argument(*names, action="store_true", help=field.metadata["help"])
        return
    required = field.default is dataclasses.MISSING and may_be_required
    if typing.get_origin(annotation) is tuple:  # may be repeated
        group.add_argument(
            *names,
            action="append",
            required=required,
            default=None if field.default is dataclasses.MISSING else list(field.default),
            metavar=_metavar(field, str),
            help=field.metadata["help"] + " (may be repeated)",
        )
        return
    if required or field.default is None:
        shown = ""
    else:
        plain = f"{field.default:g}" if kind is float else field.default
        shown = f" (default: {plain})"
    group.add_argument(
        *names,
        type=kind,
        required=required,
        default=None if field.default is dataclasses.MISSING else field.default,
        metavar=_metavar(field, kind),
        help=field.metadata["help"] + shown,
    )


def _metavar(field: "dataclasses.Field[Any]", kind: type) -> str:
    """The word that stands for the value of a flag in its help."""
    if "metavar" in field.metadata:
        return str(field.metadata["metavar"])
    if kind is str:
        return field.name.rpartition("_")[2].upper()
    if kind in (int, float):
        return "SECONDS" if field.metadata["help"].startswith("seconds") else "N"
    return kind.__name__.upper()


def _plain_type(kind: Any) -> type:
    """int of `int | None`."""
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return typing.cast(type, kind)
