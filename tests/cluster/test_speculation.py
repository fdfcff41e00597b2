"""Real ranks give the same replies with guesses as without: for every parameter, alone, together
and while engines are killed."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.cluster.questions import QUESTIONS
from tests.cluster.servers import ROOT, Server, running

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ADAPTERS = ROOT / "examples" / "adapters"
FLAGS = ("--lora", f"pirate={ADAPTERS / 'pirate'}", "--max-restarts", "1000")
LIST = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 3, "maxItems": 9}
OBJECT = {"type": "object", "properties": {"words": LIST}, "required": ["words"]}
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
    {"temperature": 0.9, "min_tokens": 30},
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
    {"temperature": 0.2, "ignore_eos": True, "max_tokens": 90},
]


def bodies() -> Iterator[dict[str, Any]]:
    questions = itertools.cycle([*QUESTIONS, f"Say this twice: {TEXT}", f"Repeat: {TEXT}"])
    for seed, fields in enumerate(FIELDS):
        message = {"role": "user", "content": next(questions)}
        body = {"model": "tiny-chat", "messages": [message], "max_tokens": 64, "seed": seed}
        yield body | fields


def ask(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=100)
    assert reply.status_code == 200, reply.text
    return reply.json()


def comparable(reply: dict[str, Any]) -> Any:
    """The choices and counts of a reply, without what is new in each, and with rounded numbers."""
    text = json.dumps(reply["choices"])
    choices = json.loads(text, parse_float=lambda number: round(float(number), 3))
    return choices, reply["usage"]["completion_tokens"]


def accepted(reply: dict[str, Any]) -> int:
    number: int = reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    return number


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Without guesses."""
    with running(2, "--no-speculation", *FLAGS) as server:
        replies = [ask(server, body) for body in bodies()]
    assert sum(map(accepted, replies)) == 0
    return [comparable(reply) for reply in replies]


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, ()),
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(3, ("--num-groups", "1"), marks=pytest.mark.slow),
        pytest.param(4, (), marks=pytest.mark.slow),
    ],
)
def test_replies_are_the_same_with_guesses(
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


def test_replies_are_the_same_while_engines_are_killed(expected: list[Any]) -> None:
    with running(2, *FLAGS) as server, ThreadPoolExecutor(4) as threads:
        replies = threads.map(lambda body: ask(server, body), bodies())
        kept = []
        for n, reply in enumerate(replies):
            kept.append(comparable(reply))
            if n in (3, 9, 15):
                server.wait_until_ready()
                os.kill(server.engines()[n % 2].pid, signal.SIGKILL)
    assert kept == expected
