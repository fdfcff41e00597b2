"""Real ranks give the same replies with guesses as without: for every parameter, alone, together
and while engines are killed."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest

from tests import heads
from tests.cluster.questions import QUESTIONS
from tests.cluster.servers import (
    BIN,
    ROOT,
    TINY_CHAT,
    Server,
    alone,
    brigade_launch,
    quick,
    running,
    serve_flags,
    started,
)
from tests.ports import free_ports

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.uses("drafts")]

ADAPTERS = ROOT / "examples" / "adapters"
FLAGS = ("--lora-modules", f"pirate={ADAPTERS / 'pirate'}", quick(max_restarts=1000))
LIST = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 3, "maxItems": 9}
OBJECT = {"type": "object", "properties": {"words": LIST}, "required": ["words"]}
NUM_DRAFT_LAYERS = 2
LAYOUTS = [(2, ()), (2, ("--tensor-parallel-size", "2")), (4, ("--tensor-parallel-size", "2"))]
INSIDE = str(Path(__file__).parent / "shards" / "inside")
TEXT = "red green blue red green blue one two three one two three"
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0.6, "logprobs": True, "prompt_logprobs": 1},
    {"temperature": 0.5, "bad_words": ["red", "the"]},
    {"temperature": 0.5, "logit_bias": {"40": 3, "50": -10}},
    {"temperature": 0.9, "min_tokens": 18},
    {"temperature": 0.3, "stop": ["blue", "three o", "a"]},
    {"temperature": 0.3, "stop": ["e r"], "include_stop_str_in_output": True},
    {"temperature": 0, "response_format": {"type": "json_object"}},
    {"temperature": 0.7, "structured_outputs": {"json": OBJECT}},
    {"temperature": 0.7, "structured_outputs": {"regex": "(red |green |blue ){4,9}"}},
    {"temperature": 0.4, "n": 3},
    {"temperature": 0, "model": "pirate"},
    {"temperature": 0.7, "model": "pirate", "prediction": {"type": "content", "content": TEXT}},
    {"temperature": 0, "prediction": {"type": "content", "content": TEXT}},
    {"temperature": 0.2, "max_tokens": 5},
    {"temperature": 0.2, "ignore_eos": True, "max_tokens": 40},
]


@pytest.fixture(autouse=True)
def _cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a few steps with drafts may be so slow that drafts seem not to pay."""
    monkeypatch.setenv("PYTHONPATH", INSIDE)


def bodies() -> Iterator[dict[str, Any]]:
    questions = itertools.cycle([*QUESTIONS, f"Say this twice: {TEXT}", f"Repeat: {TEXT}"])
    for seed, fields in enumerate(FIELDS):
        message = {"role": "user", "content": next(questions)}
        body = {"model": "tiny-chat", "messages": [message], "max_tokens": 20, "seed": seed}
        yield body | fields


def ask(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=100)
    assert reply.status_code == 200, reply.text
    return reply.json()


class Near(float):
    """A number that equals all numbers within 0.002 of it: batches differ in their rounding."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 0.002


def comparable(reply: dict[str, Any]) -> Any:
    """The choices and counts of a reply, without what is new in each."""
    text = json.dumps(reply["choices"])
    return json.loads(text, parse_float=Near), reply["usage"]["completion_tokens"]


def accepted(reply: dict[str, Any]) -> int:
    number: int = reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    return number


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Without guesses."""
    with running(2, "--draft-model", "none", *FLAGS) as server:
        replies = [ask(server, body) for body in bodies()]
    assert sum(map(accepted, replies)) == 0
    return [comparable(reply) for reply in replies]


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, ()),
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(3, (quick(num_groups=1),), marks=pytest.mark.slow),
        pytest.param(4, (), marks=pytest.mark.slow),
    ],
)
def test_replies_with_and_without_drafts_are_the_same(
    expected: list[Any], num_ranks: int, flags: tuple[str, ...]
) -> None:
    with running(num_ranks, *FLAGS, *flags) as server:
        one_by_one = [ask(server, body) for body in bodies()]
        with ThreadPoolExecutor(6) as threads:
            together = list(threads.map(lambda body: ask(server, body), bodies()))
        drafts = server.get("/admin/pipeline")["drafts"]
    assert sum(map(accepted, one_by_one)) > 10, drafts
    assert drafts["prediction"]["drafted"] > 0
    for body, reply, other, wanted in zip(bodies(), one_by_one, together, expected, strict=True):
        assert comparable(reply) == wanted, body
        assert comparable(other) == wanted, body


