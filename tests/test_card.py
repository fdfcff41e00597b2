"""The card: what never appears in the product. Its sizes are only reported (scripts/figures)."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.figures import (
    class_names,
    cycles,
    hidden_cycles,
    imports,
    nodes,
    product,
    sources_of_tests,
    untyped_messages,
)

UNOWNED = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\([\w@-]+\))")


def may_print(path: str) -> bool:
    return "cli" in path.removesuffix(".py").split("/")


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything and does nothing about it."""
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    if not re.search(r"\b(Base)?Exception\b", caught):
        return False
    nothing = (ast.Pass, ast.Continue)
    return all(
        isinstance(statement, nothing)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in handler.body
    )


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def faults(path: str, source: str) -> Iterator[str]:
    """What breaks the card in one file, `path` relative to the repository."""
    for node in nodes(source):
        if isinstance(node, ast.ExceptHandler) and swallows(node):
            yield f"{path}:{node.lineno}: every exception is swallowed"
        printed = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        if printed and not may_print(path):
            yield f"{path}:{node.lineno}: print below cli"
    for line, text in comments(source):
        if UNOWNED.search(text):
            yield f"{path}:{line}: a TODO without an owner; write TODO(name)"


def test_every_file_keeps_the_style_rules() -> None:
    found = [fault for path, source in product().items() for fault in faults(path, source)]
    assert not found, "\n" + "\n".join(found)


def test_no_imports_form_a_cycle() -> None:
    sources = product()
    assert not cycles(imports(sources))
    assert not hidden_cycles(sources, sources_of_tests())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve/rank/a.py", "print(1)"),
        ("serve/rank/cliff.py", "print(1)"),
        ("serve/rank/a.py", "try:\n    g()\nexcept Exception:\n    pass"),
        ("serve/rank/a.py", "try:\n    g()\nexcept (OSError, Exception) as e:\n    ..."),
        ("serve/rank/a.py", "try:\n    g()\nexcept:\n    pass"),
        ("serve/rank/a.py", "g()  # TODO: mend"),
        ("serve/rank/a.py", "g()  # FIXME"),
    ],
)
def test_a_file_that_breaks_a_style_rule_is_found(path: str, source: str) -> None:
    assert list(faults(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve/cli/main.py", "print(1)"),
        ("launcher/cli.py", "print(1)"),
        ("serve/rank/a.py", "try:\n    g()\nexcept OSError:\n    pass"),
        ("serve/rank/a.py", "try:\n    g()\nexcept Exception:\n    log()\n    raise"),
        ("serve/rank/a.py", "g('TODO')  # TODO(ada): mend"),
    ],
)
def test_a_file_that_keeps_the_style_rules_has_no_fault(path: str, source: str) -> None:
    assert not list(faults(path, source))


def test_messages_between_processes_have_types() -> None:
    assert not untyped_messages(product())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("launcher/a.py", "import json\nfrom serve.core.wire import line\njson.loads(b)"),
        ("launcher/a.py", "from serve.core import wire\ndef f(a: dict[str, Any]): ..."),
        ("launcher/a.py", "import json, subprocess\nsubprocess.Popen(c)\njson.dumps(a)"),
        ("serve/core/messages.py", "class Status(Message):\n    note: Any"),
    ],
)
def test_an_untyped_message_is_found(path: str, source: str) -> None:
    assert untyped_messages({path: source, "serve/core/wire.py": ""}) == {path: 1}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve/bench/a.py", "import json\njson.loads(body)"),
        ("serve/tune/a.py", "from serve.core import messages\nconfig: dict[str, Any] = {}"),
        ("launcher/a.py", "from serve.core.wire import line\nline(message)"),
    ],
)
def test_json_of_clients_and_files_is_not_taken_for_a_message(path: str, source: str) -> None:
    assert not untyped_messages({path: source, "serve/core/wire.py": ""})


# Classes whose names occur twice in the product. The list may only shrink.
DOUBLED = {"Gone", "Link", "Probe"}


def test_no_two_classes_share_a_name_except_listed_classes() -> None:
    doubled = {name for name, count in class_names(product()).items() if count > 1}
    assert not doubled - DOUBLED, "rename one of the classes"
    assert len(DOUBLED) <= 8
