"""The flags of `brigade bench`, and the loads that they name."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from serve.core.config import check_ranges, flag
from serve.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Level:
    """One load: a number of clients (closed loop) or a rate of requests per second (open loop)."""

    value: float
    is_open: bool

    def __str__(self) -> str:
        clients = "client" if self.value == 1 else "clients"
        return f"{self.value:g} {'requests/s' if self.is_open else clients}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The flags of `brigade bench`."""

    url: tuple[str, ...] = flag(
        "server to measure, such as http://127.0.0.1:8080; given twice, two servers take turns"
    )
    model: str | None = flag(
        "name of the model (default: the first one that the server lists)",
        None,
    )
    concurrency: str | None = flag(
        "closed loop: numbers of clients, one level each (default: 1,8,16,32)",
        None,
    )
    rate: str | None = flag("open loop: requests per second, one level each, such as 0.5,2", None)
    requests: int | None = flag(
        "requests per level and round (default: 4 for each client, or 32 with --rate)",
        None,
        min=1,
    )
    rounds: int = flag("number of rounds of all levels", 2, min=1)
    prompt_tokens: int = flag("length of the prompts of random words, in tokens", 66, min=1)
    prompts: Path | None = flag(
        "ShareGPT file whose first questions are the prompts, instead of random words",
        None,
    )
    max_tokens: int = flag("maximum length of an answer, in tokens", 48, min=1)
    temperature: float = flag("sampling temperature", 0.0, min=0, max=2)
    seed: int = flag("random seed for prompts and arrivals", 0)
    timeout: float = flag(
        "seconds without data from a server after which a request fails",
        300.0,
        min=1,
        max=10**6,
    )
    output: Path | None = flag("JSON file for the results", None)
    plot: Path | None = flag("picture of the results, a .png or .svg file", None)

    def __post_init__(self) -> None:
        check_ranges(self)
        if len(self.url) > 2:
            raise UsageError("--url may be given once or twice.")
        for url in self.url:
            if not _is_server(url):
                raise UsageError(f"--url {url!r} is not a URL: write http://HOST:PORT.")
        if self.concurrency is not None and self.rate is not None:
            raise UsageError("--concurrency and --rate exclude each other: give one of them.")
        _ = self.levels  # Raises UsageError if the levels are wrong.

    @property
    def levels(self) -> tuple[Level, ...]:
        """The loads to try, in their order."""
        pattern = r"\d+"
        name = "--concurrency"
        text = self.concurrency
        if text is None:
            text = "1,8,16,32"
        if self.rate is not None:
            pattern = r"\d+(\.\d+)?"
            name = "--rate"
            text = self.rate
        words = text.split(",")
        if not all(re.fullmatch(pattern, word) and float(word) > 0 for word in words):
            raise UsageError(f"{name} {text!r} is wrong: give numbers above 0 such as 1,8.")
        return tuple(Level(float(word), self.rate is not None) for word in words)


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_reachable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # The port is out of range.
        return False
    return is_reachable and parts.scheme in ("http", "https")
