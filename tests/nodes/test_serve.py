"""A cluster whose ranks have caches of their own, a folder that one machine has, and no hub."""

from pathlib import Path

import mlx_lm
import pytest

from serve.hub.folders import publish
from tests.cluster.recovery.test_links import Ranks
from tests.cluster.servers import TINY_CHAT, started
from tests.hub.test_serve import QUESTION, answer
from tests.nodes.machines import Machines
from tests.ports import free_ports


@pytest.mark.long
@pytest.mark.parametrize("owner", [0, 1])
def test_ranks_serve_a_folder_that_only_one_of_them_has(
    tmp_path: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    both = machines.make("rank-0", "rank-1")
    repo, commit = publish(TINY_CHAT, both[owner].cache)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = ("--model", repo, "--revision", commit, "--served-model-name", "mine")
    ranks = Ranks(tmp_path, free_ports(4), [], flags)
    commands: list[list[str]] = []
    for rank, machine in enumerate(both):
        caches = f"HF_HOME={machine.cache.parent}"
        neighbours = f"BRIGADE_NEIGHBOURS={machine.neighbours}"
        commands.append(["env", caches, neighbours, *ranks.command(rank)])
    with (
        machines.serving(*both),
        started(commands[1]),
        started(commands[0], ranks.ports[-1]) as server,
    ):
        server.wait_until_ready()
        stages = server.get("/admin/pipeline")["stages"]
        from_cluster = answer(server, "mine")
    other = stages[1 - owner]
    assert stages[owner]["bytes_fetched"] == 0
    assert other["bytes_fetched"] == other["bytes_from_neighbours"]
    assert 0.99 <= other["bytes_fetched"] / other["bytes_owned"] <= 1.01
    assert "from other machines)" in server.text
    model, tokenizer = mlx_lm.load(str(TINY_CHAT))
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert from_cluster == mlx_lm.generate(model, tokenizer, prompt, max_tokens=32)
