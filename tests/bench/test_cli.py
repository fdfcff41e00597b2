"""`brigade bench` as people run it."""

import importlib.util
import io
import json
import re
from pathlib import Path

import matplotlib
import pytest
from rich.console import Console

from launcher.cli import main
from serve.bench.config import Level
from serve.bench.plot import draw
from serve.bench.records import RequestRecord, summarise
from serve.cli.bench import ProgressReporter, Runs, table
from tests.bench.sse_server import streaming
from tests.cluster.servers import running


def bench(*flags: str) -> int:
    return main(["bench", *flags])


QUICK = ["--concurrency", "1,2", "--requests", "2", "--max-tokens", "4"]


@pytest.mark.long
def test_one_server_is_measured_at_each_number_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serve.cli.bench._PROGRESS_SECONDS", 1000.0)  # also on a slow machine
    output, plot = tmp_path / "results.json", tmp_path / "results.svg"
    with streaming() as (url, _):
        files = ["--output", str(output), "--plot", str(plot)]
        assert bench("--url", f"{url}/v1", *QUICK, *files) == 0
    shown, errors = capsys.readouterr()
    assert "1 client " in shown
    assert not [line for line in shown.splitlines() if line != line.rstrip()]
    assert "2 clients" in shown
    results = json.loads(output.read_text())
    assert results["flags"]["max_tokens"] == 4
    assert [each["load"] for each in results["results"]] == ["1 client", "2 clients"]
    rounds = [(each, n) for each in ("1 client", "2 clients") for n in (1, 2)]
    assert errors.splitlines() == [
        f"brigade bench: {load}, round {n} of 2, A: {url}/v1" for load, n in rounds
    ]
    for each in results["results"]:
        assert each["server"] == f"A: {url}/v1"
        assert (each["num_requests"], each["tokens"], each["errors"]) == (4, 16, {})
        assert each["prompt_tokens"] == 66
    assert "</svg>" in plot.read_text()


@pytest.mark.slow
def test_two_servers_get_the_same_load_in_turn() -> None:
    """A after B, or other prompts for B, would compare something else than the servers."""
    with streaming() as (a, seen_a), streaming() as (b, seen_b):
        assert bench("--url", a, "--url", b, *QUICK) == 0
    assert sorted(map(str, seen_a.bodies)) == sorted(map(str, seen_b.bodies))
    turns = sorted(
        [(time, "A") for time in seen_a.arrivals[2:]]  # without the two that count tokens
        + [(time, "B") for time in seen_b.arrivals[2:]]
    )
    changes = "".join(name for i, (_, name) in enumerate(turns) if not i or turns[i - 1][1] != name)
    assert changes == "ABABABAB"


@pytest.mark.long
def test_an_open_loop_sends_the_questions_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "Who?"}]}]))
    with streaming() as (url, state):
        flags = ["--rate", "20,40", "--requests", "4", "--rounds", "1", "--prompts", str(path)]
        assert bench("--url", url, *flags) == 0
    assert {body["messages"][0]["content"] for body in state.bodies} == {"Who?"}


def test_the_table_of_results_is_at_most_80_columns_wide() -> None:
    slow = RequestRecord(0.0, 200.0, tuple(114.567 + 0.013 * n for n in range(40)), 48, 1066)
    names = ("A: http://127.0.0.1:8080", "B: http://127.0.0.1:8081")
    runs: Runs = {(Level(0.25, True), name): [[slow] * 2000] for name in names}
    console = Console(width=80, file=io.StringIO())
    console.print(table(runs))
    assert isinstance(console.file, io.StringIO)
    _, _, head, *rows = console.file.getvalue().splitlines()
    names_shown = "load answers errors prompt tok/s TTFT ms p50 p99 ITL ms p50 p99"
    assert " ".join(head.split()) == names_shown
    assert [row.split()[2:6] for row in rows[:2]] == [
        ["A", "2000", "0", "1066"],
        ["B", "2000", "0", "1066"],
    ]
    assert "114567" in rows[0]


