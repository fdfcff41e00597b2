"""Shows a self-test as a page, and two reports next to each other.

As a program, `python -m serve.selftest.page A.json B.json` compares two reports.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.doctor import print_table
from serve.core.errors import BrigadeError, UsageError
from serve.selftest.report import Line, SectionReport, SelftestReport, Verdict, expectation, read
from serve.selftest.section import SECTIONS

_COLOURS = {
    Verdict.EXPECTED: "green",
    Verdict.WORSE: "red",
    Verdict.NOT_TRIED: "dim",
    Verdict.NOTED: "",
}
_MIN_CHANGE = 0.1
_USAGE = "usage: selftest-report A.json B.json"


def show(console: Console, report: SelftestReport) -> None:
    for section in report.sections:
        show_section(console, section)
    counts = Counter(line.verdict for line in report.lines)
    text = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    console.print(f"\n{text}")


def show_section(console: Console, section: SectionReport) -> None:
    title = SECTIONS[section.name].title
    console.print(Text(f"\n{title} ({section.seconds:.0f} s)", "bold"))
    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in section.lines:
        verdict = line.verdict or Verdict.NOTED
        table.add_row(Text(verdict.value, _COLOURS[verdict]), _described(line))
    print_table(console, table)


def _described(line: Line) -> Text:
    known = expectation(line.id)
    text = Text(line.detail or known.what)
    if line.where:
        text.append(f", {line.where}")
    if not line.detail:
        text.append(f": {shown_value(line)}", "bold")
    if known.expected and line.verdict is not Verdict.NOT_TRIED:
        text.append(f" (expected {known.expected})")
    text.append(f" {line.id}", "dim")
    if line.series:
        text.append("\n" + ", ".join(f"{name}: {_number(n)}" for name, n in line.series.items()))
    advice = line.advice or known.advice
    if advice and line.verdict is Verdict.WORSE:
        text.append(f"\n→ {advice}", "bold")
        if known.source and not line.advice:
            text.append(f" (as in {known.source})")
    return text


def shown_value(line: Line) -> str:
    if isinstance(line.value, str):
        return line.value
    return f"{_number(line.value)} {expectation(line.id).unit}".strip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# --- two reports


def compare(console: Console, reports: Sequence[SelftestReport]) -> None:
    """Shows the lines whose verdicts or values differ."""
    first, second = ({(line.id, line.where): line for line in each.lines} for each in reports)
    table = Table("finding", *(report.date for report in reports), "ratio", box=None)
    num_equal = 0
    for key in {**first, **second}:
        one, other = first.get(key), second.get(key)
        if _is_equal(one, other):
            num_equal += 1
            continue
        name = " ".join(filter(None, key))
        table.add_row(Text(name), _cell(one), _cell(other), Text(_ratio(one, other)))
    print_table(console, table)
    console.print(f"{num_equal} findings are equal, or differ by less than {_MIN_CHANGE:.0%}")


def _is_equal(one: Line | None, other: Line | None) -> bool:
    if one is None or other is None or one.verdict is not other.verdict:
        return False
    if isinstance(one.value, float) and isinstance(other.value, float):
        largest = max(abs(one.value), abs(other.value))
        return abs(one.value - other.value) <= _MIN_CHANGE * largest
    return one.value == other.value


def _ratio(one: Line | None, other: Line | None) -> str:
    values = [line.value for line in (one, other) if line and isinstance(line.value, float)]
    if len(values) < 2 or not values[0]:
        return ""
    return f"{values[1] / values[0]:.2f}"


def _cell(line: Line | None) -> Text:
    if line is None or line.verdict is None:
        return Text("-")
    return Text(shown_value(line), _COLOURS[line.verdict])


def main(words: Sequence[str]) -> int:
    try:
        if len(words) != 2:
            raise UsageError(f"give two reports of `brigade selftest`. {_USAGE}")
        compare(Console(highlight=False), [read(Path(word)) for word in words])
    except BrigadeError as error:
        sys.stderr.write(f"selftest-report: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
