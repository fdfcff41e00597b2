"""The tests that a change may affect, which `scripts/test --changed` runs.

`python -m tests.affected [BASE]` prints their paths, and to standard error what it chose and why.
A test is affected if it reaches a changed module by imports: its own, those of the `conftest.py`
files above it, and those of what they import. A module that another one names in a string, as in
`[sys.executable, "-m", "serve.rank.worker"]`, counts as imported by it.

A test that starts processes imports little of what it tests. If it or a test module that it
imports, such as `tests.cluster.servers`, has `import subprocess`, it depends on every file of the
product.
"""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from tests.figures import (
    PACKAGES,
    ROOT,
    imports,
    module_name,
    nodes,
    product,
    reachable,
    sources_of_tests,
)

PRODUCT = tuple(f"{name}/" for name in PACKAGES)
# What to run after a change outside Python, by the beginning of the path. The first one counts, and
# a file without one may affect any test.
OTHER_FILES = {
    "serve/front/http/static/": [
        "tests/page",
        "tests/front/test_app_page.py",
        "tests/test_wheel.py",
    ],
    "docs/": [
        "tests/agents/test_page.py",
        "tests/compatibility",
        "tests/launch/test_operations.py",
        "tests/model/test_sharding.py",
        "tests/test_docs.py",
        "tests/tune/whole/test_walk.py",
    ],
    "README.md": ["tests/test_docs.py"],
    "CHANGELOG.md": ["tests/test_docs.py"],
    "CONTRIBUTING.md": ["tests/test_docs.py"],
    "SECURITY.md": ["tests/test_docs.py"],
    "scripts/": ["tests/test_docs.py", "tests/test_fresh.py", "tests/test_scripts.py"],
    "Dockerfile.dev": [],
    ".ci/": ["tests/test_scripts.py"],
    ".github/": ["tests/test_scripts.py"],
    "tests/page/": ["tests/page"],
    "tests/agents/": ["tests/agents"],
    "tests/clients/": ["tests/clients"],
}


def all_sources() -> dict[str, str]:
    """The source of each file that tests import, by its path relative to the repository."""
    scripts = sorted((ROOT / "scripts").rglob("*.py"))
    measuring = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in scripts}
    return {**product(), **measuring, **sources_of_tests()}


def dependencies(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module needs directly: it imports them, names them in a string, or is
    in their package; for tests also the `conftest` modules of their folders."""
    graph = imports(sources)
    for path, source in sources.items():
        name = module_name(path)
        named = {node.value for node in nodes(source) if isinstance(node, ast.Constant)}
        for folder in _folders(path):
            named |= {module_name(f"{folder}/__init__.py"), module_name(f"{folder}/conftest.py")}
        graph[name] |= (named & graph.keys()) - {name}
    return graph


def _folders(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def starts_processes(source: str) -> bool:
    return any(
        isinstance(node, ast.Import) and "subprocess" in {alias.name for alias in node.names}
        for node in nodes(source)
    )


def choose(sources: Mapping[str, str], changed: Collection[str]) -> tuple[set[str], str]:
    """Files and folders of tests that these changed files may affect, and why these."""
    # What imports a file that is gone is affected, too.
    gone = {path: "" for path in changed if _is_source(path) and path not in sources}
    modules = {path for path in changed if _is_source(path)}
    listed: set[str] = set()
    for path in set(changed) - modules:
        tests = _tests_of(path)
        if tests is None:
            return {"tests"}, f"all tests, because any may depend on {path}"
        listed.update(tests)
    importing, starting = _affected_modules({**gone, **sources}, modules)
    found = sorted(listed)
    if importing:
        found.append(f"{len(importing)} test files that import what changed")
    if starting - importing:
        found.append(f"{len(starting - importing)} that start processes")
    # A test file that is gone cannot run.
    chosen = ((importing | starting) & sources.keys()) | listed
    inside = {path for path in chosen if any(folder in chosen for folder in _folders(path))}
    return chosen - inside, ", ".join(found) or "no tests"


def _is_source(path: str) -> bool:
    return path.endswith(".py") and path.startswith((*PRODUCT, "tests/", "scripts/"))


def _tests_of(path: str) -> list[str] | None:
    """What OTHER_FILES lists for a file; None if the file may affect any test."""
    return next((tests for start, tests in OTHER_FILES.items() if path.startswith(start)), None)


def _affected_modules(
    sources: Mapping[str, str], changed: Collection[str]
) -> tuple[set[str], set[str]]:
    """The test files that import a changed file, and those that start processes of it."""
    graph = dependencies(sources)
    modules = {module_name(path) for path in changed}
    tests = [path for path in sources if path.startswith("tests/")]
    starters = {module_name(path) for path in tests if starts_processes(sources[path])}
    is_product = any(path.startswith(PRODUCT) for path in changed)
    importing = set()
    starting = set()
    for path in tests:
        if not path.rpartition("/")[2].startswith("test_"):
            continue
        name = module_name(path)
        needed = {name} | reachable(graph, name)
        if needed & modules:
            importing.add(path)
        if is_product and needed & starters:
            starting.add(path)
    return importing, starting


# --- git


def git(*arguments: str, folder: Path = ROOT) -> list[str]:
    """The lines that git prints; names in them are not quoted."""
    command = ["git", "-c", "core.quotePath=false", *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def default_base(folder: Path = ROOT) -> str:
    """On the branch main, only what is not committed counts."""
    return "HEAD" if git("branch", "--show-current", folder=folder) == ["main"] else "main"


def changed_files(base: str, folder: Path = ROOT) -> list[str]:
    """The files that differ between the working tree and the commit where it left the base."""
    (start,) = git("merge-base", base, "HEAD", folder=folder)
    changed = git("diff", "--name-only", "--no-renames", start, folder=folder)
    return changed + git("ls-files", "--others", "--exclude-standard", folder=folder)


def main() -> None:
    try:
        base = sys.argv[1] if len(sys.argv) > 1 else default_base()
        changed = changed_files(base)
    except subprocess.CalledProcessError as e:
        sys.exit(f"scripts/test: {e.stderr.strip() or 'git fails'}; use --changed BASE")
    chosen, reason = choose(all_sources(), changed)
    print(f"scripts/test: {len(changed)} files differ from {base}: {reason}", file=sys.stderr)
    print("\n".join(sorted(chosen)))


if __name__ == "__main__":
    main()
