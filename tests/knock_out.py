"""Removes a part, and runs the tests that must pass without it.

`python -m tests.knock_out [PART...] [-- ARGUMENTS]` does this for each part, in a copy of the
tracked files. A part's folders in serve/front/parts and serve/rank/parts go, and the lines of the
registries that name it. Left out are the tests in folders of the part's name and those marked
`@pytest.mark.uses(PART)`. Arguments go to pytest.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("serve/front/parts", "serve/rank/parts")
# Without a part, sentences about it name files that are not there.
LEFT_OUT = ("tests/test_docs.py",)


def part_names(root: Path) -> list[str]:
    """Returns the names of all parts: a part has a folder on one side at least."""
    folders = [file.parent for side in SIDES for file in (root / side).glob("*/__init__.py")]
    return sorted({folder.name for folder in folders})


def remove(root: Path, name: str) -> None:
    """Removes a part's folders, and the lines of the registries that name it."""
    for side in SIDES:
        shutil.rmtree(root / side / name, ignore_errors=True)
        registry = root / side / "registry.py"
        if registry.exists():
            lines = registry.read_text().splitlines(keepends=True)
            kept = [line for line in lines if not re.search(rf"\b{name}\b", line)]
            registry.write_text("".join(kept))


def copy_tracked(root: Path) -> None:
    """Copies the tracked files to a new repository, in which tests find what they need."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    (root / ".venv").symlink_to(ROOT / ".venv")
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], [*identity, "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=root, check=True)


def tests_pass_without(name: str, arguments: list[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix=f"without-{name}-") as folder:
        root = Path(folder)
        copy_tracked(root)
        remove(root, name)
        command = [sys.executable, "-m", "pytest", "-n", "3", "-m", "not slow and not long"]
        command += ["--without", name, *(f"--ignore={path}" for path in LEFT_OUT), *arguments]
        # Programs that tests start from other folders import this copy too.
        return not subprocess.call(command, cwd=root, env={**os.environ, "PYTHONPATH": folder})


def main(given: list[str]) -> int:
    names, arguments = given, []
    if "--" in given:
        names, arguments = given[: given.index("--")], given[given.index("--") + 1 :]
    failed = [n for n in names or part_names(ROOT) if not tests_pass_without(n, arguments)]
    for name in failed:
        print(f"knock_out: tests fail without {name}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
