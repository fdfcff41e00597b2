"""Masks follow a grammar token by token, and a sequence that begins anew goes on in it."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from serve.core.errors import RequestError
from serve.rank.grammar import Constraint, Grammars

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-chat"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
END = TOKENIZER.token_to_id("<|end|>")
NUM_LOGITS = 1100  # a head may be wider than the vocabulary
NUMBERS = LLMatcher.grammar_from_json_schema(
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
)


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(MODEL, NUM_LOGITS, [END])


def drawn(constraint: Constraint, seed: int, output: list[int], stop: int = 60) -> list[int]:
    """Random tokens among those that are allowed, until the end."""
    mx.random.seed(seed)
    while len(output) < stop and output[-1:] != [END]:
        allowed = constraint.allowed()
        assert allowed.shape == (NUM_LOGITS,)
        assert not mx.any(allowed[TOKENIZER.get_vocab_size() :]).item()
        logits = mx.where(allowed, mx.random.normal((NUM_LOGITS,)), -mx.inf)
        # Digits would go on for ever if the end were as likely as each of them.
        logits[END] += 4
        output.append(int(mx.argmax(logits).item()))
        constraint.accept(output[-1])
    return output


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_drawn_follows_the_grammar(grammars: Grammars, seed: int) -> None:
    choice = LLMatcher.grammar_from_regex("(red|green|blue)( and (red|green|blue))?")
    output = drawn(grammars.begin(choice, []), seed, [])
    words = TOKENIZER.decode(output).split(" and ")
    assert output[-1] == END
    assert set(words) <= {"red", "green", "blue"}


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_one_that_begins_anew_goes_on_where_it_was(grammars: Grammars, num_tokens: int) -> None:
    before = TOKENIZER.encode("[12, 7]", add_special_tokens=False).ids[:num_tokens]
    fresh, again = grammars.begin(NUMBERS, []), grammars.begin(NUMBERS, before)
    for token in before:
        fresh.accept(token)
    assert mx.array_equal(fresh.allowed(), again.allowed())


def test_after_the_last_token_only_the_end_is_allowed(grammars: Grammars) -> None:
    tokens = TOKENIZER.encode("[1,2]", add_special_tokens=False).ids
    constraint = grammars.begin(NUMBERS, tokens)
    assert mx.argmax(constraint.allowed()).item() == END
    assert constraint.allowed().sum().item() == 1
    constraint.accept(END)
    constraint.accept(5)  # a step that was on its way
    assert json.loads(TOKENIZER.decode(tokens)) == [1, 2]


def test_what_does_not_fit_is_an_error_of_the_request(grammars: Grammars) -> None:
    wrong = TOKENIZER.encode("no list", add_special_tokens=False).ids
    with pytest.raises(RequestError, match="cannot be followed"):
        grammars.begin(NUMBERS, wrong).allowed()