def save_first_layers(folder: Path) -> Path:
    """Saves the first layers of the embedded model, and its tokenizer."""
    shutil.copytree(TINY_CHAT, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = NUM_DRAFT_LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(TINY_CHAT / "model.safetensors"))
    assert isinstance(weights, dict)
    left_out = [f"layers.{n}." for n in range(NUM_DRAFT_LAYERS, 8)]
    kept = {k: v for k, v in weights.items() if not any(part in k for part in left_out)}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, {"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_first_layers(tmp_path_factory.mktemp("draft") / "draft")


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [(2, ()), pytest.param(4, ("--tensor-parallel-size", "2"), marks=pytest.mark.slow)],
)
def test_replies_with_and_without_a_draft_model_are_the_same(
    expected: list[Any], draft_model: Path, num_ranks: int, flags: tuple[str, ...]
) -> None:
    """Engines are killed as well, and the new ones load it again."""
    with running(num_ranks, *FLAGS, *flags, "--draft-model", str(draft_model)) as server:
        assert re.search(r"draft\s", server.text), "the plan has no column for it"
        for n, (body, wanted) in enumerate(zip(bodies(), expected, strict=True)):
            assert comparable(ask(server, body)) == wanted, body
            if n in (4, 12):
                os.kill(server.engines()[n % num_ranks].pid, signal.SIGKILL)
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(lambda body: ask(server, body), bodies()))
        drafts = server.get("/admin/pipeline")["drafts"]
        metrics = httpx2.get(f"{server.url}/metrics").text
    assert [comparable(reply) for reply in together] == expected
    assert drafts["model"]["drafted"] > 0, drafts
    assert 'brigade_draft_tokens_total{drafter="model"}' in metrics


def test_a_draft_model_with_another_vocabulary_is_refused(draft_model: Path) -> None:
    tokenizer = json.loads((draft_model / "tokenizer.json").read_text())
    first, second, *_ = tokenizer["model"]["vocab"]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other = draft_model.parent / "other"
    shutil.copytree(draft_model, other)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = serve_flags(0, TINY_CHAT, "--draft-model", str(other))
    ended = subprocess.run(alone(flags), capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ended.returncode != 0
    *_, last = ended.stderr.splitlines()
    assert last.startswith(f"brigade serve: --draft-model {other}: only ")
    assert "same tokenizer" in last


@pytest.mark.parametrize("words", [["serve", "--port", "0"], ["plan", "-n", "2"]])
def test_a_missing_folder_of_a_draft_model_is_named_before_an_engine_starts(
    words: list[str],
) -> None:
    words = [str(BIN / "brigade"), *words, "--model", str(TINY_CHAT), "--draft-model", "/nowhere"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ended.returncode == 3
    assert ended.stderr.startswith(f"brigade {words[1]}: --draft-model /nowhere is not a folder")


@contextmanager
def serving(model: Path, num_ranks: int, *more: str) -> Iterator[Server]:
    port = free_ports(1)[0]
    flags = serve_flags(port, model, *more)
    with started(brigade_launch(num_ranks, flags), port) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "flags"), LAYOUTS)
