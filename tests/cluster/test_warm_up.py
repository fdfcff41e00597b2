"""A server that has just become ready: its first answers find everything compiled, and no figure
counts the steps of its warm-up."""

import re
from collections.abc import Iterator

import httpx2
import pytest

from tests.cluster.servers import ROOT, TINY_CHAT, Server, brigade_launch, started
from tests.ports import free_ports

pytestmark = pytest.mark.uses("adapters")

ADAPTER = ROOT / "examples" / "adapters" / "pirate"


@pytest.fixture(scope="module")
def fresh() -> Iterator[Server]:
    port = free_ports(1)[0]
    flags = ["--model", str(TINY_CHAT), "--port", str(port), "--lora-modules", f"guest={ADAPTER}"]
    with started(brigade_launch(2, flags), port) as server:
        server.wait_until_ready()
        yield server


def test_a_warm_up_leaves_no_tokens_and_no_figures(fresh: Server) -> None:
    pipeline = fresh.get("/admin/pipeline")
    assert (pipeline["kv_tokens"], pipeline["num_running"], pipeline["num_waiting"]) == (0, 0, 0)
    assert set(pipeline["adapters"]["num_requests"].values()) <= {0}
    for stage in pipeline["stages"]:
        assert stage["kv_bytes"] == stage["num_hops"] == stage["busy_seconds"] == 0
        assert stage["decode_seconds"] is None
    events = fresh.get("/admin/trace?seconds=60")["traceEvents"]
    assert [event for event in events if event["ph"] == "X"] == []
    metrics = httpx2.get(f"{fresh.url}/metrics").text
    counted = re.findall(r"^brigade_\w*tokens\w*_total\S* (\S+)$", metrics, re.MULTILINE)
    assert counted
    assert set(map(float, counted)) == {0}


def test_a_warm_up_is_logged_in_one_line_before_ready(fresh: Server) -> None:
    (line,) = re.findall(r"event=warmed_up num_steps=(\d+) seconds=\d", fresh.text)
    assert int(line) > 20
    assert fresh.text.index("event=warmed_up") < fresh.text.index("event=ready")


def test_the_first_answer_is_the_same_with_and_without_a_warm_up(
    fresh: Server, server: Server
) -> None:
    def answer(asked: Server) -> str | None:
        reply = asked.client().chat.completions.create(
            model=asked.get("/v1/models")["data"][0]["id"],
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=20,
            temperature=1.0,
            seed=7,
        )
        return reply.choices[0].message.content

    assert "event=warmed_up" not in server.text
    assert answer(fresh) == answer(server)
