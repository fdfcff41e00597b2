"""`scripts/test --changed` chooses tests by what they import, and runs nothing else."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.affected import (
    OTHER_FILES,
    ROOT,
    all_sources,
    changed_files,
    choose,
    default_base,
    dependencies,
)

SOURCES = {
    "serve/__init__.py": "",
    "serve/core.py": "",
    "serve/engine.py": "from serve.core import a",
    "serve/parent.py": 'COMMAND = ["-m", "serve.engine"]',
    "launcher/cli.py": "",
    "scripts/measure.py": "import serve.core",
    "tests/servers.py": "import subprocess",
    "tests/unit/conftest.py": "from tests.unit.fakes import fake",
    "tests/unit/fakes.py": "",
    "tests/unit/test_core.py": "from serve import core",
    "tests/unit/test_engine.py": "def f():\n    import serve.engine",
    "tests/unit/test_parent.py": "import serve.parent",
    "tests/test_cluster.py": "from tests.servers import running",
    "tests/test_measure.py": "import scripts.measure",
}
UNIT = {f"tests/unit/test_{name}.py" for name in ("core", "engine", "parent")}
CLUSTER = "tests/test_cluster.py"


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        (["serve/core.py"], {*UNIT, "tests/test_measure.py", CLUSTER}),
        (["serve/engine.py"], UNIT - {"tests/unit/test_core.py"} | {CLUSTER}),
        (["serve/parent.py"], {"tests/unit/test_parent.py", CLUSTER}),
        (["launcher/cli.py"], {CLUSTER}),
        (["serve/__init__.py"], {*UNIT, "tests/test_measure.py", CLUSTER}),
        (["tests/servers.py"], {CLUSTER}),
        (["tests/unit/fakes.py"], UNIT),
        (["tests/unit/test_core.py"], {"tests/unit/test_core.py"}),
        (["tests/unit/test_gone.py"], set()),
        (["scripts/measure.py"], {"tests/test_measure.py"}),
        (["docs/page.md"], set(OTHER_FILES["docs/"])),
        (
            ["README.md", "serve/parent.py"],
            {"tests/unit/test_parent.py", CLUSTER, "tests/test_docs.py"},
        ),
        (["serve/parent.py", "pyproject.toml"], {"tests"}),
        (["examples/make.py"], {"tests"}),
        ([], set()),
    ],
)
def test_a_change_chooses_the_tests_that_depend_on_it(changed: list[str], chosen: set[str]) -> None:
    assert choose(SOURCES, changed)[0] == chosen


def test_tests_that_import_a_deleted_file_are_chosen() -> None:
    sources = {path: source for path, source in SOURCES.items() if path != "serve/core.py"}
    assert UNIT - {"tests/unit/test_parent.py"} <= choose(sources, ["serve/core.py"])[0]


def test_a_file_in_a_chosen_folder_is_not_listed_again() -> None:
    page = "tests/page/test_page.py"
    chosen, reason = choose({**SOURCES, page: ""}, ["tests/page/tsconfig.json", page])
    assert chosen == {"tests/page"}
    assert reason == "tests/page, 1 test files that import what changed"


def test_a_change_of_the_engine_chooses_cluster_tests_but_no_format_tests() -> None:
    """In this repository."""
    sources = all_sources()
    chosen, _ = choose(sources, ["serve/rank/sampling.py"])
    assert {"tests/rank/test_sampling.py", "tests/cluster/test_warm_up.py"} <= chosen
    apart = {"tests/core/test_wire.py", "tests/hub/test_ranges.py"}
    assert apart <= sources.keys() - chosen


def test_every_test_listed_for_files_other_than_python_exists() -> None:
    listed = {test for tests in OTHER_FILES.values() for test in tests}
    assert not [test for test in listed if not (ROOT / test).exists()]


def test_modules_that_are_started_as_processes_count_as_imported() -> None:
    assert "serve.rank.worker" in dependencies(all_sources())["serve.parent.engine"]


# --- git


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On the branch `work`, which left `main` before main's second commit."""
    for person in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{person}_NAME", "a")
        monkeypatch.setenv(f"GIT_{person}_EMAIL", "a@a.example")
    write(tmp_path, kept="1", moved="2")
    run(tmp_path, "git init -q -b main && git add . && git commit -qm one && git branch work")
    write(tmp_path, of_main="3")
    run(tmp_path, "git add . && git commit -qm two && git checkout -q work")
    return tmp_path


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text)


def run(folder: Path, command: str) -> None:
    subprocess.run(command, shell=True, cwd=folder, check=True, env=os.environ)


def test_changed_files_are_those_of_the_branch_and_uncommitted_files(repository: Path) -> None:
    run(repository, "git mv moved here && git commit -qm three")
    write(repository, kept="4", new="5")
    assert default_base(repository) == "main"
    assert sorted(changed_files("main", repository)) == ["here", "kept", "moved", "new"]


def test_on_main_only_uncommitted_files_count_as_changed(repository: Path) -> None:
    run(repository, "git checkout -q main")
    write(repository, new="5")
    assert changed_files(default_base(repository), repository) == ["new"]
