"""Greedy answers are those of mlx_lm on the whole model, however the ranks are started."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.questions import QUESTIONS
from tests.cluster.servers import Server, alone, brigade_launch, mlx_launch, running


def ask(server: Server, question: str) -> str:
    reply = server.client().chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=48,
    )
    return reply.choices[0].message.content or ""


@pytest.mark.parametrize(
    ("launch", "num_ranks"),
    [
        pytest.param(alone, 1, marks=pytest.mark.slow),
        pytest.param(brigade_launch, 1, marks=pytest.mark.slow),
        pytest.param(brigade_launch, 2, marks=pytest.mark.slow),
        pytest.param(brigade_launch, 3, marks=pytest.mark.slow),
        pytest.param(brigade_launch, 4, marks=pytest.mark.slow),
        pytest.param(mlx_launch, 2, marks=pytest.mark.slow),
        pytest.param(mlx_launch, 3, marks=pytest.mark.slow),
        pytest.param(mlx_launch, 4, marks=pytest.mark.slow),
    ],
)
def test_answers_equal_those_of_mlx_lm(
    launch: Any, num_ranks: int, mlx_lm_answer: Callable[[str], str]
) -> None:
    with running(num_ranks, launch=launch) as server:
        check_answers(server, num_ranks, mlx_lm_answer)


def test_answers_of_a_server_used_by_other_tests_equal_those_of_mlx_lm(
    server: Server, mlx_lm_answer: Callable[[str], str]
) -> None:
    check_answers(server, 2, mlx_lm_answer)


def check_answers(server: Server, num_ranks: int, mlx_lm_answer: Callable[[str], str]) -> None:
    expected = [mlx_lm_answer(question) for question in QUESTIONS]
    assert len(set(expected)) > 12, "the model says one thing only"
    stages = server.get("/admin/pipeline")["stages"]
    assert len(stages) == num_ranks
    assert stages[0]["layers"][1] > stages[-1]["layers"][0] == 0
    one_by_one = [ask(server, question) for question in QUESTIONS[:4]]
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        at_once = list(threads.map(lambda question: ask(server, question), QUESTIONS))
    assert one_by_one == expected[:4]
    assert at_once == expected
