"""Adapters of a real two-rank cluster: mixed, swapped under load, refused; each rank has its own
folder, as on two hosts."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx_lm
import pytest

from launcher.process import free_ports
from tests import adapters
from tests.cluster.questions import QUESTIONS
from tests.cluster.servers import TINY_CHAT, Server, alone, serve_flags, started

pytestmark = pytest.mark.long

NAMES = ["a", "b", "c"]
ALL = [f"self_attn.{x}_proj" for x in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "a": {"keys": ALL, "rank": 8, "size": 0.2},
    "b": {"rank": 4, "num_layers": 5, "size": 0.6},
    "c": {"dora": True, "rank": 2, "keys": ALL, "size": 0.3},
}
NUM_TOKENS = 24
Answer = Callable[[str, str], str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The working directory of each rank, with the adapters below it."""
    home = tmp_path_factory.mktemp("hosts")
    for seed, name in enumerate(NAMES):
        model, _ = mlx_lm.load(str(TINY_CHAT))
        adapters.save_adapter(home / "0" / "lora" / name, model, seed, **SETTINGS[name])
    adapters.as_peft(home / "0" / "lora" / "a", home / "0" / "lora" / "peft")
    shutil.copytree(home / "0", home / "1")
    return [home / "0", home / "1"]


@pytest.fixture(scope="module")
def answer(folders: list[Path]) -> Answer:
    """What mlx_lm says with one adapter on the whole model, greedy."""
    known: dict[tuple[str, str], str] = {}
    loaded = {
        name: mlx_lm.load(str(TINY_CHAT), adapter_path=str(folders[0] / "lora" / name))
        for name in NAMES
    }
    loaded["tiny-chat"] = mlx_lm.load(str(TINY_CHAT))

    def answer(name: str, question: str) -> str:
        if (name, question) not in known:
            model, tokenizer = loaded[name]
            messages = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            steps = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=NUM_TOKENS)
            tokens = [step.token for step in steps]
            known[name, question] = tokenizer.decode(tokens, skip_special_tokens=True)
        return known[name, question]

    return answer


@pytest.fixture
def cluster(folders: list[Path], tmp_path: Path) -> Iterator[Server]:
    hostfile, ports = tmp_path / "hosts.json", free_ports(4)
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:2]]))

    def command(rank: int) -> list[str]:
        variables = [f"MLX_RANK={rank}", f"MLX_HOSTFILE={hostfile}"]
        control = f"BRIGADE_CONTROL=127.0.0.1:{ports[2]}"
        flags = serve_flags(ports[3], TINY_CHAT, "--adapter-root", "lora", "--lora", "first=lora/b")
        return ["env", "-C", str(folders[rank]), *variables, control, *alone(flags)]

    with started(command(1)), started(command(0), ports[3]) as server:
        server.wait_until_ready()
        yield server


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def load(server: Server, name: str, path: str, **more: Any) -> httpx.Response:
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path, **more)


def ask(server: Server, model: str, question: str) -> tuple[str, int]:
    """The answer and the version that gave it."""
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
    reply = post(server, "/v1/chat/completions", **body)
    assert reply.status_code == 200, reply.text
    version = int(reply.headers.get("x-adapter-version", 0))
    return reply.json()["choices"][0]["message"]["content"], version


def held_bytes(server: Server) -> list[int]:
    return [stage["adapter_bytes"] for stage in server.get("/admin/pipeline")["stages"]]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_adapters_of_a_real_cluster(cluster: Server, folders: list[Path], answer: Answer) -> None:
    """One cluster for all of it, because its start takes the most time."""
    check_mixed(cluster, answer)
    check_one_rank_that_cannot_read(cluster, folders, answer)
    check_swaps_under_load(cluster, answer)
    check_memory_is_freed(cluster)


