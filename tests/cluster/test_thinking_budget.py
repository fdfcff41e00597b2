"""Budgets of reasoning over two real ranks: kept exactly alone, in a batch, under a grammar, and
when the engine of either rank is killed."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer

from tests.cluster.servers import Server
from tests.cluster.test_thoughts import ASKED, TOOL
from tests.test_launcher import wait_until

pytestmark = pytest.mark.long

BUDGETS = (0, 1, 2, 7, 30, None)
NUM_TOKENS = 120


@dataclass(frozen=True)
class Answered:
    tokens: list[int]
    num_reasoning: int
    choice: dict[str, Any]

    @property
    def message(self) -> dict[str, Any]:
        return self.choice["message"]


@pytest.fixture(scope="module")
def end(thinking_model: Path) -> int:
    """The token that ends reasoning."""
    id = Tokenizer.from_file(str(thinking_model / "tokenizer.json")).token_to_id("</think>")
    assert id is not None
    return int(id)


def ask(server: Server, **fields: Any) -> Answered:
    body: dict[str, Any] = {
        "model": "thinker",
        "messages": [{"role": "user", "content": ASKED}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "return_token_ids": True,
    }
    url = f"{server.url}/v1/chat/completions"
    reply = httpx2.post(url, json=body | fields, timeout=120).raise_for_status().json()
    (choice,) = reply["choices"]
    num_reasoning = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return Answered(choice["token_ids"], num_reasoning, choice)


def crowd(server: Server) -> list[Answered]:
    """Requests that run together: greedy ones and others, each with its own budget and seed."""

    def one(number: int) -> Answered:
        return ask(
            server,
            thinking_token_budget=BUDGETS[number % len(BUDGETS)],
            temperature=1.3 if number % 2 else 0,
            seed=number,
            ignore_eos=True,
            frequency_penalty=0.5 if number % 3 == 0 else 0,
        )

    with ThreadPoolExecutor(12) as threads:
        return list(threads.map(one, range(12)))


def check_kept(answers: list[Answered], end: int) -> None:
    for number, answered in enumerate(answers):
        budget = BUDGETS[number % len(BUDGETS)]
        if budget is None:
            continue
        assert end in answered.tokens[: budget + 1]
        assert answered.num_reasoning <= budget
        assert answered.tokens.index(end) <= budget


@pytest.fixture(scope="module")
def expected(thinker: Server, end: int) -> list[Answered]:
    answers = crowd(thinker)
    check_kept(answers, end)
    return answers


def test_the_budget_ends_reasoning_exactly_and_changes_no_earlier_token(
    thinker: Server, end: int
) -> None:
    """This model was never taught the end mark: without a budget it ends its answer within its
    reasoning, so all of its tokens are reasoning."""
    free = ask(thinker)
    num_free = len(free.tokens)
    assert num_free > 3
    assert end not in free.tokens
    assert free.num_reasoning == num_free
    for budget in range(num_free + 2):
        limited = ask(thinker, thinking_token_budget=budget)
        assert limited.num_reasoning == min(budget, num_free)
        if budget < num_free:
            assert limited.tokens[: budget + 1] == [*free.tokens[:budget], end]
        else:
            assert limited.tokens == free.tokens


def test_an_unused_budget_changes_nothing(thinker: Server, end: int) -> None:
    """With this bias the model ends its reasoning itself."""
    bias = {"logit_bias": {str(end): 20}}
    free = ask(thinker, **bias)
    num_free = free.tokens.index(end)
    assert num_free > 1
    assert free.num_reasoning == num_free
    for budget in range(num_free + 3):
        limited = ask(thinker, **bias, thinking_token_budget=budget)
        used = min(budget, num_free)
        assert limited.num_reasoning == used
        assert limited.tokens[: used + 1] == [*free.tokens[:used], end]
        if budget >= num_free:
            assert limited.tokens == free.tokens


def test_a_budget_changes_no_token_sampled_before_it_is_used_up(thinker: Server, end: int) -> None:
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 11, "ignore_eos": True}
    free = ask(thinker, **fields, logprobs=True)
    limited = ask(thinker, **fields, logprobs=True, thinking_token_budget=4)
    assert end not in free.tokens[:5]
    assert limited.tokens[:5] == [*free.tokens[:4], end]
    scores = [each["logprob"] for each in limited.choice["logprobs"]["content"]]
    assert len(scores) == len(limited.tokens)
    assert all(-1e4 < score <= 0 for score in scores)


def test_the_budget_is_kept_while_other_requests_run(
    thinker: Server, expected: list[Answered]
) -> None:
    for number in (0, 1, 3, 4):
        alone = ask(
            thinker,
            thinking_token_budget=BUDGETS[number],
            temperature=1.3 if number % 2 else 0,
            seed=number,
            ignore_eos=True,
            frequency_penalty=0.5 if number % 3 == 0 else 0,
        )
        assert alone.tokens == expected[number].tokens


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_budget_is_kept_after_a_killed_engine(
    thinker: Server, expected: list[Answered], end: int, rank: int
) -> None:
    before = thinker.get("/admin/pipeline")["num_restarts"]
    with ThreadPoolExecutor(1) as thread:
        running_crowd = thread.submit(crowd, thinker)
        time.sleep(0.3)
        thinker.engines()[rank].kill()
        answers = running_crowd.result(120)
    check_kept(answers, end)
    assert [each.tokens for each in answers] == [each.tokens for each in expected]
    # On a busy machine, the answers may have come before the kill.
    wait_until(lambda: thinker.get("/admin/pipeline")["num_restarts"] > before)
    assert thinker.get("/admin/pipeline")["num_restarts"] == before + 1
    thinker.wait_until_ready()


def test_a_grammar_begins_where_the_budget_ends_reasoning(thinker: Server, end: int) -> None:
    outputs = {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{3}"}}
    for budget in (0, 3):
        answered = ask(thinker, thinking_token_budget=budget, **outputs)
        assert answered.num_reasoning == budget
        assert re.fullmatch("[0-9]{3}-[0-9]{3}", answered.message["content"])
        called = ask(thinker, thinking_token_budget=budget, tools=[TOOL], tool_choice="required")
        assert called.tokens[budget] == end
        assert {call["function"]["name"] for call in called.message["tool_calls"]} == {"add"}


def test_responses_and_messages_count_reasoning_tokens(thinker: Server) -> None:
    expected = ask(thinker).num_reasoning
    responses = thinker.client().responses.create(model="thinker", input=ASKED, temperature=0)
    assert responses.usage
    assert responses.usage.output_tokens_details.reasoning_tokens == expected
    body = {"model": "thinker", "max_tokens": 200, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": ASKED}]}
    usage = httpx2.post(f"{thinker.url}/v1/messages", json=body, timeout=60).json()["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": expected}
