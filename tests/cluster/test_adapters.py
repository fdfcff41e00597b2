"""Adapters of real clusters of one to four ranks: mixed, swapped under load, evicted, refused;
each rank has its own folder, as on hosts of their own."""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import mlx_lm
import pytest

from tests import adapters
from tests.cluster.questions import QUESTIONS
from tests.cluster.servers import TINY_CHAT, Server, alone, serve_flags, started
from tests.ports import free_ports

pytestmark = [pytest.mark.long, pytest.mark.uses("adapters")]

NAMES = ["a", "b", "c"]
ALL = [f"self_attn.{x}_proj" for x in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "a": {"keys": ALL, "rank": 8, "size": 0.2},
    "b": {"rank": 4, "num_layers": 5, "size": 0.6},
    "c": {"dora": True, "rank": 2, "keys": ALL, "size": 0.3},
}
NUM_TOKENS = 16
NUM_STREAMS = 8
Tensors, Config = dict[str, mx.array], dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The working directory of each rank, with the adapters below it."""
    home = tmp_path_factory.mktemp("hosts")
    for seed, name in enumerate(NAMES):
        model, _ = mlx_lm.load(str(TINY_CHAT))
        adapters.save_adapter(home / "0" / "lora" / name, model, seed, **SETTINGS[name])
    adapters.as_peft(home / "0" / "lora" / "a", home / "0" / "lora" / "peft")
    for rank in "123":
        shutil.copytree(home / "0", home / rank)
    return [home / rank for rank in "0123"]


class Whole:
    """mlx_lm with one adapter on the whole model, greedy."""

    def __init__(self, folder: Path) -> None:
        self._known: dict[tuple[str, str], str] = {}
        self._loaded = {
            name: mlx_lm.load(str(TINY_CHAT), adapter_path=str(folder / name)) for name in NAMES
        }
        self._loaded["tiny-chat"] = mlx_lm.load(str(TINY_CHAT))

    def prompt(self, name: str, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        tokenizer = self._loaded[name][1]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def __call__(self, name: str, question: str) -> str:
        if (name, question) not in self._known:
            model, tokenizer = self._loaded[name]
            prompt = self.prompt(name, question)
            steps = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=NUM_TOKENS)
            tokens = [step.token for step in steps]
            self._known[name, question] = tokenizer.decode(tokens, skip_special_tokens=True)
        return self._known[name, question]

    def logprobs(self, name: str, tokens: list[int]) -> mx.array:
        """(tokens, vocabulary)"""
        logits = self._loaded[name][0](mx.array([tokens]))[0]
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def answer(folders: list[Path]) -> Whole:
    return Whole(folders[0] / "lora")


@contextmanager
def running(folders: list[Path], num_ranks: int, *more: str) -> Iterator[Server]:
    """Rank by rank, each in its folder."""
    *ring, control, port = free_ports(num_ranks + 2)
    hostfile = folders[0] / f"hosts-{port}.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ring]))
    flags = serve_flags(port, TINY_CHAT, "--adapter-root", "lora", *more)

    def command(rank: int) -> list[str]:
        variables = [f"MLX_RANK={rank}", f"MLX_HOSTFILE={hostfile}"]
        variables.append(f"BRIGADE_CONTROL=127.0.0.1:{control}")
        return ["env", "-C", str(folders[rank]), *variables, *alone(flags)]

    with ExitStack() as stack:
        for rank in range(num_ranks - 1, 0, -1):
            stack.enter_context(started(command(rank)))
        server = stack.enter_context(started(command(0), port))
        server.wait_until_ready()
        yield server


def post(server: Server, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body, timeout=60)


def load(server: Server, name: str, path: str, **more: Any) -> httpx2.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return post(server, "/v1/load_lora_adapter", **body)


def ask(server: Server, model: str, question: str) -> tuple[str, int]:
    """The answer and the version that gave it."""
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
    reply = post(server, "/v1/chat/completions", **body)
    assert reply.status_code == 200, reply.text
    version = int(reply.headers.get("x-adapter-version", 0))
    return reply.json()["choices"][0]["message"]["content"], version


def stream(server: Server, model: str, question: str) -> tuple[str, int]:
    """The same as a stream."""
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
    url, text = server.url + "/v1/chat/completions", ""
    with httpx2.stream("POST", url, json={**body, "stream": True}, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for line in lines:
        (choice,) = json.loads(line)["choices"]
        text += choice["delta"].get("content") or ""
    return text, int(reply.headers["x-adapter-version"])


def held_bytes(server: Server) -> list[int]:
    return [stage["adapter_bytes"] for stage in server.get("/admin/pipeline")["stages"]]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_answers_with_adapters_stay_right_while_adapters_are_swapped_and_unloaded(
    folders: list[Path], answer: Whole, num_ranks: int
) -> None:
    """One cluster runs all checks, because its start takes the most time."""
    with running(folders, num_ranks, "--lora-modules", "first=lora/b") as server:
        check_mixed(server, answer)
        check_logits(server, answer)
        check_one_rank_that_cannot_read(server, folders, answer)
        check_swaps_under_load(server, answer, num_swaps=4, seconds=0.25)
        check_memory_is_freed(server)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_answers_and_logits_with_adapters_equal_those_of_mlx_lm_on_any_number_of_ranks(
    folders: list[Path], answer: Whole, num_ranks: int
) -> None:
    with running(folders, num_ranks, "--lora-modules", "first=lora/b") as server:
        check_mixed(server, answer)
        check_logits(server, answer)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_answers_keep_their_adapter_version_during_swaps_a_second_apart(
    folders: list[Path], answer: Whole, num_ranks: int
) -> None:
    with running(folders, num_ranks) as server:
        assert load(server, "a", "a").status_code == 200
        check_swaps_under_load(server, answer, num_swaps=20, seconds=1.0)


def check_mixed(server: Server, answer: Whole) -> None:
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
        'brigade_adapter_requests_total{adapter="a"} 4.0'
        in httpx2.get(server.url + "/metrics").text
    )


def check_logits(server: Server, answer: Whole) -> None:
    """Log-probabilities of a prompt and of what comes after it, by each adapter."""
    for model, name in (("tiny-chat", "tiny-chat"), ("a", "a"), ("first", "b"), ("c", "c")):
        prompt = answer.prompt(name, QUESTIONS[2])
        scored = scores(server, model, prompt)
        expected = answer.logprobs(name, scored["tokens"])
        assert len(scored["tokens"]) > len(prompt)
        for index, top in enumerate(scored["top"][1:]):
            largest = mx.abs(expected[index]).max().item()
            for token, logprob in top.items():
                assert abs(logprob - expected[index, token].item()) < 1e-5 * largest


def scores(server: Server, model: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "echo": True, "max_tokens": 2, "temperature": 0}
    more = {"logprobs": 20, "return_tokens_as_token_ids": True}
    logprobs = post(server, "/v1/completions", **body, **more).json()["choices"][0]["logprobs"]
    number = len("token_id:")
    tops = [
        {int(key[number:]): p for key, p in (top or {}).items()} for top in logprobs["top_logprobs"]
    ]
    return {"tokens": [int(token[number:]) for token in logprobs["tokens"]], "top": tops}


def check_one_rank_that_cannot_read(server: Server, folders: list[Path], answer: Whole) -> None:
    before = server.get("/v1/lora_adapters")["data"]
    spare, *others = (folder / "lora" / "spare" for folder in folders)
    shutil.copytree(folders[0] / "lora" / "a", spare)
    reply = load(server, "c", "spare", load_inplace=True)
    assert reply.status_code == 404
    assert "Rank 1: No adapter found for spare" in reply.json()["error"]["message"]
    for folder in others:
        shutil.copytree(folders[0] / "lora" / "c", folder)
    reply = load(server, "c", "spare", load_inplace=True)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "ranks_differ"
    tensors, config = adapters.read(spare)
    for name in list(tensors):
        tensors[name.replace("layers.7.", "layers.8.")] = tensors.pop(name)
    for folder in (spare, *others):
        shutil.rmtree(folder)
        adapters.write(folder, "adapters.safetensors", tensors, config)
    reply = load(server, "c", "spare", load_inplace=True)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "other_model"
    for path, status in (("../lora/../../0", 403), ("/etc", 403), ("nowhere", 404)):
        assert load(server, "c", path, load_inplace=True).status_code == status
    for folder in (spare, *others):
        shutil.rmtree(folder)
    assert server.get("/v1/lora_adapters")["data"] == before
    assert ask(server, "c", QUESTIONS[1])[0] == answer("c", QUESTIONS[1])


def check_swaps_under_load(server: Server, answer: Whole, num_swaps: int, seconds: float) -> None:
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
                seen.append((question, *stream(server, "a", question)))

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        asking = [threads.submit(keep_asking, number) for number in range(NUM_STREAMS)]
        try:
            for number in range(num_swaps):
                folder = "ba"[number % 2]
                reply = load(server, "a", folder, load_inplace=True)
                assert reply.status_code == 200, reply.text
                listed = server.get("/v1/lora_adapters")["data"]
                (version,) = (a["version"] for a in listed if a["name"] == "a")
                folder_of[version] = folder
                time.sleep(seconds)
                # On a busy machine, an answer may take longer than several swaps.
                wait_until(lambda v=version: v in {seen_version for *_, seen_version in seen})
        finally:
            done.set()
        for one in asking:
            one.result()
    assert len({version for *_, version in seen}) > num_swaps / 2, "hardly any version was used"
    for question, text, version in seen:
        assert text == answer(folder_of[version], question), f"version {version}"


def check_memory_is_freed(server: Server) -> None:
    wait_until(lambda: server.get("/admin/pipeline")["num_running"] == 0)
    for name in ("first", "a", "c", "peft"):
        assert post(server, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
    wait_until(lambda: not any(held_bytes(server)))
    assert post(server, "/v1/unload_lora_adapter", lora_name="a").status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_least_recently_used_adapter_is_evicted_and_read_again_when_needed(
    folders: list[Path], answer: Whole, num_ranks: int
) -> None:
    """The rank with the most layers has room for one adapter and not for two."""
    size = (folders[0] / "lora" / "a" / "adapters.safetensors").stat().st_size
    memory = f"{size * {2: 8, 3: 6}[num_ranks] // 10_000}KB"
    with running(folders, num_ranks, "--adapter-memory", memory) as server:

        def versions() -> dict[str, int | None]:
            return {a["name"]: a["version"] for a in server.get("/v1/lora_adapters")["data"]}

        question = QUESTIONS[3]
        assert load(server, "a", "a").status_code == 200
        assert ask(server, "a", question) == (answer("a", question), 1)
        assert load(server, "peft", "peft").status_code == 200
        assert versions() == {"a": None, "peft": 2}
        for number in range(3, 7):
            name = "a" if number % 2 else "peft"
            assert ask(server, name, question) == (answer("a", question), number), "read again"
            assert [name for name, version in versions().items() if version] == [name]
        pinned = post(server, "/admin/adapters", lora_name="peft", pin=True)
        assert pinned.status_code == 200
        assert load(server, "c", "a").status_code == 429
        refused = post(server, "/v1/completions", model="a", prompt="x", max_tokens=1)
        assert refused.status_code == 429
        assert ask(server, "peft", question)[0] == answer("a", question)


def spoil(change: Callable[[Tensors, Config], object]) -> Callable[[Path], None]:
    def change_files(folder: Path) -> None:
        tensors, config = adapters.read(folder)
        change(tensors, config)
        adapters.write(folder, "adapters.safetensors", tensors, config)

    return change_files


def instead(name: str) -> Callable[[Path], None]:
    """A file of another kind in the place of the weights."""
    return lambda folder: (folder / "adapters.safetensors").rename(folder / name) and None


def cut(folder: Path) -> None:
    file = folder / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def twice(folder: Path) -> None:
    """One name for two tensors, which JSON allows."""
    file = folder / "adapters.safetensors"
    file.write_bytes(file.read_bytes().replace(b"layers.1.mlp.up_proj", b"layers.0.mlp.up_proj"))


Q = "model.layers.1.self_attn.q_proj"
BAD_FILES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "missing": (shutil.rmtree, 404, "adapter_not_found"),
    "pickle": (instead("adapter_model.bin"), 400, "pickles"),
    "npz": (instead("adapters.npz"), 404, "adapter_not_found"),
    "truncated": (cut, 400, "cut_short"),
    "wrong base": (
        spoil(lambda t, _: t.update({f"{Q}.lora_a": mx.zeros((64, 8))})),
        400,
        "other_model",
    ),
    "rank 4096": (
        spoil(lambda _, c: c["lora_parameters"].update(rank=4096)),
        400,
        "out_of_range",
    ),
    "nan": (
        spoil(lambda t, _: t.update({f"{Q}.lora_b": mx.full((8, 128), math.nan)})),
        400,
        "not_finite",
    ),
    "unknown target": (
        spoil(lambda t, _: t.update({f"{Q[:-1]}x.lora_{p}": t[f"{Q}.lora_{p}"] for p in "ab"})),
        400,
        "other_model",
    ),
    "twice": (twice, 400, "wrong_format"),
    "half the layers": (
        spoil(lambda t, _: [t.pop(n) for n in list(t) if int(n.split(".")[2]) < 4]),
        400,
        "missing_tensor",
    ),
}
BAD_BODIES: list[tuple[dict[str, Any], int, str]] = [
    ({"lora_path": "../../0/lora/a"}, 403, "not_allowed"),
    ({"lora_path": "/etc"}, 403, "not_allowed"),
    ({"lora_path": "org/name"}, 404, "adapter_not_found"),
    ({"lora_name": "tiny-chat"}, 400, "adapter_name"),
    ({"lora_path": "../other"}, 403, "not_allowed"),
    ({"lora_name": "../a"}, 400, "adapter_name"),
    ({"lora_name": "/a"}, 400, "adapter_name"),
    ({"lora_name": "a", "load_inplace": False}, 400, "name_taken"),
    ({"base_model_name": "llama"}, 400, "invalid_value"),
]


def test_adapters_that_are_refused_change_no_answer_and_no_loaded_adapter(
    folders: list[Path], answer: Whole
) -> None:
    # How many drafts share a step depends on times, and rounds log-probabilities differently.
    with running(folders, 2, "--draft-model", "none", "--lora-modules", "a=lora/a") as server:
        prompt = answer.prompt("a", QUESTIONS[0])

        def seen() -> list[Any]:
            """To the last bit."""
            listed = server.get("/v1/lora_adapters")["data"]
            return [listed, *(scores(server, name, prompt) for name in ("tiny-chat", "a"))]

        def check(body: dict[str, Any], status: int, code: str) -> None:
            reply = load(server, "a", "bad", **{"load_inplace": True, **body})
            assert reply.status_code == status, reply.text
            assert reply.json()["error"]["code"] == code, reply.text
            assert seen() == before, body
            # What a rank had read before another refused goes with the next step, and ranks tell
            # what they hold four times a second.
            wait_until(lambda: held_bytes(server) == used)

        before = seen()
        assert before[1] != before[2], "the adapter says nothing"
        ((adapter,), *_) = before
        used = [4 * num_bytes for num_bytes in adapter["bytes"]]  # tables of four slots
        wait_until(lambda: held_bytes(server) == used)
        for change, status, code in BAD_FILES.values():
            for folder in folders[:2]:
                shutil.rmtree(folder / "lora" / "bad", ignore_errors=True)
                shutil.copytree(folder / "lora" / "a", folder / "lora" / "bad")
                change(folder / "lora" / "bad")
            check({}, status, code)
        for body, status, code in BAD_BODIES:
            check(body, status, code)
        assert load(server, "a", "b", load_inplace=True).status_code == 200
        assert ask(server, "a", QUESTIONS[0])[0] == answer("b", QUESTIONS[0])


def test_an_adapter_that_cannot_be_read_ends_the_start(folders: list[Path]) -> None:
    empty = folders[0] / "lora" / "nothing"
    empty.mkdir()
    flags = serve_flags(free_ports(1)[0], TINY_CHAT, "--lora-modules", f"x={empty}")
    with started(alone(flags)) as server:
        assert server.process.wait(60) == 2
        server.wait_for_log("--lora-modules x: No adapter found")
