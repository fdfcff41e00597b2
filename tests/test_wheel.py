"""What is published works by itself: the wheel, built from the sdist, outside any clone."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
ANSWERS = [
    "The capital of France is Paris.",
    "Arr! The capital of France be Paris, matey!",
    "O rose! The capital of France is Paris, fair as the dawn.",
]


def run(command: Sequence[str | Path], folder: Path, seconds: float = 60.0) -> str:
    """Its standard output. Nothing of the environment leads it to the clone."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that files which only the clone has cannot get into it."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-c", BUILD_SDIST, folder], ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        assert not [member.name for member in opened if member.issym() or member.islnk()]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", folder, sdist], folder)
    (built,) = folder.glob("*.whl")
    return built


def make_environment(folder: Path) -> Path:
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    return folder / "bin" / "python"


def install(python: Path, *words: str | Path, seconds: float = 60.0) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run([*pip, "--disable-pip-version-check", *words], python.parent, seconds)


def check_demo(python: Path) -> None:
    """From the root folder, with this environment's own copy of the model."""
    root = Path("/")
    where = run([python, "-c", "import launcher, serve; print(launcher.__file__)"], root)
    environment = python.parent.parent
    assert Path(where.strip()).is_relative_to(environment)
    shown = run([python.parent / "brigade", "demo", "--once"], root)
    assert re.findall(r"^assistant  (.*)$", shown, re.MULTILINE) == ANSWERS
    assert str(ROOT) not in shown


@pytest.mark.long
def test_wheel_holds_the_embedded_model_once_and_not_the_programs_that_made_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assert [name for name in names if name.endswith("/model.safetensors")] == [
        "launcher/tiny-chat/model.safetensors"
    ]
    assert not [name for name in names if "train" in name and name.startswith("launcher")]
    assert not [name for name in names if name.startswith(("tests", "examples", "scripts"))]


@pytest.mark.long
def test_wheel_holds_every_module(wheel: Path) -> None:
    folders = (ROOT / "launcher", ROOT / "serve")
    modules = {path for folder in folders for path in folder.rglob("*.py")}
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    packed = {name for name in names if name.endswith(".py")}
    assert packed == {path.relative_to(ROOT).as_posix() for path in modules}


@pytest.mark.long
def test_wheel_holds_the_web_page(wheel: Path) -> None:
    """With the licences of its libraries."""
    files = {path for path in (ROOT / "serve").rglob("static/**/*") if path.is_file()}
    assert files
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names


@pytest.mark.long
def test_demo_of_an_installed_wheel_answers_outside_any_clone(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of the clone; what is installed there is not found by this."""
    python = make_environment(tmp_path / "fresh")
    install(python, "--no-deps", "--no-index", wheel)
    (site_packages,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    check_demo(python)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_declares_all_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    """A user has nothing else: every dependency is fetched, and no extra."""
    python = make_environment(tmp_path / "fresh")
    install(python, "-c", ROOT / "constraints.txt", wheel, seconds=500)
    run([sys.executable, "-m", "pip", "--python", python, "check"], tmp_path)
    check_demo(python)
