"""The files of the web page, and the headers that limit what the page may do."""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent / "static"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A browser asks each time whether the file has changed, so it never mixes two versions.
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    data: bytes
    compressed: bytes
    content_type: str
    etag: str


@cache
def names() -> frozenset[str]:
    """Returns the paths of all files that browsers may fetch, relative to the root."""
    files = (path for path in ROOT.rglob("*") if path.suffix in _TYPES)
    return frozenset(path.relative_to(ROOT).as_posix() for path in files)


@cache
def page_file(name: str) -> PageFile | None:
    """Returns the file with this name, or None: a client cannot name other files."""
    if name not in names():
        return None
    data = (ROOT / name).read_bytes()
    return PageFile(
        data,
        gzip.compress(data, mtime=0),
        _TYPES[Path(name).suffix],
        f'"{hashlib.sha256(data).hexdigest()[:32]}"',
    )


def is_for_browser(method: str, path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks for the page at `/`. Programs do not accept text/html."""
    is_read = method in ("GET", "HEAD")
    return path == "/" and is_read and b"text/html" in headers.get(b"accept", b"")
