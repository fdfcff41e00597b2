"""Masks follow a grammar token by token, and a sequence that begins again goes on in it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from serve.core.errors import RequestError
from serve.core.grammar_limits import MAX_RULES
from serve.core.types import Reasoning, Sampling
from serve.rank import grammar
from serve.rank.grammar import Constraint, GrammarCompiler
from tests.errors import fails

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-chat"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
END = TOKENIZER.token_to_id("<|end|>")
NUM_LOGITS = 1100  # a head may be wider than the vocabulary
CHOICE = LLMatcher.grammar_from_regex("(red|green|blue)( and (red|green|blue))?")
NUMBERS = LLMatcher.grammar_from_json_schema(
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
)


@pytest.fixture
def grammars() -> GrammarCompiler:
    return GrammarCompiler(MODEL)


def begin(grammars: GrammarCompiler, grammar: str, output: list[int], **fields: int) -> Constraint:
    sampling = Sampling(grammar=grammar, end_ids=(END,), **fields)
    return Constraint(grammars, sampling, output)


def allowed(constraint: Constraint) -> mx.array:
    return constraint.apply(mx.zeros(NUM_LOGITS)) == 0


def drawn(constraint: Constraint, seed: int, output: list[int], stop: int = 60) -> list[int]:
    """Random tokens among those that are allowed, until the end."""
    mx.random.seed(seed)
    while len(output) < stop and output[-1:] != [END]:
        logits = constraint.apply(mx.random.normal((NUM_LOGITS,)))
        assert logits[TOKENIZER.get_vocab_size() :].max().item() == -mx.inf
        output.append(int(mx.argmax(logits).item()))
        constraint.accept(output[-1])
    return output


@pytest.mark.parametrize("seed", range(8))
def test_sampled_tokens_always_follow_the_grammar(grammars: GrammarCompiler, seed: int) -> None:
    output = drawn(begin(grammars, CHOICE, []), seed, [])
    words = TOKENIZER.decode(output).split(" and ")
    assert output[-1] == END
    assert set(words) <= {"red", "green", "blue"}


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_sequence_that_begins_again_continues_its_grammar_at_the_same_place(
    grammars: GrammarCompiler, num_tokens: int
) -> None:
    before = TOKENIZER.encode("[12, 7]", add_special_tokens=False).ids[:num_tokens]
    fresh, again = begin(grammars, NUMBERS, []), begin(grammars, NUMBERS, before)
    for token in before:
        fresh.accept(token)
    assert mx.array_equal(allowed(fresh), allowed(again))


def test_only_the_end_token_is_allowed_after_a_complete_answer(grammars: GrammarCompiler) -> None:
    tokens = TOKENIZER.encode("[1,2]", add_special_tokens=False).ids
    constraint = begin(grammars, NUMBERS, tokens)
    assert mx.argmax(allowed(constraint)).item() == END
    assert allowed(constraint).sum().item() == 1
    constraint.accept(END)
    constraint.accept(5)  # a step that was on its way
    assert json.loads(TOKENIZER.decode(tokens)) == [1, 2]


def test_a_grammar_so_slow_that_it_delays_every_row_fails_its_request(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text has more parses than the one before. A plain grammar still works afterwards."""
    monkeypatch.setattr(grammar, "_MAX_LATE_SECONDS", 0.05)
    monkeypatch.setattr(grammar, "_SECONDS_PER_TOKEN", 0.001)
    slow = LLMatcher.grammar_from_lark("start: s\ns: s s | s s s | /[a-z ]/")
    output: list[int] = []
    with fails(RequestError, "grammar_too_slow"):
        drawn(begin(grammars, slow, []), 1, output, stop=100)
    assert len(output) > 5
    plain = LLMatcher.grammar_from_regex("[a-z ]{200}")
    assert len(drawn(begin(grammars, plain, []), 1, [], stop=30)) == 30


