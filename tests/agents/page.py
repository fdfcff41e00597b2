"""docs/agents.md, as a user would follow it: the files and commands of each section."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "agents.md"
URL = "http://127.0.0.1:8080"
MODEL = "my-model"
CONTEXT = "32768"

_BLOCK = re.compile(r"(?:`~/(?P<path>[^`]+)`:\n\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.S)
_VERSION = re.compile(r"^Version ([\d.]+\d)", re.M)


@dataclass(frozen=True, slots=True)
class Section:
    """files have paths relative to the home folder. program is in Python, for agents that are
    libraries."""

    version: str
    files: Mapping[str, str]
    shell: str
    program: str


def section(name: str) -> Section:
    """The section of this heading."""
    text = PAGE.read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    version = _VERSION.search(text)
    assert version, name
    blocks = list(_BLOCK.finditer(text))
    named = {block["path"]: block["text"] for block in blocks if block["path"]}
    by_language = {block["language"]: block["text"] for block in blocks if not block["path"]}
    return Section(version[1], named, by_language.get("sh", ""), by_language.get("python", ""))
