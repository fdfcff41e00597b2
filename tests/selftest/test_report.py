"""The file of a self-test: what is in it, what is not, and how two of them are compared."""

import io
import math
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from serve.core.errors import UsageError
from serve.selftest import page, report, run
from serve.selftest.report import (
    Line,
    Scrubber,
    SectionReport,
    SelftestReport,
    Verdict,
    expectation,
)
from serve.selftest.section import SECTIONS, Context
from tests.errors import fails

ROOT = Path(__file__).parents[2]


def made(*lines: Line, date: str = "2026-11-26-050000") -> SelftestReport:
    sections = [SectionReport("system", 1.0, [line.judged() for line in lines])]
    return SelftestReport(
        report.FORMAT, date, "Linux x86_64", {"mlx": "0.32.4"}, 1, False, sections
    )


@pytest.mark.parametrize(
    ("id", "value", "verdict"),
    [
        ("system.sparse", 50.0, Verdict.EXPECTED),
        ("system.sparse", 51.0, Verdict.WORSE),
        ("system.sparse", math.nan, Verdict.WORSE),
        ("compute.memory_share", 0.6, Verdict.EXPECTED),
        ("compute.memory_share", 0.5, Verdict.WORSE),
        ("endings.code", "0", Verdict.EXPECTED),
        ("endings.code", "none", Verdict.WORSE),
        ("endings.killed", 0.0, Verdict.EXPECTED),
        ("compute.rows", 7.0, Verdict.NOTED),
        ("machine.unknown", "x", Verdict.NOTED),
    ],
)
def test_each_value_gets_the_right_verdict(id: str, value: float | str, verdict: Verdict) -> None:
    assert Line(id, value).judged().verdict is verdict


def test_every_finding_belongs_to_a_section_and_says_what_to_do() -> None:
    listed = tomllib.loads((ROOT / "serve" / "selftest" / "findings.toml").read_text())
    for id in listed:
        known = expectation(id)
        assert id.partition(".")[0] in SECTIONS
        assert bool(known.expected) == bool(known.advice), id
        assert not (known.at_most is not None and known.at_least is not None), id


def test_every_listed_finding_is_made_by_a_section() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "serve" / "selftest").glob("*.py"))
    listed = tomllib.loads((ROOT / "serve" / "selftest" / "findings.toml").read_text())
    made_of_parts = ("compute.attention_", "equality.")
    assert [id for id in listed if id not in sources and not id.startswith(made_of_parts)] == []


def test_a_written_report_can_be_read_back(tmp_path: Path) -> None:
    whole = made(
        Line("system.sparse", 3.0, {"a": math.inf, "b": 1.0}), Line("memory.wired", math.nan)
    )
    path = report.write(whole, tmp_path, Scrubber([]))
    assert path.name == "selftest-2026-11-26-050000.json"
    again = report.read(path)
    assert again == whole
    assert [line.series for line in again.lines] == [{"b": 1.0}, {}]
    assert again.exit_code == 1


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 1}', b"\xff"])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with fails(UsageError, "unreadable", match="a.json"):
        report.read(path)


def test_a_report_in_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(replace(made(), format=99)))
    with fails(UsageError, "wrong_format", match="99"):
        report.read(path)


def test_the_error_for_an_unwritable_folder_asks_for_another_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another folder"):
        report.write(made(), tmp_path / "none", Scrubber([]))


@pytest.mark.parametrize(
    "text",
    [
        "cannot open /Users/annabel/models/secret.safetensors: no such file",
        "rank 1 at 10.1.2.3:5000 is gone",
        "fe80:0:0:0:1c2d:3e4f:5a6b:7c8d is not reachable",
        "no model in ~/private/models",
        "STUDIO-2.local does not answer",
        "annabel@studio-2 asks for a password",
        "cannot open '/Volumes/Annabels Disk/my models': no such file",
        "fe80::1 is not reachable",
    ],
)
def test_names_and_addresses_and_paths_are_removed_from_reports(text: str, tmp_path: Path) -> None:
    line = Line("links.sum", text, detail="studio-2 in /Users/ann", advice="ssh annabel@studio-2")
    path = report.write(made(line), tmp_path, Scrubber(["studio-2", "annabel"]))
    written = path.read_text().lower()
    for private in (
        "studio-2",
        "annabel",
        "users",
        "secret",
        "private",
        "10.1.2.3",
        "1c2d",
        "disk",
        "fe80",
    ):
        assert private not in written, written


def test_versions_and_figures_are_kept_in_reports() -> None:
    text = "MLX 0.32.4 took 12:30 min, 3/4 of it in 10.5 s"
    assert Scrubber(["studio-1"]).text(text) == text


# --- what is shown


def shown(*lines: Line) -> str:
    console = Console(width=100, highlight=False, record=True, file=io.StringIO())
    page.show(console, made(*lines))
    return console.export_text()


def test_the_printed_report_says_what_was_found_and_expected_and_what_to_do() -> None:
    text = shown(Line("system.sparse", 100.0), Line("system.rdma", 2.0), Line("endings.code", "0"))
    assert (
        "not as expected  disk space of a sparse file of 1 GB: 100 MB (expected at most 50" in text
    )
    assert "→ models from the hub need a file system" in text
    assert "1 as expected, 1 not as expected, 0 not tried, 1 noted" in text
    assert text.count("→") == 1


def test_the_comparison_of_two_reports_lists_differences(tmp_path: Path) -> None:
    first = made(Line("system.sync", 2.0), Line("system.timer", 5.0), Line("system.kill", "yes"))
    second = made(
        Line("system.sync", 6.0),
        Line("system.timer", 5.1),
        Line("system.kill", "no"),
        Line("system.chip", "M3"),
        date="2026-11-27-050000",
    )
    paths = [str(report.write(each, tmp_path, Scrubber([]))) for each in (first, second)]
    command = [str(ROOT / "scripts" / "selftest-report"), *paths]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert rows == [
        "finding 2026-11-26-050000 2026-11-27-050000 ratio",
        "system.sync 2 ms 6 ms 3.00",
        "system.kill yes no",
        "system.chip - M3",
        "1 findings are equal, or differ by less than 10%",
    ]


@pytest.mark.parametrize("words", [[], ["a.json"], ["a.json", "b.json"]])
def test_a_comparison_without_two_readable_reports_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert page.main(words) == 2
    assert capsys.readouterr().err.startswith("selftest-report: ")


# --- the command


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Only two sections, in an empty folder."""
    sections = {name: SECTIONS[name] for name in ("machine", "faults")}
    monkeypatch.setattr(run, "SECTIONS", sections)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_self_test_writes_a_report(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run.selftest(Context(minutes=1), faults=False, asks=True)
    (path,) = few.glob("selftest-*.json")
    written = report.read(path)
    assert code == written.exit_code
    assert [section.name for section in written.sections] == ["machine", "faults"]
    (left_out,) = written.sections[1].lines
    assert left_out.verdict is Verdict.NOT_TRIED
    out = capsys.readouterr().out
    assert "It holds no names" in " ".join(out.split())
    assert path.name in out


def test_the_self_test_tries_no_faults_without_consent(
    few: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *a: "n")
    run.selftest(Context(minutes=1), faults=True, asks=True)
    (path,) = few.glob("selftest-*.json")
    (left_out,) = report.read(path).sections[1].lines
    assert left_out.verdict is Verdict.NOT_TRIED
    assert "Go on?" in capsys.readouterr().out