def test_a_grammar_that_is_slow_to_prepare_fails_its_request(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_MAX_LATE_SECONDS", 0.02)
    slow = LLMatcher.grammar_from_json_schema({"type": "integer", "multipleOf": 99_991})
    with fails(RequestError, "grammar_too_slow"):
        allowed(begin(grammars, slow, []))


def test_rows_share_a_compiled_grammar_but_not_their_progress_in_it(
    grammars: GrammarCompiler,
) -> None:
    """The slow part is done once (twice, if two threads begin it together)."""
    first = begin(grammars, CHOICE, [])
    allowed(first)
    rows = [first, *(begin(grammars, CHOICE, []) for _ in range(7))]
    assert grammars._compiled.cache_info().misses == 1
    ends = [drawn(row, seed, []) for seed, row in enumerate(rows)]
    assert len(set(map(tuple, ends))) > 1
    assert all(end[-1] == END for end in ends)


def test_an_answer_that_breaks_its_grammar_fails_its_request(
    grammars: GrammarCompiler,
) -> None:
    wrong = TOKENIZER.encode("no list", add_special_tokens=False).ids
    with fails(RequestError, "grammar"):
        allowed(begin(grammars, NUMBERS, wrong))


def test_a_broken_grammar_raises_its_error_only_when_a_mask_is_asked_for(
    grammars: GrammarCompiler,
) -> None:
    """A token that a budget forces is accepted without a look at the mask."""
    constraint = begin(grammars, "start: nothing", [])
    constraint.accept(5)
    with pytest.raises(RequestError):
        allowed(constraint)


def test_before_a_grammar_begins_every_token_but_the_end_token_is_allowed(
    grammars: GrammarCompiler,
) -> None:
    """An answer that ends in its thoughts would lack what was demanded."""
    thought = TOKENIZER.encode("first a thought", add_special_tokens=False).ids
    mark = TOKENIZER.token_to_id("</tool_call>")
    constraint = begin(grammars, CHOICE, thought, free_until=mark)
    size = TOKENIZER.get_vocab_size()
    assert [id for id in range(size) if not allowed(constraint)[id].item()] == [END]
    constraint.accept(mark)
    assert 0 < allowed(constraint).sum().item() < 20


def test_reasoning_ends_with_its_mark_if_the_model_wants_to_end_its_answer(
    grammars: GrammarCompiler,
) -> None:
    mark = TOKENIZER.token_to_id("</tool_call>")
    constraint = begin(grammars, CHOICE, [], free_until=mark)
    logits = mx.zeros(NUM_LOGITS)
    logits[END] = 5.0
    assert mx.argmax(constraint.apply(logits)).item() == mark
    constraint.accept(mark)
    assert mx.argmax(allowed(constraint)).item() != mark
    endless = Constraint(grammars, Sampling(grammar=CHOICE, free_until=mark), [])
    assert allowed(endless)[END].item()


def test_an_end_token_that_also_ends_reasoning_is_allowed(grammars: GrammarCompiler) -> None:
    assert allowed(begin(grammars, CHOICE, [], free_until=END))[END].item()


def ids_of(*texts: str) -> list[int]:
    return [TOKENIZER.token_to_id(text) for text in texts]


def test_a_stop_token_that_the_grammar_allows_can_come_early() -> None:
    letters = LLMatcher.grammar_from_regex("[ab]{5}")
    a, b, c = ids_of("a", "b", "c")
    sampling = Sampling(grammar=letters, end_ids=(END, a, c))
    mask = allowed(Constraint(GrammarCompiler(MODEL), sampling, []))
    assert [bool(mask[id].item()) for id in (a, b, c, END)] == [True, True, False, False]
    complete = allowed(Constraint(GrammarCompiler(MODEL), sampling, [b] * 5))
    assert [bool(complete[id].item()) for id in (a, b, c, END)] == [True, False, True, True]


def test_a_grammar_that_leaves_no_allowed_token_fails_its_request(
    grammars: GrammarCompiler,
) -> None:
    a, b, c = ids_of("a", "b", "c")
    first_a = LLMatcher.grammar_from_regex("ab*")
    sampling = Sampling(grammar=first_a, end_ids=(END,), allowed_ids=(a, c))
    constraint = Constraint(grammars, sampling, [])
    assert allowed(constraint)[a].item()
    with pytest.raises(RequestError) as caught:
        allowed(Constraint(grammars, Sampling(grammar=first_a, allowed_ids=(b, c)), []))
    assert caught.value.code == grammar.CONFLICT


FOLLOW_PROGRAM = """
import sys
from pathlib import Path
import mlx.core as mx
from serve.core.types import Reasoning, Sampling
from serve.rank.grammar import Constraint, GrammarCompiler
constraint = Constraint(GrammarCompiler(Path(sys.argv[1])), Sampling(grammar=sys.stdin.read()), [])
print((constraint.apply(mx.zeros(1000)) == 0).sum().item())
"""


@pytest.mark.parametrize("limit", ["2048", "8192", "unlimited"])
def test_threads_that_match_tokens_follow_grammars_twice_as_deep_as_the_limit(limit: str) -> None:
    num_rules = 2 * MAX_RULES
    rules = [f'r{n}: "a" r{n + 1}' for n in range(num_rules)]
    text = "\n".join(["start: r0", *rules, f'r{num_rules}: "b"'])
    shell = ["bash", "-c", f'ulimit -s {limit} && exec "$@"', "bash"]
    command = [*shell, sys.executable, "-c", FOLLOW_PROGRAM, str(MODEL)]
    completed = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert (completed.returncode, completed.stdout) == (0, "1\n"), completed.stderr


SPECIAL = ["<tool_call>", "a<|end|>b", "[<tool_call>, <|end|>]"]
OF_SPECIAL: dict[str, Callable[[str], str]] = {
    "regex": lambda text: LLMatcher.grammar_from_regex(re.escape(text)),
    "choice": lambda text: LLMatcher.grammar_from_regex(f"({re.escape(text)}|{re.escape(text)})"),
    "schema": lambda text: LLMatcher.grammar_from_json_schema({"const": text}),
    "lark": lambda text: LLMatcher.grammar_from_lark(f"start: {json.dumps(text)}"),
}


@pytest.mark.parametrize("text", SPECIAL)
@pytest.mark.parametrize("kind", OF_SPECIAL)
def test_text_that_looks_like_a_special_token_is_spelled_out(
    grammars: GrammarCompiler, kind: str, text: str
) -> None:
    """It became that token, which the grammar then refused: a request with it ended with 400."""
    output = drawn(begin(grammars, OF_SPECIAL[kind](text), []), 1, [])
    assert output[-1] == END
    assert TOKENIZER.token_to_id("<tool_call>") not in output
    spelled = TOKENIZER.decode(output[:-1])
    assert (json.loads(spelled) if kind == "schema" else spelled) == text
    again = begin(grammars, OF_SPECIAL[kind](text), output[:3])
    assert drawn(again, 2, output[:3])[-1] == END


def test_a_special_token_named_in_a_grammar_is_a_single_token(grammars: GrammarCompiler) -> None:
    named = LLMatcher.grammar_from_lark("start: <tool_call> /a{3}/")
    output = drawn(begin(grammars, named, []), 1, [])
    assert output[0] == TOKENIZER.token_to_id("<tool_call>")
    assert TOKENIZER.decode(output[1:-1]) == "aaa"


def test_a_character_that_a_budget_interrupts_is_taken_back(
    grammars: GrammarCompiler,
) -> None:
    """Byte tokens of a character have no mark between them in any grammar of text."""
    mark = TOKENIZER.token_to_id("</tool_call>")
    grammar = LLMatcher.grammar_from_lark(f"start: TEXT <[{mark}]> /[0-9]+/\nTEXT: /(.|\\n)*/")
    reasoning = Reasoning((1,), (mark,), is_open=True, budget=3)
    sampling = Sampling(grammar=grammar, end_ids=(END,), reasoning=reasoning)
    emoji = TOKENIZER.encode("a\N{GRINNING FACE}").ids
    assert len(emoji) >= 4
    for length in range(len(emoji) + 1):
        constraint = Constraint(grammars, sampling, [*emoji[:length], mark])
        digit = TOKENIZER.encode("7").ids[-1]
        assert allowed(constraint)[digit].item()
        assert not allowed(constraint)[mark].item()


@pytest.mark.parametrize(
    ("text", "is_whole"), [("[12, 7]", True), ("[12, 7", True), ("[12, x7]", False), ("no", False)]
)
def test_drafts_are_allowed_as_far_as_they_follow_the_grammar(
    grammars: GrammarCompiler, text: str, is_whole: bool
) -> None:
    drafts = tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)
    constraint = begin(grammars, NUMBERS, [])
    num_allowed = constraint.num_allowed(drafts)
    assert (num_allowed == len(drafts)) is is_whole
    for draft in drafts[:num_allowed]:
        assert allowed(constraint)[draft].item()
        constraint.accept(draft)
    if not is_whole:
        assert not allowed(constraint)[drafts[num_allowed]].item()


def test_drafts_after_the_end_and_in_reasoning_are_allowed(
    grammars: GrammarCompiler,
) -> None:
    whole = tuple(TOKENIZER.encode("[1, 2]", add_special_tokens=False).ids)
    constraint = begin(grammars, NUMBERS, [])
    assert constraint.num_allowed((*whole, END, 5)) == len(whole) + 2
    mark = TOKENIZER.token_to_id("</tool_call>")
    thinking = begin(grammars, NUMBERS, [], free_until=mark)
    assert thinking.num_allowed((5, 6, 7)) == 3
