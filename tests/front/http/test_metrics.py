"""The metrics for Prometheus, also by its own checks, and the dashboard that queries them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.core.types import SumCounts
from serve.front.http.metrics import Metrics

ADAPTERS = {"num_loaded": 3, "num_swapped": 1, "load_seconds": 0.5, "num_requests": {"x": 4}}
STATE: dict[str, Any] = {
    **{"num_running": 2, "num_waiting": 3, "stages": [], "adapters": ADAPTERS},
    **{"num_restarts": 4, "recovery_seconds": 9.5},
    "drafts": {"suffixes": {"drafted": 9, "accepted": 6}},
    "prefix_cache": {
        "num_reuses": 6,
        "num_reused_tokens": 700,
        "num_evicted_sequences": 2,
        "num_evicted_checkpoints": 3,
        "num_sequences": 4,
        "num_checkpoints": 5,
        "num_bytes": 4096,
        "disk": {
            "num_reads": 7,
            "num_read_tokens": 800,
            "num_written_files": 9,
            "num_failed_writes": 1,
            "num_evicted_files": 2,
            "num_damaged_files": 3,
            "num_files": 5,
            "num_bytes": 8192,
        },
    },
}


def lines(metrics: Metrics) -> list[str]:
    return metrics.render("")[0].decode().splitlines()


def test_gauges_are_read_again_at_each_scrape() -> None:
    state = dict(STATE)
    metrics = Metrics(lambda: state)
    assert "brigade_num_requests_running 2.0" in lines(metrics)
    state["num_running"] = 5
    assert "brigade_num_requests_running 5.0" in lines(metrics)
    assert "brigade_num_requests_waiting 3.0" in lines(metrics)


def test_drafts_are_counted_by_drafter() -> None:
    shown = lines(Metrics(lambda: STATE))
    assert 'brigade_draft_tokens_total{drafter="suffixes"} 9.0' in shown
    assert 'brigade_accepted_draft_tokens_total{drafter="suffixes"} 6.0' in shown


def test_recoveries_are_counted_and_timed() -> None:
    shown = lines(Metrics(lambda: STATE))
    assert "brigade_restarts_total 4.0" in shown
    assert "brigade_recovery_seconds_total 9.5" in shown


def test_the_prefix_cache_is_counted() -> None:
    found = lines(Metrics(lambda: STATE))
    assert "brigade_prefix_cache_reuses_total 6.0" in found
    assert "brigade_prefix_cache_saved_tokens_total 700.0" in found
    assert 'brigade_prefix_cache_evictions_total{kind="checkpoints"} 3.0' in found
    assert 'brigade_prefix_cache_entries{kind="sequences"} 4.0' in found
    assert "brigade_prefix_cache_bytes 4096.0" in found
    assert "brigade_prefix_cache_disk_read_tokens_total 800.0" in found
    assert 'brigade_prefix_cache_disk_files_total{event="damaged"} 3.0' in found
    assert "brigade_prefix_cache_disk_bytes 8192.0" in found


def ran(busy_seconds: float) -> dict:
    hops = {"num_hops": 4, "hop_seconds": 0.02}
    return {"busy_seconds": busy_seconds, "kv_bytes": 64, "adapter_bytes": 32, **hops}


def test_bytes_of_stages_are_exported_once_they_are_known() -> None:
    stages = [
        {"rank": 0, "bytes_owned": 10, "bytes_read": None, "bytes_fetched": 0} | ran(0.5),
        {"rank": 1, "bytes_owned": 20, "bytes_read": 21, "bytes_fetched": 5} | ran(0.25),
    ]
    counts = SumCounts(num_sums=9, num_bytes=72, num_measured=2, seconds=0.125, step_seconds=0.5)
    stages[1]["all_reduce"] = counts.to_json()
    found = lines(Metrics(lambda: {**STATE, "stages": stages}))
    assert 'brigade_stage_owned_bytes{stage="1"} 20.0' in found
    assert 'brigade_stage_fetched_bytes{stage="0"} 0.0' in found
    assert 'brigade_stage_read_bytes{stage="1"} 21.0' in found
    assert 'brigade_stage_kv_bytes{stage="0"} 64.0' in found
    assert 'brigade_stage_busy_seconds_total{stage="1"} 0.25' in found
    assert 'brigade_stage_adapter_bytes{stage="1"} 32.0' in found
    assert 'brigade_hop_seconds_count{stage="1"} 4.0' in found
    assert 'brigade_hop_seconds_sum{stage="0"} 0.02' in found
    assert 'brigade_all_reduce_seconds_count{stage="1"} 2.0' in found
    assert 'brigade_all_reduce_seconds_sum{stage="1"} 0.125' in found
    assert 'brigade_all_reduce_bytes_total{stage="1"} 72.0' in found
    assert 'brigade_all_reduce_bytes_total{stage="0"} 72.0' not in found
    assert not any(line.startswith('brigade_stage_read_bytes{stage="0"}') for line in found)


def test_requests_of_adapters_are_counted() -> None:
    found = lines(Metrics(lambda: STATE))
    assert 'brigade_adapter_requests_total{adapter="x"} 4.0' in found
    assert "brigade_adapter_swaps_total 1.0" in found
    assert "brigade_adapter_load_seconds_count 3.0" in found
    assert "brigade_adapter_load_seconds_sum 0.5" in found


def test_each_event_is_counted_under_its_metric() -> None:
    metrics = Metrics(lambda: STATE)
    metrics.prompt(11)
    metrics.first_token(0.3)
    metrics.next_token(0.02)
    metrics.next_token(0.02)
    metrics.answered(1.0)
    metrics.request("/v1/models", 200)
    metrics.request("other", 499)
    found = lines(metrics)
    for line in (
        "brigade_prompt_tokens_total 11.0",
        "brigade_generation_tokens_total 3.0",
        "brigade_time_to_first_token_seconds_count 1.0",
        "brigade_inter_token_latency_seconds_count 2.0",
        "brigade_e2e_request_latency_seconds_sum 1.0",
        'brigade_requests_total{endpoint="/v1/models",status="200"} 1.0',
        'brigade_requests_total{endpoint="other",status="499"} 1.0',
    ):
        assert line in found


def test_metrics_of_two_servers_in_one_process_are_separate() -> None:
    first, second = Metrics(lambda: STATE), Metrics(lambda: STATE)
    first.prompt(1)
    assert "brigade_prompt_tokens_total 0.0" in lines(second)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")],
)
def test_the_content_type_matches_the_format_of_the_body(accept: str, content_type: str) -> None:
    body, given = Metrics(lambda: STATE).render(accept)
    assert given.startswith(content_type)
    assert body.endswith(b"# EOF\n") == (content_type != "text/plain")


# --- Prometheus's own checks

DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana.json"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def rendered() -> str:
    """With a sample of everything."""
    stage = {"rank": 0, "bytes_owned": 1, "bytes_read": 1, "bytes_fetched": 1} | ran(0.5)
    metrics = Metrics(lambda: {**STATE, "stages": [stage]})
    metrics.prompt(11)
    metrics.prefix_cache(11, 4)
    metrics.first_token(0.3)
    metrics.next_token(0.02)
    metrics.answered(1.0)
    metrics.request("/v1/models", 200)
    return metrics.render("")[0].decode()


def promtool(*command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", "check", *command], input=given, text=True, capture_output=True
    )


@needs_promtool
def test_promtool_accepts_the_metrics() -> None:
    checked = promtool("metrics", given=rendered())
    assert (checked.returncode, checked.stderr) == (0, "")
    assert promtool("metrics", given="bad_total 1\n").returncode, "it finds nothing at all"


def test_every_metric_has_a_unit_and_a_description() -> None:
    for family in text_string_to_metric_families(rendered()):
        assert family.name.startswith("brigade_")
        assert family.documentation
        counts = family.type in ("gauge", "counter") or family.name.endswith("_seconds")
        assert counts, family.name


def queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) >= 10
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_query_of_the_dashboard_names_a_metric_that_exists() -> None:
    text = rendered()
    families = text_string_to_metric_families(text)
    there = {sample.name: set(sample.labels) for f in families for sample in f.samples}
    asked = {name for query in queries() for name in re.findall(r"brigade_\w+", query)}
    assert asked <= set(there), asked - set(there)
    own = {name for name in there if not name.endswith(("_created", "_sum", "_count"))}
    assert own <= asked, "what nobody looks at"
    for query in queries():
        labels = {label for name in re.findall(r"brigade_\w+", query) for label in there[name]}
        for group in re.findall(r"by \(([^)]+)\)", query):
            assert set(group.split(", ")) <= labels, query


@needs_promtool
def test_every_query_of_the_dashboard_is_valid_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"a:b{n}", "expr": query.replace("$__rate_interval", "1m")}
        for n, query in enumerate(queries())
    ]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    checked = promtool("rules", str(file))
    assert checked.returncode == 0, checked.stderr
