"""The card: how long functions and files may be, and what never appears in the product."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from statistics import median, quantiles

import pytest

from tests.figures import (
    code_lines,
    cycles,
    files_by_folder,
    hidden_cycles,
    imports,
    nodes_per_line,
    nodes_per_statement,
    product,
    public_methods,
    sources_of_tests,
    stumps,
    untyped_messages,
)

MAX_FUNCTION_LINES = 80
MAX_FUNCTION_LINES_OF_95_PERCENT = 45
MAX_MEDIAN_FUNCTION_LINES = 10
MAX_FILE_LINES = 500
MAX_FILES_IN_FOLDER = 20
MAX_NODES_PER_STATEMENT = 11.0
MAX_NODES_PER_LINE = 8.5
MAX_PUBLIC_METHODS = 15

UNOWNED = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\([\w@-]+\))")


def functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Name, line and length of each function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


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
    tree = ast.parse(source)
    if code_lines(source) > MAX_FILE_LINES:
        yield f"{path}: {code_lines(source)} lines of code, {MAX_FILE_LINES} allowed"
    for name, line, length in functions(tree):
        if length > MAX_FUNCTION_LINES:
            yield f"{path}:{line}: {name} has {length} lines, {MAX_FUNCTION_LINES} allowed"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and swallows(node):
            yield f"{path}:{node.lineno}: every exception is swallowed"
        printed = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        if printed and not may_print(path):
            yield f"{path}:{node.lineno}: print below cli"
    for line, text in comments(source):
        if UNOWNED.search(text):
            yield f"{path}:{line}: a TODO without an owner; write TODO(name)"


def test_every_file_keeps_the_card() -> None:
    found = [fault for path, source in product().items() for fault in faults(path, source)]
    assert not found, "\n" + "\n".join(found)


def test_folders_are_small() -> None:
    counts = files_by_folder(product() | sources_of_tests())
    too_large = {folder: count for folder, count in counts.items() if count > MAX_FILES_IN_FOLDER}
    assert not too_large


def test_statements_and_lines_hold_one_thought() -> None:
    sources = product()
    means = nodes_per_statement(sources)
    dense = {folder: mean for folder, mean in means.items() if mean > MAX_NODES_PER_STATEMENT}
    assert not dense
    assert nodes_per_line(sources) <= MAX_NODES_PER_LINE


def test_classes_are_narrow() -> None:
    methods = public_methods(product())
    assert not {name: count for name, count in methods.items() if count > MAX_PUBLIC_METHODS}


def test_no_imports_form_a_cycle() -> None:
    sources = product()
    assert not cycles(imports(sources))
    assert not hidden_cycles(sources, sources_of_tests())


def test_most_functions_are_short() -> None:
    lengths = [
        length for source in product().values() for *_, length in functions(ast.parse(source))
    ]
    assert median(lengths) <= MAX_MEDIAN_FUNCTION_LINES
    assert quantiles(lengths, n=20)[-1] <= MAX_FUNCTION_LINES_OF_95_PERCENT


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve/rank/a.py", "def f():\n" + "    g()\n" * 80),
        ("serve/rank/a.py", "g()\n" * 501),
        ("serve/rank/a.py", "print(1)"),
        ("serve/rank/cliff.py", "print(1)"),
        ("serve/rank/a.py", "try:\n    g()\nexcept Exception:\n    pass"),
        ("serve/rank/a.py", "try:\n    g()\nexcept (OSError, Exception) as e:\n    ..."),
        ("serve/rank/a.py", "try:\n    g()\nexcept:\n    pass"),
        ("serve/rank/a.py", "g()  # TODO: mend"),
        ("serve/rank/a.py", "g()  # FIXME"),
    ],
)
def test_a_broken_card_is_seen(path: str, source: str) -> None:
    assert list(faults(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve/rank/a.py", "def f():\n" + "    g()\n" * 79),
        ("serve/rank/a.py", "g()\n" * 500 + "# c\n\n" * 50),
        ("serve/cli/main.py", "print(1)"),
        ("launcher/cli.py", "print(1)"),
        ("serve/rank/a.py", "try:\n    g()\nexcept OSError:\n    pass"),
        ("serve/rank/a.py", "try:\n    g()\nexcept Exception:\n    log()\n    raise"),
        ("serve/rank/a.py", "g('TODO')  # TODO(ada): mend"),
    ],
)
def test_a_kept_card_passes(path: str, source: str) -> None:
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
def test_an_untyped_message_is_seen(path: str, source: str) -> None:
    assert untyped_messages({path: source, "serve/core/wire.py": ""}) == {path: 1}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serve/bench/a.py", "import json\njson.loads(body)"),
        ("serve/tune/a.py", "from serve.core import messages\nconfig: dict[str, Any] = {}"),
        ("launcher/a.py", "from serve.core.wire import line\nline(message)"),
    ],
)
def test_json_of_clients_and_files_is_no_message(path: str, source: str) -> None:
    assert not untyped_messages({path: source, "serve/core/wire.py": ""})


def test_docstrings_can_be_read_alone() -> None:
    assert not list(stumps(product()))


@pytest.mark.parametrize(
    ("docstring", "is_stump"),
    [
        ("Those of which nothing is left.", True),
        ("None if it is not a token of the vocabulary.", True),
        ("What was held back.", True),
        ("It has ended.", True),
        ("The same.", True),
        ("Continues prompts.", False),
        ("The ranks that have the same facts as rank 0.", False),
        ("Whether the model still runs.", False),
    ],
)
def test_stumps_are_docstrings_that_lean_on_a_name(docstring: str, is_stump: bool) -> None:
    source = f'def run() -> None:\n    """{docstring}"""\n'
    assert bool(list(stumps({"serve/core/x.py": source}))) == is_stump
