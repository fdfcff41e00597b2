"""A cluster whose ranks have caches of their own, a folder that one machine has, and no hub."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import mlx_lm
import pytest
from huggingface_hub import hf_hub_download

from serve.core.checkpoint import read_checkpoint
from serve.hub.folders import publish
from serve.hub.snapshot import is_offered
from tests.cluster.recovery.test_links import Ranks
from tests.cluster.servers import TINY_CHAT, started
from tests.hub.checkpoints import header_sizes
from tests.hub.conftest import point_at
from tests.hub.server import REPO, running
from tests.hub.test_serve import QUESTION, answer
from tests.nodes.machines import Machine, Machines
from tests.ports import free_ports


def environment(machine: Machine) -> list[str]:
    caches = f"HF_HOME={machine.cache.parent}"
    return ["env", caches, f"BRIGADE_NEIGHBOURS={machine.neighbours}"]


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
        commands.append([*environment(machine), *ranks.command(rank)])
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


@pytest.mark.long
@pytest.mark.parametrize(("owner", "has_model"), [(0, True), (1, True), (0, False), (1, False)])
def test_all_ranks_but_one_are_offline(
    tmp_path: Path,
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    owner: int,
    has_model: bool,
) -> None:
    """The machine that may ask the hub has the model, or asks the hub for the other one, too."""
    folder = tmp_path / "repo"
    shutil.copytree(TINY_CHAT, folder)
    ranks = Ranks(tmp_path, free_ports(4), [], ("--model", REPO))
    both = machines.make("rank-0", "rank-1")
    with running(folder) as hub, machines.serving(*both), ExitStack() as stack:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        point_at(hub, monkeypatch)
        names = [path.name for path in folder.iterdir() if is_offered(path.name)]
        for name in names if has_model else ():
            hf_hub_download(REPO, name, endpoint=hub.url, cache_dir=both[owner].hub_cache)
        before = hub.num_bytes
        for rank, machine in reversed(list(enumerate(both))):
            offline = f"HF_HUB_OFFLINE={int(rank != owner)}"
            command = [*environment(machine), offline, *ranks.command(rank)]
            server = stack.enter_context(started(command, 0 if rank else ranks.ports[-1]))
        server.wait_until_ready()
        stages = server.get("/admin/pipeline")["stages"]
        assert answer(server, REPO)
    other = stages[1 - owner]
    if has_model:
        assert other["bytes_fetched"] == other["bytes_from_neighbours"] > 0
        assert hub.num_bytes - before < 100_000, "at most a list of files"
    else:
        sizes = sum((folder / name).stat().st_size for name in names)
        embedding = read_checkpoint(folder).tensors["model.embed_tokens.weight"].num_bytes
        assert hub.num_bytes <= 1.01 * sizes + embedding


@pytest.mark.long
def test_three_ranks_fetch_a_model_from_the_hub_once(
    tmp_path: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, free_ports(5), [], ("--model", REPO, "--split", "2,3,3"))
    together = machines.make("rank-0", "rank-1", "rank-2")
    folder = tmp_path / "repo"
    shutil.copytree(TINY_CHAT, folder)
    with running(folder) as hub, machines.serving(*together), ExitStack() as stack:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for rank, machine in reversed(list(enumerate(together))):
            command = [*environment(machine), *ranks.command(rank)]
            port = 0 if rank else ranks.ports[-1]
            server = stack.enter_context(started(command, port))
        server.wait_until_ready()
        stages = server.get("/admin/pipeline")["stages"]
        assert answer(server, REPO)
    asked_for = (f"GET /{REPO}", "GET /api/models")
    repeated = [path for path, number in hub.requests.items() if number > 1]
    assert not [path for path in repeated if path.startswith(asked_for)]
    weights = sum(stage["bytes_fetched"] - stage["bytes_from_neighbours"] for stage in stages)
    assert weights == hub.data_bytes(header_sizes(folder))
    needed = [path.stat().st_size for path in folder.iterdir() if is_offered(path.name)]
    # The head uses the embedding. A model of this size takes one request for each rank, so the
    # first and the last rank may both have asked for it before one of them has it.
    embedding = read_checkpoint(folder).tensors["model.embed_tokens.weight"].num_bytes
    assert hub.num_bytes <= 1.01 * sum(needed) + embedding
