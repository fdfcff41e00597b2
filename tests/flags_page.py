"""docs/flags.md: the flags of `serve` and of `fine-tune`, made of the fields of their configs.

`python -m tests.flags_page docs/flags.md` writes it; tests/test_docs.py compares.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve.cli.flags import by_heading
from serve.core.config import ServeConfig
from serve.tune.config import FineTuneConfig

_HEAD = """# Flags

Every flag of `serve` and `fine-tune`, with its default, as `--help` prints them. Switches have no
default: they are off. The other commands have few flags: see `brigade COMMAND --help`.
"""
_TABLE = "| flag | default | meaning |\n|---|---|---|\n"
_COMMANDS = {"serve": ServeConfig, "fine-tune": FineTuneConfig}


def page() -> str:
    return _HEAD + "".join(
        f"\n## {command}\n\n{_TABLE}" + "".join(_rows(config))
        for command, config in _COMMANDS.items()
    )


def _rows(config: Any) -> Iterator[str]:
    for heading, members in by_heading(config).items():
        yield f"| **{heading}** | | |\n"
        yield from map(_row, members)


def _row(field: "dataclasses.Field[Any]") -> str:
    meaning = field.metadata["help"].replace("|", "\\|")
    if field.metadata.get("file_only"):
        return f"| `{field.name}` | | {meaning} (only in the YAML file) |\n"
    no = "no-" if field.default is True else ""
    names = [*field.metadata.get("short", ()), f"--{no}{field.name.replace('_', '-')}"]
    flags = ", ".join(f"`{name}`" for name in names)
    return f"| {flags} | {_default(field.default)} | {meaning} |\n"


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value in (False, True, ()):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")
