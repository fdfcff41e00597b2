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
def test_the_test_script_lints_before_all_tests_but_not_before_chosen_tests(
    clone: Clone, command: str, called: list[str]
) -> None:
    assert clone.run(command) == (0, called)


def test_ci_runs_lint_and_all_tests_except_slow_tests(clone: Clone) -> None:
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
def test_the_test_script_does_not_fail_if_no_test_of_the_changes_was_run(
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


@dataclass
class Mac:
    """A folder with scripts/install, and a PATH as on a Mac that has Pythons only elsewhere."""

    folder: Path

    def add(self, program: str, text: str) -> None:
        path = self.folder / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def install(self, **environment: str) -> tuple[int, str]:
        """Returns the code and the last line."""
        ended = subprocess.run(
            [shutil.which("bash") or "bash", "scripts/install"],
            cwd=self.folder,
            env={"PATH": str(self.folder / "bin"), "HOME": str(self.folder), **environment},
            capture_output=True,
            text=True,
        )
        return ended.returncode, ended.stderr.splitlines()[-1]


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    mac = Mac(tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    script = (ROOT / "scripts/install").read_text()
    for folder in ("/opt/homebrew/bin", "/usr/local/bin"):
        script = script.replace(f":{folder}", f":{tmp_path}{folder}")
    mac.add("scripts/install", script)
    (tmp_path / "bin").mkdir()
    for name in ("sh", "cat", "cksum", "cp", "dirname", "mkdir", "rm", "sed"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    mac.add("bin/uname", "#!/bin/sh\necho Darwin\n")
    mac.add("bin/sysctl", "#!/bin/sh\necho 1\n")
    return mac


def of_chip(machine: str) -> str:
    return PYTHON.replace("    -V)", f"    *machine*) echo {machine} ;;\n    -V)")


@pytest.mark.parametrize(
    "program",
    [
        "opt/homebrew/bin/python3.14",
        "usr/local/bin/python3.13",
        ".local/bin/python3.12",
        ".local/bin/python3.11",
    ],
)
def test_the_install_script_finds_pythons_outside_the_path_of_ssh(mac: Mac, program: str) -> None:
    mac.add("bin/python3", "#!/bin/sh\nexit 1  # as 3.9\n")
    mac.add("bin/python3.9", of_chip("arm64"))
    assert mac.install() == (2, "scripts/install: no Python 3.11 or newer found; set PYTHON to one")
    mac.add(program, of_chip("arm64"))
    code, said = mac.install()
    assert (code, said.partition(":")[0]) == (0, "scripts/install")
    assert (mac.folder / "installed").read_text() == ".\n"


def test_the_install_script_prefers_pythons_for_the_chip_of_a_mac(mac: Mac) -> None:
    mac.add("bin/python3", of_chip("x86_64"))
    mac.add(".local/bin/python3.13", of_chip("arm64"))
    assert mac.install()[0] == 0
    assert (mac.folder / ".venv/bin/python").read_text() == of_chip("arm64")


def test_the_install_script_refuses_pythons_and_macs_of_intel_before_pip_starts(mac: Mac) -> None:
    mac.add("bin/python3", of_chip("x86_64"))
    for environment in ({}, {"PYTHON": str(mac.folder / "bin" / "python3")}):
        code, said = mac.install(**environment)
        assert code == 2
        assert f"{mac.folder}/bin/python3 was built for Intel" in said
        assert "PYTHON=/opt/homebrew/bin/python3.13 scripts/install" in said
    mac.add("bin/sysctl", "#!/bin/sh\nexit 1\n")
    assert mac.install() == (
        2,
        "scripts/install: this Mac has an Intel chip, and MLX needs one of Apple's",
    )
    assert not (mac.folder / ".venv").exists()


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
