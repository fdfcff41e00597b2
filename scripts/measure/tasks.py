"""What a single client may ask: tasks of several kinds, made of texts of this repository and of
Python's standard library."""

import fnmatch
import inspect
import statistics
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
_MAX_CHARACTERS = 900
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    textwrap.wrap,
    textwrap.indent,
    textwrap.shorten,
    textwrap.dedent,
    fnmatch.filter,
    statistics.median,
)
_PAGES = ("architecture.md", "cluster.md", "install.md", "memory-and-prefixes.md", "performance.md")
_QUESTIONS = (
    "What is a good breakfast before a long walk?",
    "Why is the sky blue?",
    "Give me three ideas for a birthday present.",
    "How do bees make honey?",
    "What should I see in Rome in two days?",
    "Explain to a child what a computer does.",
)


@dataclass(frozen=True, slots=True)
class Task:
    """One chat of a kind. prediction is what a client would expect of the answer, if anything."""

    kind: str
    question: str
    prediction: str = ""


def tasks(num_each: int) -> list[Task]:
    """The first num_each tasks of each kind, or fewer if the kind has no more texts."""
    kinds = (_chat, _code, _edits, _predicted_edits, _quotes, _json, _repetition, _summaries)
    chosen: list[Task] = []
    for kind in kinds:
        chosen += [task for _, task in zip(range(num_each), kind(), strict=False)]
    return chosen


def _chat() -> Iterator[Task]:
    for question in _QUESTIONS:
        yield Task("chat", question)


def _sources() -> Iterator[tuple[str, str]]:
    for function in _FUNCTIONS:
        name = getattr(function, "__name__", "function")
        source = textwrap.dedent(inspect.getsource(function))[:_MAX_CHARACTERS]
        yield name, source


def _code() -> Iterator[Task]:
    for _, source in _sources():
        yield Task("code", f"Write a test in Python for this function.\n\n{source}")


def _edits() -> Iterator[Task]:
    for name, source in _sources():
        yield Task("edits", _edit(name, source))


def _predicted_edits() -> Iterator[Task]:
    for name, source in _sources():
        yield Task("edits with prediction", _edit(name, source), source)


def _edit(name: str, source: str) -> str:
    return f"Rename {name} to new_{name} in this code. Answer with the whole code.\n\n{source}"


def _paragraphs() -> Iterator[str]:
    for page in _PAGES:
        text = (ROOT / "docs" / page).read_text("utf-8")
        parts = [part for part in text.split("\n\n") if len(part) > 300 and "|" not in part]
        yield parts[0][:_MAX_CHARACTERS]


def _quotes() -> Iterator[Task]:
    for paragraph in _paragraphs():
        yield Task("quotation", f"Copy the following text word for word.\n\n{paragraph}")


def _json() -> Iterator[Task]:
    for n, name in enumerate(("Ada", "Grace", "Alan", "Edsger", "Barbara")):
        people = ", ".join(f"{name} {i} is {20 + n + i} years old" for i in range(6))
        yield Task("json", f"Write a JSON list with name and age of each person: {people}.")


def _repetition() -> Iterator[Task]:
    for words in ("red green blue", "one two three four", "a b c d e", "north east south west"):
        yield Task("repetition", f"Say this ten times, one line each: {words}")


def _summaries() -> Iterator[Task]:
    for paragraph in _paragraphs():
        yield Task("summaries", f"Summarize this text in three sentences.\n\n{paragraph}")
