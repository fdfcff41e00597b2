"""`serve --model org/name`: a cluster whose ranks fetch their own layers from the hub."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mlx_lm
import pytest

from tests.cluster.recovery.test_links import Ranks
from tests.cluster.servers import BIN, ROOT, TINY_CHAT, Server, brigade_launch, started
from tests.hub.checkpoints import header_sizes
from tests.hub.server import COMMIT, REPO, FakeHub, running
from tests.ports import free_ports

QUESTION = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture
def tiny_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the embedded model, for processes that are started from here."""
    shutil.copytree(TINY_CHAT, tmp_path / "repo")
    with running(tmp_path / "repo") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        yield hub


def command(port: int, num_ranks: int, *more: str) -> list[str]:
    return brigade_launch(num_ranks, ["--model", REPO, "--port", str(port), "--quick-start", *more])


def answer(server: Server, model: str) -> str | None:
    client = server.client()
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=32
    )
    return reply.choices[0].message.content


@pytest.mark.long
def test_a_cluster_serves_a_model_from_the_hub(tiny_hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    port = free_ports(1)[0]
    flags = ["--revision", "v1", "--cache-dir", str(cache)]
    with started(command(port, 2, *flags), port) as server:
        server.wait_until_ready()
        stages = server.get("/admin/pipeline")["stages"]
        from_hub = answer(server, REPO)
    owned = [stage["bytes_owned"] for stage in stages]
    fetched = [stage["bytes_fetched"] for stage in stages]
    assert all(f <= 1.01 * o for f, o in zip(fetched, owned, strict=True))
    assert sum(fetched) == tiny_hub.data_bytes(header_sizes(tiny_hub.folder))
    assert (cache / "models--org--tiny" / COMMIT / "config.json").exists()
    model, tokenizer = mlx_lm.load(str(TINY_CHAT))
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert from_hub == mlx_lm.generate(model, tokenizer, prompt, max_tokens=32)
    tiny_hub.served.clear()
    with started(command(port, 2, *flags), port) as server:
        server.wait_until_ready()
        assert answer(server, REPO) == from_hub
    assert not [s for s in tiny_hub.served if s.file.endswith(".safetensors")]


@pytest.mark.slow
def test_other_ranks_fetch_the_layers_of_a_lost_rank(tiny_hub: FakeHub, tmp_path: Path) -> None:
    """Each rank has a cache of its own, as on hosts of their own."""
    flags = ("--model", REPO, "--revision", "v1", "--replan", "--join-timeout", "4")
    ranks = Ranks(tmp_path, free_ports(4), [], flags)
    of_0, of_1 = ([*ranks.command(r), "--cache-dir", str(tmp_path / f"cache-{r}")] for r in (0, 1))
    with started(of_1) as other, started(of_0, ranks.ports[-1]) as server:
        server.wait_until_ready()
        owned_by_other = server.get("/admin/pipeline")["stages"][1]["bytes_owned"]
        expected = answer(server, REPO)
        tiny_hub.served.clear()
        other.process.kill()
        server.wait_for_log("event=recovered")
        (stage,) = server.get("/admin/pipeline")["stages"]
        assert stage["layers"] == [0, 8]
        assert answer(server, REPO) == expected
    assert 0 < tiny_hub.data_bytes(header_sizes(tiny_hub.folder)) <= 1.01 * owned_by_other


@pytest.mark.long
def test_a_temporary_failure_of_the_hub_does_not_end_the_cluster(tiny_hub: FakeHub) -> None:
    """It was taken for a broken model, with which nobody starts again."""
    port = free_ports(1)[0]
    tiny_hub.faults.busy_data = True
    with started(command(port, 2), port) as server:
        server.wait_for_log("event=recovering life=1 .*cannot be fetched")
        tiny_hub.faults.busy_data = False
        server.wait_until_ready()
        assert answer(server, REPO)


def test_a_plan_fetches_only_headers(tiny_hub: FakeHub) -> None:
    words = [str(BIN / "brigade"), "plan", "--model", REPO, "-n", "2", "--json"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["stages"]) == 2
    assert tiny_hub.data_bytes(header_sizes(tiny_hub.folder)) == 0


def test_a_model_that_may_not_be_fetched_ends_all_ranks(tiny_hub: FakeHub) -> None:
    tiny_hub.faults.gated = 403
    with started(command(free_ports(1)[0], 2)) as server:
        assert server.process.wait(60) == 3
    assert "accept its licence" in server.text
    assert "Traceback" not in server.text
