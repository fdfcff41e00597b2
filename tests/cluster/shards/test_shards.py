"""Clusters whose stages have several shards: greedy answers and scores are those of mlx_lm on the
whole model, also after a shard was lost."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import adapters
from tests.cluster.questions import QUESTIONS
from tests.cluster.servers import (
    READY_SECONDS,
    ROOT,
    TINY_CHAT,
    Server,
    alone,
    brigade_launch,
    mlx_launch,
    quick,
    running,
    serve_flags,
    started,
)
from tests.cluster.test_parity import ask
from tests.lora.test_table import ALL
from tests.ports import free_ports

TWO_SHARDS = ("--tensor-parallel-size", "2")
MAX_DIFFERENCE = 1e-4
WIDE_VOCABULARY = 100_000


@contextmanager
def running_wide(
    num_ranks: int,
    folder: Path,
    *flags: str,
) -> Iterator[Server]:
    """Starts a cluster with a model whose head is worth sharing: tiny-chat, with many more tokens
    in its vocabulary."""
    model = folder / TINY_CHAT.name
    shutil.copytree(TINY_CHAT, model)
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = WIDE_VOCABULARY
    (model / "config.json").write_text(json.dumps(config))
    weights = load_file(TINY_CHAT / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    # The logits of the new tokens are 0, which is less than that of any likely token.
    new_rows = np.zeros((WIDE_VOCABULARY - len(embedding), embedding.shape[1]), embedding.dtype)
    weights["model.embed_tokens.weight"] = np.concatenate([embedding, new_rows])
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    port = free_ports(1)[0]
    command = brigade_launch(num_ranks, serve_flags(port, model, *flags))
    with started(command, port) as server:
        server.wait_until_ready()
        yield server


def check_scores(
    server: Server,
    max_tokens: int,
    folder: Path = TINY_CHAT,
    name: str | None = None,
    adapter: Path | None = None,
) -> None:
    """Compares the tokens of a greedy answer, and the log-probabilities of its prompt and its
    tokens, with those of mlx_lm on the whole model in a folder. With an adapter, name is its name
    and adapter its folder."""
    reply: Any = server.client().completions.create(
        model=name or folder.name,
        prompt="the cat sat on the mat " * 4,
        temperature=0,
        max_tokens=max_tokens,
        logprobs=1,
        echo=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    (choice,) = reply.choices
    ids = choice.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
    model, _ = mlx_lm.load(str(folder), adapter_path=str(adapter) if adapter else None)
    (logits,) = model(mx.array([ids])).astype(mx.float32)
    exact = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    logprobs = choice.logprobs.token_logprobs[1:]
    expected = [exact[position, id].item() for position, id in enumerate(ids[1:])]
    assert len(logprobs) == len(ids) - 1
    assert logprobs == pytest.approx(expected, abs=MAX_DIFFERENCE)
    best = mx.argmax(logits, axis=-1).tolist()
    assert ids[-max_tokens:] == best[-max_tokens - 1 : -1]


def test_answers_of_two_stages_of_shards_equal_those_of_mlx_lm(
    tmp_path: Path,
    mlx_lm_answer: Callable[[str], str],
) -> None:
    """Those of the last stage share the head, unless the machine is too busy when they start."""
    with running_wide(4, tmp_path, *TWO_SHARDS) as server:
        found = server.get("/admin/pipeline")
        places = [(stage["stage"], stage["shard"]) for stage in found["stages"]]
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
        first, second, third, last = (stage["layers"] for stage in found["stages"])
        assert first == second != third == last
        assert ask(server, QUESTIONS[4]) == mlx_lm_answer(QUESTIONS[4])
        check_scores(server, 4, tmp_path / TINY_CHAT.name)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_shards"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.uses("drafts")
def test_answers_of_shards_that_share_the_head_equal_those_of_mlx_lm(
    num_ranks: int,
    num_shards: int,
    tmp_path: Path,
    mlx_lm_answer: Callable[..., str],
) -> None:
    """One answer, scores, guesses that are verified, and more requests at a time than share it."""
    text = "red green blue red green blue"
    with running_wide(num_ranks, tmp_path, "--tensor-parallel-size", str(num_shards)) as server:
        first, *others = server.get("/admin/pipeline")["stages"]
        assert first["shared_head_tokens"] > 0, first
        assert not any(stage["shared_head_tokens"] for stage in others)
        before = first["all_reduce"]["num_bytes"]
        assert ask(server, QUESTIONS[4]) == mlx_lm_answer(QUESTIONS[4])
        after = server.get("/admin/pipeline")["stages"][0]["all_reduce"]["num_bytes"]
        part_bytes = 4 * WIDE_VOCABULARY // num_shards
        assert after - before > len(mlx_lm_answer(QUESTIONS[4]).split()) * part_bytes
        check_scores(server, 8, tmp_path / TINY_CHAT.name)
        reply = server.client().chat.completions.create(
            model="tiny-chat",
            messages=[{"role": "user", "content": f"Reverse the words: {text}"}],
            temperature=0,
            max_tokens=24,
            extra_body={"prediction": {"type": "content", "content": text}},
        )
        drafts = server.get("/admin/pipeline")["drafts"]
        with ThreadPoolExecutor(len(QUESTIONS)) as threads:
            answers = list(threads.map(lambda question: ask(server, question), QUESTIONS))
    assert reply.choices[0].message.content == mlx_lm_answer(f"Reverse the words: {text}", 24)
    assert sum(each["drafted"] for each in drafts.values()) > 0, drafts
    assert answers == [mlx_lm_answer(question) for question in QUESTIONS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "num_ranks", "flags"),
    [
        (brigade_launch, 2, ()),
        (brigade_launch, 4, ("--split", "3,5")),
        (mlx_launch, 2, (quick(prefill_chunk=16),)),
        (brigade_launch, 2, ("--kv-bits", "8")),
    ],
)
def test_many_answers_at_once_from_shards_equal_those_of_mlx_lm(
    launch: Any,
    num_ranks: int,
    flags: tuple[str, ...],
    mlx_lm_answer: Callable[[str], str],
) -> None:
    with running(num_ranks, *TWO_SHARDS, *flags, launch=launch) as server:
        with ThreadPoolExecutor(len(QUESTIONS)) as threads:
            answers = list(threads.map(lambda question: ask(server, question), QUESTIONS))
        long_question = " ".join(QUESTIONS)  # Prefixes of short ones are not kept.
        first, again = ask(server, long_question), ask(server, long_question)
        if "--kv-bits" not in flags:
            check_scores(server, max_tokens=16)
        pipeline = server.get("/admin/pipeline")
    expected = [mlx_lm_answer(question) for question in QUESTIONS]
    if "--kv-bits" in flags:  # Keys and values of eight bits may change a word.
        same = [one == other for one, other in zip(answers, expected, strict=True)]
        assert sum(same) > len(same) // 2
        return
    assert answers == expected
    assert first == again == mlx_lm_answer(long_question)
    assert pipeline["prefix_cache"]["num_reuses"] > 0


def mlx_lm_with_adapter(folder: Path | None, question: str) -> str:
    """The greedy answer of mlx_lm, with an adapter on the whole model."""
    model, tokenizer = mlx_lm.load(str(TINY_CHAT), adapter_path=str(folder) if folder else None)
    messages = [{"role": "user", "content": question}]
    prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    steps = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=24)
    return tokenizer.decode([step.token for step in steps], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.uses("adapters")
def test_answers_of_shards_with_several_adapters_equal_those_of_mlx_lm(tmp_path: Path) -> None:
    settings = {"a": {"keys": ALL, "rank": 8}, "b": {"rank": 4, "num_layers": 5, "size": 0.6}}
    for seed, (name, options) in enumerate(settings.items()):
        model, _ = mlx_lm.load(str(TINY_CHAT))
        adapters.save_adapter(tmp_path / name, model, seed, **options)
    question = QUESTIONS[7]

    def load(server: Server, name: str, path: str, **more: Any) -> None:
        body = {"lora_name": name, "lora_path": path, **more}
        url = f"{server.url}/v1/load_lora_adapter"
        httpx2.post(url, json=body, timeout=60).raise_for_status()

    def answer(server: Server, name: str) -> str:
        reply = server.client().chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=24,
        )
        return reply.choices[0].message.content or ""

    with running(4, *TWO_SHARDS, "--adapter-root", str(tmp_path)) as server:
        for name in settings:
            load(server, name, name)
        names = ["tiny-chat", "a", "b"]
        with ThreadPoolExecutor(len(names)) as threads:
            answers = list(threads.map(lambda name: answer(server, name), names))
        load(server, "a", "b", load_inplace=True)
        swapped = answer(server, "a")
    folders = [None, tmp_path / "a", tmp_path / "b"]
    assert answers == [mlx_lm_with_adapter(folder, question) for folder in folders]
    assert swapped == answers[2]
    assert len(set(answers)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_shards_continue_answers_after_any_engine_is_killed(
    rank: int, mlx_lm_answer: Callable[[str], str]
) -> None:
    questions = [QUESTIONS[7], QUESTIONS[10], QUESTIONS[15]]
    with running(4, *TWO_SHARDS) as server:
        with ThreadPoolExecutor(len(questions)) as threads:
            answers = [threads.submit(ask, server, question) for question in questions]
            server.engines()[rank].kill()
            texts = [answer.result() for answer in answers]
        assert server.get("/admin/pipeline")["num_restarts"] == 1
    assert texts == [mlx_lm_answer(question) for question in questions]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_forty_kills_among_shards_lose_and_change_no_answer(
    mlx_lm_answer: Callable[[str], str],
) -> None:
    expected = {question: mlx_lm_answer(question) for question in QUESTIONS}
    chance = Random(0)
    with running(4, *TWO_SHARDS, quick(max_restarts=1000)) as server:
        for number in range(40):
            questions = chance.sample(QUESTIONS, 4)
            with ThreadPoolExecutor(len(questions)) as threads:
                answers = [threads.submit(ask, server, question) for question in questions]
                time.sleep(chance.uniform(0.0, 0.5))
                server.engines()[number % 4].kill()
                texts = [answer.result() for answer in answers]
            assert texts == [expected[question] for question in questions], f"kill {number}"
            wait_for_restart(server, number + 1)


def wait_for_restart(server: Server, num_restarts: int) -> None:
    """Waits until the engines have restarted this many times, and work again."""
    deadline = time.monotonic() + READY_SECONDS
    while server.get("/admin/pipeline")["num_restarts"] < num_restarts:
        assert time.monotonic() < deadline, server.text
        time.sleep(0.1)
    server.wait_until_ready()
    assert server.get("/admin/pipeline")["num_restarts"] == num_restarts


@pytest.mark.slow
@pytest.mark.uses("drafts")
def test_shards_verify_drafts_as_a_single_rank_does() -> None:
    text = "red green blue red green blue one two three one two three"
    body: dict[str, Any] = {
        "model": "tiny-chat",
        "messages": [{"role": "user", "content": f"Say this twice: {text}"}],
        "temperature": 0,
        "max_tokens": 64,
        "extra_body": {"prediction": {"type": "content", "content": text}},
    }

    def answer(server: Server) -> str:
        reply = server.client().chat.completions.create(**body)
        return reply.choices[0].message.content or ""

    with running(2, *TWO_SHARDS) as server:
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(lambda _: answer(server), range(3)))
        answers.append(answer(server))
        drafts = server.get("/admin/pipeline")["drafts"]
    with running(1, "--draft-model", "none", launch=alone) as server:
        expected = answer(server)
    assert answers == [expected] * 4
    assert sum(each["drafted"] for each in drafts.values()) > 0, drafts


def test_brigade_serve_refuses_ranks_that_cannot_form_stages_of_two_shards() -> None:
    command = brigade_launch(3, ["--model", str(TINY_CHAT), *TWO_SHARDS])
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert "does not divide the number of ranks" in line