def test_errors_are_shown_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with streaming(fault="busy") as (url, _):
        assert bench("--url", url, "--concurrency", "1", "--requests", "3", "--rounds", "1") == 6
    out, err = capsys.readouterr()
    assert "3 x HTTP 429: the queue is full" in " ".join(out.split())
    assert out.endswith("\n"), "what is written next would follow in the same line"
    assert "gave no complete answer" in err.splitlines()[-1]


def test_a_long_run_reports_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serve.cli.bench._PROGRESS_SECONDS", 0.0)
    with streaming() as (url, _):
        flags = ["--requests", "3", "--rounds", "1", "--max-tokens", "2"]
        assert bench("--url", url, "--concurrency", "2", *flags) == 0
    begin = f"brigade bench: 2 clients, round 1 of 1, A: {url}"
    ended = [f"{begin}: {n} of 3 requests have ended" for n in (1, 2, 3)]
    assert capsys.readouterr().err.splitlines() == [begin, *ended]


def test_progress_is_not_reported_after_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shown = [100.0], list[str]()
    monkeypatch.setattr("serve.cli.bench.time.monotonic", lambda: now[0])
    progress = ProgressReporter(shown.append)
    progress.begin_run("8 clients")
    for num_ended in range(1, 25):
        now[0] += 1.0
        progress.ended(num_ended, 32)
    ended = [f"8 clients: {n} of 32 requests have ended" for n in (10, 20)]
    assert shown == ["8 clients", *ended]


def test_a_plot_has_a_line_for_each_server(tmp_path: Path) -> None:
    record = RequestRecord(0.0, 2.0, (1.0, 1.5, 2.0), 3, 66)
    points = [(clients, summarise([[record]])) for clients in (1.0, 2.0)]
    path = tmp_path / "both.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(path, "clients", {"A: http://a": points, "B: http://a": points})
    texts = re.findall(r"<text[^>]*>(.*?)</text>", path.read_text())
    assert {"A: http://a", "B: http://a", "A: http://a, p99", "B: http://a, p99"} <= set(texts)
    assert "1.5" not in texts[: texts.index("clients")]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--url"),
        (["--url", "localhost:8080"], "http://HOST:PORT"),
        (["--url", "http://a", "--url", "http://b", "--url", "http://c"], "--url"),
        (["--url", "http://a", "--concurrency", "0"], "--concurrency"),
        (["--url", "http://a", "--concurrency", "1,,2"], "--concurrency"),
        (["--url", "http://a", "--concurrency", "1.5"], "--concurrency"),
        (["--url", "http://a", "--rate", "-1"], "--rate"),
        (["--url", "http://a", "--rate", "1", "--concurrency", "1"], "exclude"),
        (["--url", "http://a", "--max-tokens", "0"], "--max-tokens"),
        (["--url", "http://a", "--concurrency", ""], "--concurrency"),
        (["--url", "http://127.0.0.1:70000"], "70000"),
        (["--url", "http://a", "--output", "/no/such/folder/a.json"], "/no/such/folder"),
        (["--url", "http://a", "--plot", "a.gif"], ".svg"),
        (["--url", "http://a", "--stream"], "--stream"),
    ],
)
def test_a_wrong_flag_of_bench_is_reported_in_one_line(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*flags) == 2
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench("--url", "http://127.0.0.1:9", "--plot", "a.svg") == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_an_unreachable_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", "http://127.0.0.1:9") == 5
    err = capsys.readouterr().err
    assert "does not answer" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_two_real_ranks_are_measured_without_errors(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    with running(2) as server:
        flags = ["--concurrency", "1,4", "--requests", "4", "--rounds", "1"]
        assert bench("--url", server.url, *flags, "--output", str(output)) == 0
    for each in json.loads(output.read_text())["results"]:
        assert (each["num_requests"], each["errors"]) == (4, {})
        assert each["prompt_tokens"] == pytest.approx(66, abs=3)  # of whole words
        assert 0 < each["chunks"] <= each["tokens"] <= 4 * 48
        assert 0 < each["itl_p50_seconds"] <= each["itl_p99_seconds"] < 5
