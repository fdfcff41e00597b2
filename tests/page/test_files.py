"""The files of the page: they are few and small, and need nothing from elsewhere."""

import re
from pathlib import Path

from serve.front.http import pages

MAX_BYTES = 90_000
MAX_COMPRESSED_BYTES = 40_000


def test_all_files_of_the_page_together_are_small() -> None:
    """All files together, and what a browser fetches."""
    sizes = [path.stat().st_size for path in pages.ROOT.rglob("*") if path.is_file()]
    assert sum(sizes) <= MAX_BYTES
    files = [pages.page_file(name) for name in pages.names()]
    assert None not in files
    assert sum(len(file.compressed) for file in files if file) <= MAX_COMPRESSED_BYTES


def test_the_page_imports_only_files_that_exist() -> None:
    missing = []
    for path in pages.ROOT.rglob("*.js"):
        for name in re.findall(r"""(?:from|import)\s*\(?["']([^"']+)["']""", path.read_text()):
            target: Path = (path.parent / name).resolve()
            if not name.startswith(".") or not target.exists():
                missing.append(f"{path.relative_to(pages.ROOT)}: {name}")
    assert not missing


def test_the_page_has_no_inline_scripts_or_styles() -> None:
    text = (pages.ROOT / pages.INDEX).read_text()
    assert "<style" not in text
    assert not re.search(r"\s(style|on\w+)=", text)
    assert re.findall(r"<script(?! type=\"module\" src=)", text) == []