def test_replies_with_and_without_a_prediction_head_are_the_same(
    expected: list[Any], tmp_path: Path, num_ranks: int, flags: tuple[str, ...]
) -> None:
    """The embedded model with a random head. Engines are killed as well, and the new ones load it
    again."""
    folder = heads.chat_model(tmp_path / "tiny-chat", TINY_CHAT)
    with serving(folder, num_ranks, "--draft-model", "mtp", *FLAGS, *flags) as server:
        for n, (body, wanted) in enumerate(zip(bodies(), expected, strict=True)):
            assert comparable(ask(server, body)) == wanted, body
            if n in (4, 12):
                os.kill(server.engines()[n % num_ranks].pid, signal.SIGKILL)
        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(lambda body: ask(server, body), bodies()))
        drafts = server.get("/admin/pipeline")["drafts"]
    assert [comparable(reply) for reply in together] == expected
    assert drafts["model"]["drafted"] > 0, drafts


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "flags"), LAYOUTS)
@pytest.mark.parametrize("reads", ["hidden", "embedding"])
def test_drafts_of_a_prediction_head_that_knows_the_answer_are_all_accepted(
    tmp_path: Path, reads: str, num_ranks: int, flags: tuple[str, ...]
) -> None:
    """Each token determines the next. The head finds it in the hidden state of the position before,
    or in the newest token, so it is wrong if it reads those of another position."""
    folder = heads.cyclic_model(tmp_path / "tiny-chat", TINY_CHAT, reads)
    body = {"model": "tiny-chat", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    prompts = ["One two three.", "Blue and green, red and blue.", "Why?"]
    with serving(folder, num_ranks, "--draft-model", "mtp", *flags) as server:
        for prompt in prompts:
            message = {"role": "user", "content": prompt}
            reply = ask(server, body | {"messages": [message]})
            details = reply["usage"]["completion_tokens_details"]
            assert details["rejected_prediction_tokens"] == 0, details
        drafts = server.get("/admin/pipeline")["drafts"]
    # How many there are depends on what they cost on this machine.
    assert drafts["model"]["accepted"] == drafts["model"]["drafted"] > 0, drafts


@pytest.mark.slow
def test_replies_with_drafts_stay_the_same_while_engines_are_killed(expected: list[Any]) -> None:
    with running(2, *FLAGS) as server, ThreadPoolExecutor(4) as threads:
        replies = threads.map(lambda body: ask(server, body), bodies())
        kept = []
        for n, reply in enumerate(replies):
            kept.append(comparable(reply))
            if n in (3, 9, 15):
                server.wait_until_ready()
                os.kill(server.engines()[n % 2].pid, signal.SIGKILL)
    assert kept == expected


def random_bodies(num_bodies: int) -> Iterator[dict[str, Any]]:
    """Combines the fields of up to three of the bodies above, with other questions and seeds."""
    chance = random.Random(22)
    for seed in range(num_bodies):
        fields: dict[str, Any] = {}
        for chosen in chance.sample(FIELDS, chance.randint(1, 3)):
            fields |= chosen
        if "response_format" in fields:
            fields.pop("structured_outputs", None)
        words = " ".join(chance.choices(TEXT.split(), k=chance.randint(4, 40)))
        question = chance.choice([*QUESTIONS, f"Say this twice: {words}", f"Repeat: {words}"])
        body: dict[str, Any] = {
            "model": "tiny-chat",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": chance.randint(8, 64),
            "seed": seed,
        }
        body |= fields
        body["max_tokens"] = max(body["max_tokens"], body.get("min_tokens", 0))
        yield body


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand_random_replies_with_and_without_drafts_are_the_same() -> None:
    """On one to four ranks, six at a time, while an engine is killed after every 50 replies."""
    every = list(random_bodies(250))
    with running(2, "--draft-model", "none", *FLAGS) as server, ThreadPoolExecutor(6) as threads:
        replies = threads.map(lambda body: ask(server, body), every)
        wanted = [comparable(reply) for reply in replies]
    for num_ranks in range(1, 5):
        num_accepted = 0
        with running(num_ranks, *FLAGS) as server, ThreadPoolExecutor(6) as threads:
            replies = threads.map(lambda body: ask(server, body), every)
            for n, reply in enumerate(replies):
                assert comparable(reply) == wanted[n], (num_ranks, every[n])
                num_accepted += accepted(reply)
                if n % 50 == 25:
                    server.wait_until_ready()
                    os.kill(server.engines()[n // 50 % num_ranks].pid, signal.SIGKILL)
        assert num_accepted > 250
