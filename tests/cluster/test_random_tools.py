"""Calls of 200 random tools: the arguments follow the schema, whatever the model.

With `auto` the model decides. The conversation before the question has calls of the same tool, so
that even a small model calls it again; answers without a call are counted apart.
"""

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.cluster.random_tools import check_call, example, random_tool
from tests.cluster.servers import TINY_CHAT, Server, brigade_launch, serve_flags, started
from tests.ports import free_ports

NUM_TOOLS = 200
MAX_TRIES = 8
NUM_AT_ONCE = 8
REAL_MODEL = os.environ.get("BRIGADE_REAL_MODEL", "")
pytestmark = pytest.mark.slow


def running_model(folder: Path) -> Iterator[Server]:
    port = free_ports(1)[0]
    with started(brigade_launch(2, serve_flags(port, folder)), port) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Random weights with the embedded model's tokenizer."""
    config = json.loads((TINY_CHAT / "config.json").read_text())
    tokens = {name: config[name] for name in ("vocab_size", "eos_token_id") if name in config}
    folder = tmp_path_factory.mktemp("random")
    models.save(folder, "llama", **tokens, max_position_embeddings=8192)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_CHAT / name, folder)
    yield from running_model(folder)


@pytest.fixture(scope="module")
def real_model() -> Iterator[Server]:
    if not REAL_MODEL:
        pytest.skip("BRIGADE_REAL_MODEL names no folder")
    yield from running_model(Path(REAL_MODEL))


def ids(tokenizer: Path, *texts: str) -> list[int]:
    saved = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"] | {t["content"]: t["id"] for t in saved["added_tokens"]}
    return [vocabulary[text] for text in texts if text in vocabulary]


def biases(folder: Path, mark: str) -> dict[str, float]:
    """A bias that begins calls, and one that ends strings, numbers and lists soon."""
    closing = ids(folder, '"', "}", "]", ",", '"}', '",', "}}")
    found = {str(id): 6.0 for id in closing}
    return found | {str(id): 100.0 for id in ids(folder, mark)}


def history(tool: Any, rng: random.Random, num_calls: int) -> list[Any]:
    """A conversation in which every answer is a call of the tool, so that a small model continues
    with a call. Results of the calls would tempt it to answer with text."""
    messages: list[Any] = []
    for number in range(num_calls):
        arguments = json.dumps(example(tool["function"]["parameters"], rng))
        function = {"name": tool["function"]["name"], "arguments": arguments}
        id = f"call{number:05}"
        messages += [
            {"role": "user", "content": "Please call the tool."},
            {
                "role": "assistant",
                "tool_calls": [{"id": id, "type": "function", "function": function}],
            },
        ]
    return messages


def outcome(server: Server, messages: list[Any], tool: Any, **fields: Any) -> str:
    """What came: a call, which is checked, text, or an answer that was cut off."""
    reply = server.client().chat.completions.create(
        messages=[*messages, {"role": "user", "content": "Please call the tool."}],
        tools=[tool],
        parallel_tool_calls=False,
        **fields,
    )
    choice = reply.choices[0]
    if choice.finish_reason == "length":
        return "cut"
    if not choice.message.tool_calls:
        return "text"
    (one,) = choice.message.tool_calls
    check_call(tool, one.function.name, one.function.arguments)
    return "called"


def check_all(server: Server, num_calls: int, **fields: Any) -> None:
    """Checks that each of the tools is called, at the latest in the last try. All tries of a tool
    have the same prompt, which shows num_calls earlier calls and is computed once."""
    model = server.get("/v1/models")["data"][0]["id"]
    rng = random.Random(5)
    tools = [random_tool(rng) for _ in range(NUM_TOOLS)]
    seen: Counter[str] = Counter()
    started_at = time.monotonic()

    def check(number: int) -> bool:
        messages = history(tools[number], random.Random(number), num_calls)
        for attempt in range(MAX_TRIES):
            seed = number + NUM_TOOLS * attempt
            found = outcome(server, messages, tools[number], model=model, seed=seed, **fields)
            seen[found] += 1
            if sum(seen.values()) % 20 == 0:
                seconds = time.monotonic() - started_at
                print(f"{seconds:.0f} s, answers: {dict(seen)}", flush=True)
            if found == "called":
                return True
        return False

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        called = list(pool.map(check, range(NUM_TOOLS)))
    print(f"answers: {dict(seen)}")
    assert all(called), seen


@pytest.mark.timeout(600)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_of_random_tools_follow_their_schemas_on_a_model_of_random_weights(
    random_model: Server, choice: Any
) -> None:
    bias = biases(TINY_CHAT, "<tool_call>")
    check_all(random_model, 2, tool_choice=choice, temperature=1, logit_bias=bias, max_tokens=800)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_of_random_tools_follow_their_schemas_on_a_real_model(
    real_model: Server, choice: Any
) -> None:
    num_calls = 2 if choice == "auto" else 0
    check_all(real_model, num_calls, tool_choice=choice, temperature=0.3, max_tokens=200)
