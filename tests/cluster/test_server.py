"""A real two-rank server and the official client."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.cluster.questions import QUESTIONS
from tests.cluster.servers import Server, running
from tests.errors import fails

INSIDE = str(Path(__file__).parent.parent / "faults" / "inside")
CHAT: dict[str, Any] = {"model": "tiny-chat", "temperature": 0}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_chat_equals_the_answer_of_mlx_lm(
    server: Server, mlx_lm_answer: Callable[[str], str]
) -> None:
    reply = server.client().chat.completions.create(**CHAT, messages=user(QUESTIONS[0]))
    assert reply.choices[0].message.content == mlx_lm_answer(QUESTIONS[0])
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage
    assert reply.usage.completion_tokens > 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_pieces_of_a_streamed_chat_add_up_to_the_answer_of_mlx_lm(
    server: Server, mlx_lm_answer: Callable[[str], str]
) -> None:
    stream = server.client().chat.completions.create(
        **CHAT,
        messages=user("Tell me a story."),
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == mlx_lm_answer("Tell me a story.", max_tokens=200)
    assert sum(bool(delta) for delta in deltas) > 10, "it came in one piece"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens >= len(deltas) - 3
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_an_answer_follows_the_system_prompt(server: Server) -> None:
    messages = [{"role": "system", "content": "Answer in capitals."}, *user(QUESTIONS[0])]
    reply = server.client().chat.completions.create(**CHAT, messages=messages)
    assert "PARIS" in (reply.choices[0].message.content or "")


def cached_tokens(reply: ChatCompletion) -> int:
    assert reply.usage
    assert reply.usage.prompt_tokens_details
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def test_a_second_turn_reuses_the_first_turn_as_a_prefix(
    server: Server, mlx_lm_answer: Callable[[Any], str]
) -> None:
    create = server.client().chat.completions.create
    system = {"role": "system", "content": "You are called Zoe. " + "the cat sat on the mat " * 10}
    messages = [system, *user("Tell me about yourself.")]
    first = create(**CHAT, messages=messages)
    messages += [first.choices[0].message.to_dict(), *user("What is the capital of Spain?")]
    second = create(**CHAT, messages=messages)
    cached = cached_tokens(second)
    assert first.usage
    assert cached >= first.usage.total_tokens - 2
    assert second.choices[0].message.content == mlx_lm_answer(messages)
    metrics = httpx2.get(f"{server.url}/metrics").text
    assert float(re.findall(r"^brigade_prefix_cache_hits_total (\S+)", metrics, re.M)[0]) >= cached


def test_reaching_max_tokens_or_a_stop_string_ends_an_answer(server: Server) -> None:
    create = server.client().chat.completions.create
    short = create(**CHAT, messages=user("Say the alphabet."), max_tokens=3)
    assert short.choices[0].finish_reason == "length"
    assert short.usage
    assert short.usage.completion_tokens == 3
    stopped = create(**CHAT, messages=user("Say the alphabet."), stop=[" g"])
    text = stopped.choices[0].message.content or ""
    assert stopped.choices[0].finish_reason == "stop"
    assert "f" in text
    assert "g" not in text


def test_an_answer_ended_by_a_stop_string_is_kept_for_the_next_turn(server: Server) -> None:
    create = server.client().chat.completions.create
    system = {"role": "system", "content": "You are called Max. " + "the dog ate the bone " * 10}
    messages = [system, *user("Say the alphabet.")]
    first = create(**CHAT, messages=messages, stop=[" c"], max_tokens=40)
    assert first.choices[0].finish_reason == "stop"
    wait_until_idle(server)  # The steps under way end after the answer.
    messages += [first.choices[0].message.to_dict(), *user("What is the capital of Spain?")]
    second = create(**CHAT, messages=messages)
    assert first.usage
    assert cached_tokens(second) >= first.usage.prompt_tokens


def test_the_same_seed_gives_the_same_text_beside_any_other_requests(server: Server) -> None:
    def sampled(seed: int) -> str:
        reply = server.client().chat.completions.create(
            model="tiny-chat", messages=user("Hello!"), temperature=2, seed=seed, max_tokens=24
        )
        return reply.choices[0].message.content or ""

    alone = sampled(11)
    with ThreadPoolExecutor(8) as threads:
        crowd = list(threads.map(sampled, [11, 12, 13, 11, 14, 15, 16, 11]))
    assert [crowd[0], crowd[3], crowd[7]] == [alone] * 3
    assert len(set(crowd)) > 1, "seeds make no difference"


# --- stages at work


def spans(server: Server, since: float) -> dict[int, list[tuple[float, float]]]:
    """When each stage was decoding, from the step timeline. (The chunks of a prompt and
    the first token after them follow each other through the stages even if it is alone.)"""
    by_stage: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    while not all(by_stage.values()):  # Until the engines have reported.
        time.sleep(0.6)
        trace = server.get(f"/admin/trace?seconds={time.time() - since}")
        by_stage = {0: [], 1: []}
        for event in trace["traceEvents"]:
            if event["name"].startswith("decode") and event["ts"] / 1e6 >= since:
                by_stage[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    return by_stage


def overlap(by_stage: dict[int, list[tuple[float, float]]]) -> tuple[float, float]:
    """(microseconds in which both stages computed, in which at least one did)."""
    both = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in by_stage[0]
        for other_start, other_end in by_stage[1]
    )
    total = sum(end - start for stage in by_stage.values() for start, end in stage)
    return both, total - both


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Its steps mostly sleep, so both stages can be in one at the same time even if other tests
    leave them one core."""
    monkeypatch.setenv("PYTHONPATH", INSIDE, prepend=":")
    monkeypatch.setenv("STEP_SECONDS", "0.02")
    with running(2) as running_server:
        yield running_server