def check_mixed(server: Server, answer: Answer) -> None:
    assert ask(server, "first", QUESTIONS[0]) == (answer("b", QUESTIONS[0]), 1)
    for name in ("a", "c", "peft"):
        assert (
            load(server, name, name).text == f"Success: LoRA adapter '{name}' added successfully."
        )
    models = ["tiny-chat", "first", "a", "c", "peft"]
    same = {"first": "b", "peft": "a"}
    jobs = [(models[n % 5], QUESTIONS[n % 4]) for n in range(20)]
    with ThreadPoolExecutor(len(jobs)) as threads:
        answers = list(threads.map(lambda job: ask(server, *job), jobs))
    for (model, question), (text, _) in zip(jobs, answers, strict=True):
        assert text == answer(same.get(model, model), question)
    for question in QUESTIONS[:4]:
        texts = {answer(name, question) for name in ("tiny-chat", *NAMES)}
        assert len(texts) == 4, "adapters that say nothing"
    listed = {adapter["name"]: adapter for adapter in server.get("/v1/lora_adapters")["data"]}
    assert listed["a"]["rank"] == 8
    assert min(listed["a"]["bytes"]) > 0
    assert [model["id"] for model in server.get("/v1/models")["data"]] == models
    assert (
        'brigade_adapter_requests_total{adapter="a"} 4.0' in httpx.get(server.url + "/metrics").text
    )


def check_one_rank_that_cannot_read(server: Server, folders: list[Path], answer: Answer) -> None:
    before = server.get("/v1/lora_adapters")["data"]
    spare, target = folders[0] / "lora" / "spare", folders[1] / "lora" / "spare"
    shutil.copytree(folders[0] / "lora" / "a", spare)
    reply = load(server, "c", "spare", load_inplace=True)
    assert reply.status_code == 404
    assert "Rank 1: No adapter found for spare" in reply.json()["error"]["message"]
    shutil.copytree(folders[0] / "lora" / "c", target)
    reply = load(server, "c", "spare", load_inplace=True)
    assert reply.status_code == 400
    assert "different files" in reply.json()["error"]["message"]
    tensors, config = adapters.read(spare)
    for name in list(tensors):
        tensors[name.replace("layers.7.", "layers.8.")] = tensors.pop(name)
    for folder in (spare, target):
        shutil.rmtree(folder)
        adapters.write(folder, "adapters.safetensors", tensors, config)
    reply = load(server, "c", "spare", load_inplace=True)
    assert reply.status_code == 400
    assert "layers.7" in reply.json()["error"]["message"]
    for path, status in (("../lora/../../0", 403), ("/etc", 403), ("nowhere", 404)):
        assert load(server, "c", path, load_inplace=True).status_code == status
    assert server.get("/v1/lora_adapters")["data"] == before
    assert ask(server, "c", QUESTIONS[1])[0] == answer("c", QUESTIONS[1])


def check_swaps_under_load(server: Server, answer: Answer) -> None:
    """Each answer is one version's from its first token to its last, and none fails."""
    folder_of = {
        adapter["version"]: "a"
        for adapter in server.get("/v1/lora_adapters")["data"]
        if adapter["name"] == "a"
    }
    seen: list[tuple[str, str, int]] = []
    done = threading.Event()

    def keep_asking(number: int) -> None:
        while not done.is_set():
            for question in QUESTIONS[number % 3 :: 3][:3]:
                seen.append((question, *ask(server, "a", question)))

    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(keep_asking, number) for number in range(8)]
        try:
            for number in range(12):
                folder = "ba"[number % 2]
                reply = load(server, "a", folder, load_inplace=True)
                assert reply.status_code == 200, reply.text
                listed = server.get("/v1/lora_adapters")["data"]
                (version,) = (a["version"] for a in listed if a["name"] == "a")
                folder_of[version] = folder
                time.sleep(0.25)
        finally:
            done.set()
        for one in asking:
            one.result()
    assert len({version for *_, version in seen}) > 6, "hardly any version was used"
    for question, text, version in seen:
        assert text == answer(folder_of[version], question), f"version {version}"


def check_memory_is_freed(server: Server) -> None:
    wait_until(lambda: server.get("/admin/pipeline")["num_running"] == 0)
    for name in ("first", "a", "c", "peft"):
        assert post(server, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
    wait_until(lambda: held_bytes(server) == [0, 0])
    assert post(server, "/v1/unload_lora_adapter", lora_name="a").status_code == 404


def test_an_adapter_that_cannot_be_read_ends_the_start(folders: list[Path]) -> None:
    flags = serve_flags(free_ports(1)[0], TINY_CHAT, "--lora", f"x={folders[0]}/lora/nothing")
    with started(alone(flags)) as server:
        assert server.process.wait(60) == 2
        server.wait_for_log("No adapter found")
