"""Prompts: seeded, different from each other, of the wanted length."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.bench.prompts import PROBE_WORDS, Prompts, read_questions, words_for
from serve.core.errors import UsageError
from tests.errors import fails


@given(st.integers(1, 5000), st.sampled_from([1, 2, 3]), st.integers(0, 40))
def test_a_prompt_has_the_wanted_number_of_tokens(
    wanted: int, per_word: int, template: int
) -> None:
    probes = [per_word * words + template for words in PROBE_WORDS]
    tokens = per_word * words_for(wanted, probes) + template
    assert abs(tokens - wanted) <= per_word / 2 or tokens == per_word + template >= wanted


@pytest.mark.parametrize("probes", [[None, None], [30, 30], [30, 20]])
def test_prompts_have_one_word_a_token_if_the_server_cannot_count(
    probes: list[int | None],
) -> None:
    assert words_for(66, probes) == 66


def test_prompts_differ_by_name_and_by_seed() -> None:
    """Equal prompts would measure the prefix cache; different ones on A and B would measure
    luck."""
    one = Prompts(7, 30)
    assert one.for_run("8 clients/0", 5) == Prompts(7, 30).for_run("8 clients/0", 5)
    every = [*one.for_run("8 clients/0", 50), *one.for_run("8 clients/1", 50)]
    every += Prompts(8, 30).for_run("8 clients/0", 50)
    assert len(set(every)) == 150
    assert {len(prompt.split()) for prompt in every} == {30}


def sharegpt(path: Path, *openings: tuple[str, str]) -> Path:
    entries = [
        {"conversations": [{"from": who, "value": text}, {"from": "gpt", "value": "Yes."}]}
        for who, text in openings
    ]
    path.write_text(json.dumps(entries))
    return path


def test_questions_are_the_first_human_message_of_each_conversation(tmp_path: Path) -> None:
    path = sharegpt(tmp_path / "s.json", ("human", "One?"), ("gpt", "Hm."), ("user", "Two?"))
    questions = read_questions(path)
    assert questions == ["One?", "Two?"]
    taken = Prompts(0, 0, questions).for_run("a", 5)
    assert len(taken) == 5
    assert set(taken) == {"One?", "Two?"}


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"a": 1}', '["a"]', "[1]", '[{"conversations": [{"from": "gpt"}]}]']
)
def test_a_file_in_another_format_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="--prompts"):
        read_questions(path)


def test_a_missing_file_of_prompts_is_refused(tmp_path: Path) -> None:
    with fails(UsageError, "unreadable"):
        read_questions(tmp_path / "none.json")