def test_four_requests_keep_both_stages_busy_and_one_request_does_not(slow: Server) -> None:
    # Made before: what making one takes would keep the requests apart.
    clients = [slow.client() for _ in range(4)]

    def count(client: openai.OpenAI) -> None:
        client.chat.completions.create(
            **CHAT,
            messages=user("Say the alphabet."),
            max_tokens=40,
            extra_body={"ignore_eos": True},
        )

    wait_until_idle(slow)
    since = time.time()
    count(clients[0])
    both, either = overlap(spans(slow, since))
    assert either > 0
    assert both == 0, "one request cannot be on two stages at once"
    since = time.time()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, clients))
    both, either = overlap(spans(slow, since))
    assert both / either > 0.1, f"stages took turns: both worked in {both / either} of the time"


# --- what goes wrong


def is_idle(server: Server) -> bool:
    """Whether no sequence runs or waits, and no step of one that has ended is under way."""
    pipeline = server.get("/admin/pipeline")
    num_kept = pipeline["prefix_cache"]["num_tokens"]
    is_busy = pipeline["num_running"] or pipeline["num_waiting"]
    return not is_busy and pipeline["kv_tokens"] == num_kept


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + 60
    while not is_idle(server):
        assert time.monotonic() < deadline, "a sequence nobody waits for still runs"
        time.sleep(0.02)


def test_the_request_of_a_client_that_disconnects_is_dropped_on_all_ranks(server: Server) -> None:
    wait_until_idle(server)
    long = {**CHAT, "temperature": 2, "messages": user("Tell me a story."), "stream": True}
    with httpx2.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**long, "seed": 5}
    ) as stream:
        next(stream.iter_lines())
    wait_until_idle(server)


def test_clients_that_disconnect_do_not_change_other_answers(
    server: Server, mlx_lm_answer: Callable[[str], str]
) -> None:
    async def leave(client: httpx2.AsyncClient, seconds: float) -> None:
        body = {"model": "tiny-chat", "messages": user("Say the alphabet."), "temperature": 1}
        try:
            await client.post(f"{server.url}/v1/chat/completions", json=body, timeout=seconds)
        except httpx2.TimeoutException:
            return

    async def all_leave() -> None:
        async with httpx2.AsyncClient() as client:
            await asyncio.gather(*(leave(client, 0.02 + 0.01 * n) for n in range(20)))

    leaving = threading.Thread(target=asyncio.run, args=(all_leave(),))
    leaving.start()
    for question in QUESTIONS[:6]:
        reply = server.client().chat.completions.create(**CHAT, messages=user(question))
        assert reply.choices[0].message.content == mlx_lm_answer(question, max_tokens=200)
    leaving.join()
    wait_until_idle(server)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": user("hi"), "temperature": "hot"}, "temperature"),
        ({"messages": user("hi"), "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": user("hi"), "n": 129}, "n"),
        ({"messages": user("hi"), "max_tokens": -2}, "max_tokens"),
        ({"messages": user("word " * 100_000)}, "messages"),
    ],
)
def test_a_bad_request_gets_status_400_and_the_server_continues(
    server: Server, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().post("/chat/completions", body={**CHAT, **body}, cast_to=object)
    assert caught.value.body["param"] == param
    reply = server.client().chat.completions.create(**CHAT, messages=user("Hello!"))
    assert reply.choices[0].finish_reason == "stop"


def test_an_unknown_model_gets_status_404(server: Server) -> None:
    with fails(openai.NotFoundError, "model_not_found", match="gpt"):
        server.client().chat.completions.create(model="gpt", messages=user("hi"))


def test_the_model_is_listed_and_its_requests_are_counted(server: Server) -> None:
    assert [model.id for model in server.client().models.list()] == ["tiny-chat"]
    text = httpx2.get(f"{server.url}/metrics").text
    assert 'brigade_requests_total{endpoint="/v1/models",status="200"}' in text
    assert "brigade_num_requests_running" in text


def test_the_status_of_the_pipeline_lists_the_layers_of_each_stage(server: Server) -> None:
    stages = server.get("/admin/pipeline")["stages"]
    assert [stage["layers"] for stage in stages] == [[4, 8], [0, 4]]
    for stage in stages:
        assert stage["state"] == "ready"
        assert stage["bytes_owned"] > 0
        assert 0 <= stage["busy_share"] <= 1
        assert stage["memory"]["active_bytes"] >= stage["bytes_owned"]
        assert stage["memory"]["head_room_bytes"] > 0
