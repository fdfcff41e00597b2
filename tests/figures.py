"""Figures of the product's structure, which scripts/figures prints beside those of another commit.

They are counts over the syntax trees of `serve` and `launcher`: no figure needs the code to run.
`tests/test_card.py` uses the same functions for what must never appear at all.
"""

import ast
import functools
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("serve", "launcher")
# A docstring that begins with one of these leans on the name above it.
_LEANING = re.compile(
    r"(Those|That|What|Which|Who|Whose|Of|For|In|By|As|Its?|They|With|Under|From|So|Also|Where|"
    r"None|Not|Else)\b"
)
_MIN_DOCSTRING_WORDS = 3
# "Continues prompts." is a sentence, though a short one.
_VERB = re.compile(r"[A-Z][a-z]+s\b")


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of a source's syntax tree. The nodes are shared and must not be changed."""
    return tuple(ast.walk(ast.parse(source)))


@functools.cache
def product() -> dict[str, str]:
    """The source of each file of the product, by its path relative to the repository."""
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(files)}


@functools.cache
def sources_of_tests() -> dict[str, str]:
    """The source of each test file, by its path relative to the repository."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}


def sources_of(revision: str) -> dict[str, str]:
    """The source of each file of the product and its tests in another commit."""
    command = ["git", "archive", revision, *PACKAGES, "tests"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.isfile() and member.name.endswith(".py"):
                content = files.extractfile(member)
                assert content is not None  # A regular file has content.
                found[member.name] = content.read().decode()
    return found


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, line and length of each function."""
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def code_lines(source: str) -> int:
    """The number of lines that are neither blank nor a comment; docstrings count."""
    lines = (line.strip() for line in source.splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


def without_docstrings(source: str) -> tuple[ast.Module, int]:
    """The syntax tree of a file without its docstrings, and its lines of code without them."""
    tree = ast.parse(source)
    num_lines = code_lines(source)
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body.pop(0)
            text = source.splitlines()[docstring.lineno - 1 : docstring.end_lineno]
            num_lines -= code_lines("\n".join(text))
    return tree, num_lines


def folder(path: str) -> str:
    return path.rpartition("/")[0]


def files_by_folder(sources: Mapping[str, str]) -> Counter[str]:
    return Counter(folder(path) for path in sources if not path.endswith("/__init__.py"))


def nodes_per_statement(sources: Mapping[str, str]) -> dict[str, float]:
    """The mean number of syntax nodes in a statement, by folder."""
    num_nodes: Counter[str] = Counter()
    num_statements: Counter[str] = Counter()
    for path, source in sources.items():
        nodes = list(ast.walk(without_docstrings(source)[0]))
        num_nodes[folder(path)] += len(nodes)
        num_statements[folder(path)] += sum(isinstance(node, ast.stmt) for node in nodes)
    return {name: num_nodes[name] / count for name, count in num_statements.items() if count}


def nodes_per_line(sources: Mapping[str, str]) -> float:
    """The mean number of syntax nodes in a line of code, without docstrings."""
    stripped = [without_docstrings(source) for source in sources.values()]
    num_nodes = sum(len(list(ast.walk(tree))) for tree, _ in stripped)
    return num_nodes / sum(num_lines for _, num_lines in stripped)


def stumps(sources: Mapping[str, str]) -> Iterator[str]:
    """Docstrings of classes and functions whose first sentence cannot be read alone."""
    documented = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for path, source in sources.items():
        for node in nodes(source):
            if not isinstance(node, documented):
                continue
            words = (ast.get_docstring(node) or "").split()
            if not words:
                continue
            is_short = len(words) < _MIN_DOCSTRING_WORDS and not _VERB.match(words[0])
            if is_short or _LEANING.match(words[0]):
                yield f"{path}:{node.lineno} {node.name}: {' '.join(words)[:70]}"


# Modules that cut messages out of a stream of bytes between two of our processes.
_CHANNELS = {"serve.core.wire", "serve.front.text.helpers"}
_LISTS_OF_MESSAGES = {
    "serve/core/messages.py",
    "serve/core/agent_messages.py",
    "serve/core/helper_messages.py",
}
_UNTYPED = {"Json", "json.dumps", "json.loads", "pickle.dumps", "pickle.loads"}


def untyped_messages(sources: Mapping[str, str]) -> Counter[str]:
    """How often each file that has an end of a channel between two processes handles a message
    without a type: as `dict[str, Any]` or `Json`, or through json or pickle by hand.

    JSON of clients, of files and of standard output is no message. In the lists of messages each
    `Any` counts.
    """
    graph = imports(sources)
    found: Counter[str] = Counter()
    for path, source in sources.items():
        untyped: set[str] = set()
        if has_channel(source, graph[module_name(path)]):
            untyped = _UNTYPED | {"dict[str, Any]"}
        if path in _LISTS_OF_MESSAGES:
            untyped = _UNTYPED | {"Any"}
        for node in nodes(source):
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
                found[path] += ast.unparse(node) in untyped
    return +found


def has_channel(source: str, imported: set[str]) -> bool:
    """Whether a module imports a channel, starts a process or reads its standard input."""
    if imported & _CHANNELS:
        return True
    names = {ast.unparse(node) for node in nodes(source) if isinstance(node, ast.Attribute)}
    return bool(names & {"subprocess.Popen", "sys.stdin", "sys.stdin.buffer"})


def public_methods(sources: Mapping[str, str]) -> Counter[str]:
    """The number of public methods and properties of each class."""
    found: Counter[str] = Counter()
    for path, source in sources.items():
        for node in nodes(source):
            if isinstance(node, ast.ClassDef):
                found[f"{path} {node.name}"] = sum(
                    isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not child.name.startswith("_")
                    for child in node.body
                )
    return found


# --- imports


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which modules of the product each one imports, in functions and for type checkers too."""
    modules = {module_name(path) for path in sources}
    found: dict[str, set[str]] = {}
    for path, source in sources.items():
        name = module_name(path)
        found[name] = set()
        for node in nodes(source):
            if isinstance(node, ast.Import):
                found[name] |= modules & {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= modules & (submodules | {node.module})
        found[name].discard(name)
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all the others."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {
        tuple(sorted({name} | {other for other in reached[name] if name in reached[other]}))
        for name in graph
    }
    return sorted(list(group) for group in groups if len(group) > 1)


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen


def hidden_cycles(
    sources: Mapping[str, str], test_sources: Mapping[str, str] | None = None
) -> list[str]:
    """Protocols with a single implementer, in a module that imports the Protocol's own.

    Such a Protocol is not an interface with several sides. It only turns an import round: the
    module that declares it calls back into the module that imports it. An implementer in
    test_sources is another side: what a server's tests play is used as the real one is.
    """
    graph = imports(sources)
    protocols: dict[str, tuple[str, set[str]]] = {}
    classes: dict[str, tuple[str, set[str]]] = {}
    for path, source in sources.items():
        for node in nodes(source):
            if isinstance(node, ast.ClassDef):
                is_protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
                where = protocols if is_protocol else classes
                where[f"{module_name(path)}.{node.name}"] = (module_name(path), _members(node))
    played = [
        _members(node)
        for source in (test_sources or {}).values()
        for node in nodes(source)
        if isinstance(node, ast.ClassDef)
    ]
    found = []
    for protocol, (module, members) in protocols.items():
        owners = [owner for owner, (_, own) in classes.items() if members and members <= own]
        is_played = any(members <= own for own in played)
        if len(owners) == 1 and not is_played:
            user = classes[owners[0]][0]
            if module in reachable(graph, user):
                found.append(f"{protocol} <- {owners[0]}")
    return sorted(found)


def _members(node: ast.ClassDef) -> set[str]:
    """Methods and fields of a class, those that its methods set on `self` too."""
    named = {
        child.name
        for child in node.body
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named |= {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    named |= {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }
    return named - {"__init__"}


def shapes(sources: Mapping[str, str], test_sources: Mapping[str, str]) -> dict[str, str]:
    """The figures of one state of the repository, as texts by their names."""
    lengths = [length for source in sources.values() for *_, length in functions(source)]
    lines = {path: code_lines(source) for path, source in sources.items()}
    longest = max(lines, key=lambda path: lines[path])
    (largest, num_files), *_ = files_by_folder(sources).most_common(1)
    density = nodes_per_statement(sources)
    worst = max(density, key=lambda name: density[name])
    (widest, num_methods), *_ = public_methods(sources).most_common(1)
    doubled = [name for name, count in class_names(sources).items() if count > 1]
    return {
        "lines of code": str(sum(lines.values())),
        "lines of code in tests": str(sum(map(code_lines, test_sources.values()))),
        "files": str(len(sources)),
        "lines of the longest file": f"{lines[longest]} {longest}",
        "lines of a function: median, 95 %, longest": (
            f"{median(lengths):g}, {quantiles(lengths, n=20)[-1]:.0f}, {max(lengths)}"
        ),
        "files in the largest folder": f"{num_files} {largest}",
        "public methods of the widest class": f"{num_methods} {widest}",
        "nodes per line": f"{nodes_per_line(sources):.2f}",
        "nodes per statement, densest folder": f"{density[worst]:.1f} {worst}",
        "class names that occur twice": str(len(doubled)),
        "docstrings that are stumps": str(len(list(stumps(sources)))),
    }


def class_names(sources: Mapping[str, str]) -> Counter[str]:
    """How many classes of the product share each name."""
    return Counter(
        node.name
        for source in sources.values()
        for node in nodes(source)
        if isinstance(node, ast.ClassDef)
    )


def purposes(sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the path of each module, and the first sentence of its docstring."""
    for path, source in sources.items():
        if not path.endswith("/__init__.py"):
            text = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
            yield path, re.split(r"\.(?:\s|$)", text, maxsplit=1)[0]


def main() -> None:
    revision = sys.argv[1] if len(sys.argv) > 1 else "main"
    if revision == "--modules":
        for path, purpose in purposes(product()):
            print(f"{path:48} {purpose}")
        return
    try:
        files = sources_of(revision)
    except subprocess.CalledProcessError as e:
        sys.exit(f"scripts/figures: {e.stderr.decode().strip()}")
    here = shapes(product(), sources_of_tests())
    own = {path: source for path, source in files.items() if not path.startswith("tests/")}
    there = shapes(own, {path: files[path] for path in files.keys() - own.keys()})
    for name, figure in here.items():
        before = "" if there[name] == figure else f"   ({revision}: {there[name]})"
        print(f"{name:44} {figure}{before}")


if __name__ == "__main__":
    main()
