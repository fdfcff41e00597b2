"""What scripts/test and .ci/run start, with stand-ins for what they call; who may publish."""

import os
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml

from launcher.cli import DemoFlags
from serve import __version__

ROOT = Path(__file__).resolve().parent.parent


STANDIN = """#!/bin/sh
echo $(basename $0) "$@" >>{log}
[ "$2" != tests.affected ] || echo tests/a.py
"""


@dataclass
class Clone:
    """Scripts whose calls of others are only noted."""

    folder: Path

    def run(self, command: str) -> tuple[int, list[str]]:
        """Returns the command's code, and what it has called."""
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        ended = subprocess.run(command.split(), cwd=self.folder, env=environment)
        return ended.returncode, (self.folder / "log").read_text().splitlines()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    for name in ("scripts/test", ".ci/run"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("scripts/lint", "scripts/install", ".venv/bin/python"):
        standin = tmp_path / name
        standin.parent.mkdir(parents=True, exist_ok=True)
        standin.write_text(STANDIN.format(log=tmp_path / "log"))
        standin.chmod(0o755)
    # Where there is no browser, .ci/run would install one.
    browser = tmp_path / "bin" / "chromium"
    browser.parent.mkdir()
    browser.symlink_to("/bin/true")
    return Clone(tmp_path)


@pytest.mark.parametrize(
    ("command", "called"),
    [
        ("scripts/test", ["lint", "python -m pytest -n 3 -m not slow and not long"]),
        (
            "scripts/test -k a",
            ["install --dev", "python -m pytest -n 3 -m not slow and not long -k a"],
        ),
        (
            "scripts/test --changed HEAD -k a",
            [
                "install --dev",
                "python -m tests.affected HEAD",
                "python -m pytest -n 3 -m not slow and not long tests/a.py -k a",
            ],
        ),
    ],
)
def test_the_test_script_lints_before_all_tests_but_not_before_chosen_ones(
    clone: Clone, command: str, called: list[str]
) -> None:
    assert clone.run(command) == (0, called)


def test_ci_runs_lint_and_all_tests_but_the_slow_ones(clone: Clone) -> None:
    code, called = clone.run(".ci/run")
    assert code == 0
    assert called.pop(0) == "install --dev"
    pytest_call = "python -m pytest -n 3 -m not slow and not long -m not slow"
    # Lint runs beside the tests.
    assert sorted(called) == ["install --dev", "lint", pytest_call]


@pytest.mark.parametrize("failing", ["scripts/lint", ".venv/bin/python", "scripts/install"])
def test_ci_fails_if_any_of_its_parts_fails(clone: Clone, failing: str) -> None:
    with (clone.folder / failing).open("a") as script:
        script.write("exit 4\n")
    assert clone.run(".ci/run")[0] == 4


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (5, 0)])
def test_changed_tests_do_not_fail_if_none_was_run(
    tmp_path: Path, code: int, expected: int
) -> None:
    """All chosen tests may be long: then pytest ends with 5."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/test", tmp_path / "scripts/test")
    standin = f'#!/bin/sh\n[ "$2" != pytest ] || exit {code}\necho tests/a.py\n'
    for name in ("scripts/install", ".venv/bin/python"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(standin)
        file.chmod(0o755)
    ran = subprocess.run(["scripts/test", "--changed"], cwd=tmp_path, capture_output=True)
    assert ran.returncode == expected
    assert (b"no tests ran" in ran.stderr) == (code == 5)


# Makes a .venv out of itself, and notes what pip shall install.
PYTHON = """#!/bin/sh
case "$*" in
    -V) echo Python 3.12.1 ;;
    *venv*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *" -e "*) echo "$*" | sed "s/.* //" >>installed ;;
esac
"""


def test_a_plain_install_neither_installs_nor_removes_test_tools(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/install", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    # On Linux the script would look for OpenBLAS, and perhaps install it.
    for name, text in (("python", PYTHON), ("uname", "#!/bin/sh\necho Darwin\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": "python"}
    log = tmp_path / "installed"

    def install(*arguments: str) -> list[str]:
        """Returns what it installs."""
        log.write_text("")
        command = ["scripts/install", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, env=environment)
        return log.read_text().splitlines()

    assert install() == ["."]
    assert install() == []
    assert install("--dev") == [".[dev]"]
    assert install() == []
    with (tmp_path / "constraints.txt").open("a") as constraints:
        constraints.write("# another version")
    assert install() == [".[dev]"]


def test_showing_the_help_of_the_demo_installs_nothing(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo", tmp_path / "scripts" / "demo")
    run = subprocess.run(
        ["scripts/demo", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    usage = run.stdout.splitlines()[-1]
    for field in fields(DemoFlags):
        names = [f"--{field.name}", *field.metadata.get("short", ())]
        assert any(name in usage for name in names), field.name


def test_only_tested_tags_are_published_and_without_a_token() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    publish = jobs["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"
    assert (publish["needs"], jobs["test"]["needs"]) == ("test", "build")
    assert not [step for step in jobs["test"]["steps"] if "checkout" in step.get("uses", "")]
    assert "secrets." not in text


def test_version_is_the_same_in_the_program_and_in_its_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
