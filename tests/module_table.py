"""The table of modules in docs/architecture.md, made of the first sentences of their docstrings.

`python -m tests.module_table docs/architecture.md` writes it; tests/test_docs.py compares.
"""

import ast
import re
import sys
from pathlib import Path

from tests.figures import product

_HEAD = "| module | purpose |\n|---|---|\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(?:\|.*\n)*")


def first_sentence(source: str) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    text = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
    return re.split(r"\.(?:\s|$)", text, maxsplit=1)[0]


def table() -> str:
    lines = [
        f"| `{path}` | {first_sentence(source)} |\n"
        for path, source in product().items()
        if not path.endswith("__init__.py")
    ]
    return _HEAD + "".join(lines)


def main(page: Path) -> None:
    page.write_text(_TABLE.sub(lambda _: table(), page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
