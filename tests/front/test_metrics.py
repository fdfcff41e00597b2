"""What Prometheus gets to read."""

from typing import Any

import pytest

from serve.front.metrics import Metrics

ADAPTERS = {"num_loaded": 3, "num_swapped": 1, "load_seconds": 0.5, "num_requests": {"x": 4}}
STATE: dict[str, Any] = {"num_running": 2, "num_waiting": 3, "stages": [], "adapters": ADAPTERS}


def lines(metrics: Metrics) -> list[str]:
    return metrics.render("")[0].decode().splitlines()


def test_gauges_are_read_when_asked() -> None:
    state = dict(STATE)
    metrics = Metrics(lambda: state)
    assert "brigade_num_requests_running 2.0" in lines(metrics)
    state["num_running"] = 5
    assert "brigade_num_requests_running 5.0" in lines(metrics)
    assert "brigade_num_requests_waiting 3.0" in lines(metrics)


def ran(busy_seconds: float) -> dict:
    hops = {"num_hops": 4, "hop_seconds": 0.02}
    return {"busy_seconds": busy_seconds, "kv_bytes": 64, "adapter_bytes": 32, **hops}


def test_bytes_of_stages_where_they_are_known() -> None:
    stages = [
        {"rank": 0, "bytes_owned": 10, "bytes_read": None, "bytes_fetched": 0} | ran(0.5),
        {"rank": 1, "bytes_owned": 20, "bytes_read": 21, "bytes_fetched": 5} | ran(0.25),
    ]
    found = lines(Metrics(lambda: {**STATE, "stages": stages}))
    assert 'brigade_stage_owned_bytes{stage="1"} 20.0' in found
    assert 'brigade_stage_fetched_bytes{stage="0"} 0.0' in found
    assert 'brigade_stage_read_bytes{stage="1"} 21.0' in found
    assert 'brigade_stage_kv_bytes{stage="0"} 64.0' in found
    assert 'brigade_stage_busy_seconds_total{stage="1"} 0.25' in found
    assert 'brigade_stage_adapter_bytes{stage="1"} 32.0' in found
    assert 'brigade_hop_seconds_count{stage="1"} 4.0' in found
    assert 'brigade_hop_seconds_sum{stage="0"} 0.02' in found
    assert not any(line.startswith('brigade_stage_read_bytes{stage="0"}') for line in found)


def test_adapters_are_counted() -> None:
    found = lines(Metrics(lambda: STATE))
    assert 'brigade_adapter_requests_total{adapter="x"} 4.0' in found
    assert "brigade_adapter_swaps_total 1.0" in found
    assert "brigade_adapter_load_seconds_count 3.0" in found
    assert "brigade_adapter_load_seconds_sum 0.5" in found


def test_everything_is_counted_under_its_name() -> None:
    metrics = Metrics(lambda: STATE)
    metrics.prompt(11)
    metrics.first_token(0.3)
    metrics.next_token(0.02)
    metrics.next_token(0.02)
    metrics.answered(1.0)
    metrics.request(200)
    metrics.request(499)
    found = lines(metrics)
    for line in (
        "brigade_prompt_tokens_total 11.0",
        "brigade_generation_tokens_total 3.0",
        "brigade_time_to_first_token_seconds_count 1.0",
        "brigade_inter_token_latency_seconds_count 2.0",
        "brigade_e2e_request_latency_seconds_sum 1.0",
        'brigade_requests_total{status="200"} 1.0',
        'brigade_requests_total{status="499"} 1.0',
    ):
        assert line in found


def test_two_servers_in_one_process_share_nothing() -> None:
    first, second = Metrics(lambda: STATE), Metrics(lambda: STATE)
    first.prompt(1)
    assert "brigade_prompt_tokens_total 0.0" in lines(second)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")],
)
def test_the_content_type_is_what_was_encoded(accept: str, content_type: str) -> None:
    body, given = Metrics(lambda: STATE).render(accept)
    assert given.startswith(content_type)
    assert body.endswith(b"# EOF\n") == (content_type != "text/plain")
