"""A request's wishes about reasoning become a template variable and a budget in tokens."""

from pathlib import Path

import pytest

from serve.core.errors import RequestError
from serve.core.types import Reasoning
from serve.front.api import chat
from serve.front.api.openai import ChatBody, parse
from serve.front.api.thinking import BUDGETS, Thinking
from serve.front.text.tokens import Tokenizer
from tests.front.text.dialects.models import save

MESSAGES = [{"role": "user", "content": "Hello"}]
OPEN, CLOSED = "<think>", "</think>"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save("qwen3", tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save("harmony", tmp_path_factory.mktemp("harmony")))


def prepared(tokenizer: Tokenizer, **fields: object) -> tuple[str, Reasoning | None]:
    """Returns the prompt's text and the reasoning that the engine gets."""
    body = parse(ChatBody, {"model": "m", "messages": MESSAGES, **fields})
    (prompt,) = chat.prepare(body.request(tokenizer), tokenizer, 4096).prompts
    text = tokenizer.decode(prompt.ids, skip_special_tokens=False)
    assert len({sampling.reasoning for sampling in prompt.samplings}) == 1
    return text, prompt.samplings[0].reasoning


def ids(tokenizer: Tokenizer, *marks: str) -> tuple[int, ...]:
    found = [tokenizer.id_of(mark) for mark in marks]
    assert None not in found
    return tuple(id for id in found if id is not None)


def test_the_budget_of_a_request_applies_to_each_of_its_answers(qwen: Tokenizer) -> None:
    for budget in (None, 0, 7):
        _, reasoning = prepared(qwen, n=3, thinking_token_budget=budget)
        expected = Reasoning(ids(qwen, OPEN), ids(qwen, CLOSED), is_open=False, budget=budget)
        assert reasoning == expected


@pytest.mark.parametrize("budget", [-1, -7])
def test_a_negative_budget_of_reasoning_is_refused(qwen: Tokenizer, budget: int) -> None:
    with pytest.raises(RequestError) as raised:
        prepared(qwen, thinking_token_budget=budget)
    assert raised.value.param == "thinking_token_budget"


def test_a_prompt_that_ends_within_reasoning_is_recognised(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save("qwen3_coder", tmp_path))
    text, reasoning = prepared(tokenizer, thinking_token_budget=3)
    assert text.rstrip().endswith(OPEN)
    assert reasoning
    assert reasoning.is_open


@pytest.mark.parametrize("effort", [*BUDGETS, "xhigh", "max"])
def test_an_effort_becomes_a_budget_if_the_template_knows_no_efforts(
    qwen: Tokenizer, effort: str
) -> None:
    text, reasoning = prepared(qwen, reasoning_effort=effort)
    assert reasoning
    assert reasoning.budget == BUDGETS.get(effort)
    assert text.endswith(f"{CLOSED}\n\n") == (effort == "none")


def test_a_budget_given_by_the_request_is_preferred_to_that_of_its_effort(qwen: Tokenizer) -> None:
    _, reasoning = prepared(qwen, reasoning_effort="high", thinking_token_budget=9)
    assert reasoning
    assert reasoning.budget == 9


def test_template_variables_given_by_the_request_are_preferred_to_those_of_its_effort(
    qwen: Tokenizer,
) -> None:
    text, _ = prepared(
        qwen, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
    )
    assert CLOSED not in text


def test_an_effort_becomes_a_variable_if_the_template_knows_it(harmony: Tokenizer) -> None:
    start = ids(harmony, "<|channel|>") + tuple(harmony.encode("analysis"))
    for effort, shown in (("low", "low"), ("minimal", "low"), ("xhigh", "high")):
        text, reasoning = prepared(harmony, reasoning_effort=effort)
        assert f"Reasoning: {shown}" in text
        assert reasoning
        assert reasoning.budget is None
        assert reasoning.start == start + ids(harmony, "<|message|>")
        assert reasoning.end == ids(harmony, "<|end|>")
    _, reasoning = prepared(harmony, reasoning_effort="none")
    assert reasoning
    assert reasoning.budget == 0


UNMARKED = """\
{%- for message in messages %}{{ message.content }}{% endfor %}
{{- '[' ~ reasoning_effort ~ ' ' ~ enable_thinking ~ ']' }}"""


@pytest.mark.parametrize(
    ("effort", "shown"),
    [("none", "[none False]"), ("low", "[low True]"), ("max", "[max True]"), (None, "[ ]")],
)
def test_an_effort_becomes_a_variable_even_if_the_marks_of_reasoning_are_unknown(
    tmp_path: Path, effort: str | None, shown: str
) -> None:
    save("llama", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(UNMARKED)
    tokenizer = Tokenizer(tmp_path)
    text, reasoning = prepared(tokenizer, reasoning_effort=effort)
    assert text.endswith(shown)
    assert reasoning is None


def test_any_budget_is_accepted_for_a_model_without_reasoning(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save("llama", tmp_path))
    _, reasoning = prepared(tokenizer, thinking_token_budget=5, reasoning_effort="high")
    assert reasoning is None


def test_a_budget_is_refused_if_the_marks_of_reasoning_are_ordinary_text(
    qwen: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen, "begins_with_a_mark", lambda text: False)
    with pytest.raises(RequestError) as raised:
        prepared(qwen, thinking_token_budget=5)
    assert raised.value.param == "thinking_token_budget"
    _, reasoning = prepared(qwen, reasoning_effort="low")
    assert reasoning
    assert reasoning.budget is None


def test_reasoning_that_is_not_wanted_gets_a_budget_of_zero(harmony: Tokenizer) -> None:
    reasoning = Thinking(is_wanted=False).reasoning(harmony, "")
    assert reasoning
    assert reasoning.budget == 0


def test_added_tokens_are_told_from_ordinary_text(qwen: Tokenizer) -> None:
    assert qwen.begins_with_a_mark(CLOSED)
    assert not qwen.begins_with_a_mark(f"a{CLOSED}")
    assert not qwen.begins_with_a_mark("")
