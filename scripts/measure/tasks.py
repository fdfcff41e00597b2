"""What a client may ask a real chat model: tasks of several kinds, made of texts of this repository
and of Python's standard library."""

import fnmatch
import inspect
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.measure.servers import ROOT

_MAX_CHARACTERS = 900
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    textwrap.wrap,
    textwrap.indent,
    textwrap.shorten,
    textwrap.dedent,
    fnmatch.filter,
    statistics.median,
)
_QUESTIONS = (
    "What is a good breakfast before a long walk?",
    "Why is the sky blue?",
    "Give me three ideas for a birthday present.",
    "How do bees make honey?",
    "What should I see in Rome in two days?",
    "Explain to a child what a computer does.",
)
_WORDS = ("red green blue", "one two three four", "a b c d e", "north east south west")
_SHORT = ("chat", "code", "json", "repetition")  # the kinds with short prompts


@dataclass(frozen=True, slots=True)
class Task:
    """One chat of a kind. prediction is what a client would expect of the answer, if anything."""

    kind: str
    question: str
    prediction: str = ""


def tasks(num_each: int) -> list[Task]:
    """The first num_each tasks of each kind, or fewer if the kind has no more texts."""
    found = [Task("chat", question) for question in _QUESTIONS[:num_each]]
    for function in _FUNCTIONS[:num_each]:
        name = function.__name__
        source = textwrap.dedent(inspect.getsource(function))[:_MAX_CHARACTERS]
        edit = f"Rename {name} to new_{name} in this code. Answer with the whole code.\n\n{source}"
        found.append(Task("code", f"Write a test in Python for this function.\n\n{source}"))
        found.append(Task("edits", edit))
        found.append(Task("edits with prediction", edit, source))
    for text in _paragraphs()[:num_each]:
        found.append(Task("quotation", f"Copy the following text word for word.\n\n{text}"))
        found.append(Task("summaries", f"Summarize this text in three sentences.\n\n{text}"))
    for name in ("Ada", "Grace", "Alan", "Edsger", "Barbara")[:num_each]:
        people = ", ".join(f"{name} {i} is {20 + i} years old" for i in range(6))
        found.append(Task("json", f"Write a JSON list with name and age of each person: {people}."))
    for words in _WORDS[:num_each]:
        found.append(Task("repetition", f"Say this ten times, one line each: {words}"))
    return found


def short_tasks() -> list[Task]:
    return [task for task in tasks(4) if task.kind in _SHORT]


def _paragraphs() -> list[str]:
    """The first long paragraph of each page of the documentation."""
    found: list[str] = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        parts = page.read_text("utf-8").split("\n\n")
        long = [part for part in parts if len(part) > 300 and "|" not in part]
        found += [part[:_MAX_CHARACTERS] for part in long[:1]]
    return found
