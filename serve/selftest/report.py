"""The lines of a self-test, how they are judged, and the file that a user sends back.

A file holds figures and versions. Names, addresses, paths and doctor's words are left out.
"""

import enum
import functools
import getpass
import math
import re
import socket
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from serve.core.errors import UsageError

FORMAT = 1
_PATH = r"(?P<quote>['\"])[~/][^'\"]*(?P=quote)|(?<![\w/])~?(?:/[^\s/:'\"]+)+/?"
_HEX = "[0-9a-fA-F]"
_ADDRESS = (
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b|"
    rf"\b{_HEX}{{0,4}}(?::{_HEX}{{0,4}}){{3,7}}\b|\b{_HEX}{{1,4}}::[0-9a-fA-F:]*"
)
_LONGEST_TEXT = 200


class Verdict(enum.Enum):
    EXPECTED = "as expected"
    WORSE = "not as expected"
    NOT_TRIED = "not tried"
    NOTED = "noted"


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of findings.toml: a limit, the right value, or neither. by_chip maps
    Apple's chips to their figures, and the value is a share of the chip's figure. source names a
    thread in which others met the problem, such as mlx#3910."""

    what: str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    is_: str | None = None
    advice: str = ""
    source: str = ""
    by_chip: dict[str, float] = {}

    @property
    def expected(self) -> str:
        if self.at_most == 0:
            return "0"
        if self.at_most is not None:
            return f"at most {self.at_most:g} {self.unit}".rstrip()
        if self.at_least is not None:
            return f"at least {self.at_least:g} {self.unit}".rstrip()
        return self.is_ or ""

    def verdict(self, value: float | str) -> Verdict:
        """Judges a value. An infinite value is never as expected."""
        if not self.expected:
            return Verdict.NOTED
        is_right = value == self.is_
        if not isinstance(value, str):
            is_right = (self.at_most is not None and value <= self.at_most) or (
                self.at_least is not None and value >= self.at_least
            )
        return Verdict.EXPECTED if is_right else Verdict.WORSE


class Line(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """One finding. Its id is stable. `where` is a rank, a pair of ranks or a layout. series maps
    the varied quantity to values. A line without a verdict is judged by findings.toml. detail and
    advice are words of doctor, for the user only: they may name hosts."""

    id: str
    value: float | str = ""
    series: dict[str, float] = {}
    where: str = ""
    verdict: Verdict | None = None
    detail: str = ""
    advice: str = ""

    def judged(self) -> "Line":
        """Returns the line with a verdict. JSON has no numbers that are not finite."""
        series = {name: value for name, value in self.series.items() if math.isfinite(value)}
        if isinstance(self.value, float) and not math.isfinite(self.value):
            return replace(self, value="not a number", series=series, verdict=Verdict.WORSE)
        verdict = self.verdict or expectation(self.id).verdict(self.value)
        return replace(self, series=series, verdict=verdict)


def not_tried(id: str, reason: str) -> Line:
    return Line(id, reason, verdict=Verdict.NOT_TRIED)


def failed(id: str, reason: str) -> Line:
    """Returns the line of a measurement that has no result."""
    return Line(id, reason, verdict=Verdict.WORSE, advice="send the report: this should not happen")


@functools.cache
def _findings() -> dict[str, Expectation]:
    text = Path(__file__).with_name("findings.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Expectation])


def expectation(id: str) -> Expectation:
    """Returns the entry for an id in findings.toml, or one that contains only the id's name."""
    words = id.partition(".")[2].replace("_", " ")
    return _findings().get(id) or Expectation(words)


class SectionReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    seconds: float
    lines: list[Line]


class SelftestReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. versions are those of the packages on the machine that wrote it."""

    format: int
    date: str
    system: str
    versions: dict[str, str]
    num_hosts: int
    has_own_model: bool
    sections: list[SectionReport]

    @property
    def lines(self) -> Iterator[Line]:
        for section in self.sections:
            yield from section.lines

    @property
    def exit_code(self) -> int:
        """0 if nothing is worse than expected, otherwise 1."""
        return int(any(line.verdict is Verdict.WORSE for line in self.lines))


class Scrubber:
    """Removes what identifies the machines: names of hosts and users, paths, addresses."""

    def __init__(self, names: Iterable[str]) -> None:
        here = socket.gethostname()
        words = {here, getpass.getuser(), Path.home().name, *names}
        words |= {word.partition(".")[0] for word in words}
        words -= {"", "localhost", "root"}
        named = [rf"\b{re.escape(word)}\b" for word in sorted(words, key=len, reverse=True)]
        self._pattern = re.compile("|".join([_PATH, _ADDRESS, *named]), re.IGNORECASE)

    def text(self, text: str) -> str:
        return self._pattern.sub("…", text)[:_LONGEST_TEXT]

    def line(self, line: Line) -> Line:
        """Returns the line as it may be sent to others."""
        return replace(self.value(line), detail="", advice="")

    def value(self, line: Line) -> Line:
        """Returns the line for the user, without names in its value."""
        is_text = isinstance(line.value, str)
        return replace(line, value=self.text(str(line.value))) if is_text else line


def write(report: SelftestReport, folder: Path, scrubber: Scrubber) -> Path:
    """Writes the file to send, and reads it again. Raises UsageError."""
    sections = [
        replace(section, lines=[scrubber.line(line) for line in section.lines])
        for section in report.sections
    ]
    path = folder / f"selftest-{report.date}.json"
    data = msgspec.json.encode(replace(report, sections=sections))
    try:
        path.write_bytes(msgspec.json.format(data, indent=1) + b"\n")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): run it in another folder."
        ) from error
    read(path)
    return path


def read(path: Path) -> SelftestReport:
    """Raises UsageError if the file is not a report."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=SelftestReport)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} is not a report ({error}): give a file of `brigade selftest`.",
            code="unreadable",
        ) from error
    if report.format != FORMAT:
        raise UsageError(
            f"{path} has format {report.format}, not {FORMAT}: use the Brigade that wrote it.",
            code="wrong_format",
        )
    return report
