"""The documents name what there is: every module, every exit code, every flag."""

from pathlib import Path

from serve.core import errors

ROOT = Path(__file__).parent.parent


def test_architecture_gives_every_module_a_purpose() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    modules = {
        str(path.relative_to(ROOT))
        for package in ("serve", "launcher")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == modules


def test_readme_gives_every_exit_code() -> None:
    text = (ROOT / "README.md").read_text()
    for code in errors._BY_EXIT_CODE:
        assert f"| {code} |" in text, f"exit code {code}"
