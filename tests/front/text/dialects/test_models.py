"""Whole small models of every family: found, prompted, answered and read, in tokens."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.core.errors import RequestError, UsageError
from serve.core.tool_parsers import OWN_FORMATS, call_formats
from serve.front.text.calls.parts import CallHeader, CallText, Text, Thought
from serve.front.text.dialects.detect import NAMED
from serve.front.text.dialects.generic import GENERIC_CALLS
from serve.front.text.dialects.grammar import tool_grammar
from serve.front.text.tokens import Tokenizer
from tests.errors import fails
from tests.front.text.dialects.answers import TOOLS, Json, calls_in, read, reader_of
from tests.front.text.dialects.models import MODELS, save
from tests.front.text.dialects.test_families import FAMILIES

GENERIC = {"gemma3"}
names = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Tokenizer(save(name, folder / name)) for name in MODELS}


def call(name: str, arguments: Json) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": function}


HISTORY: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Write it."},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I must write.",
        "tool_calls": [call("write", {"path": "a.py"})],
    },
    {"role": "tool", "content": "written: 5 bytes", "tool_call_id": "abcdefghi"},
]


@names
def test_the_dialect_of_each_model_is_found(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    found = tokenizers[name].dialect
    expected = {"qwen3": "qwen", "qwen3_coder": "qwen_coder", "gemma3": "generic"}
    assert found.name == expected.get(name, name)
    marks = found.reasoning and (found.reasoning.start, found.reasoning.end)
    without = {"gemma3", "llama", "mistral_list"}
    assert bool(marks) == (name not in without)


@names
def test_a_prompt_contains_tools_and_calls_and_their_results(
    name: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    prompt = tokenizer.render(HISTORY, {}, tools=TOOLS)
    for text in ("Be brief.", "Write it.", "a.py", "written: 5 bytes"):
        assert prompt.count(text) == 1, prompt
    assert "write" in prompt.partition("Write it.")[0]  # the declaration
    assert tokenizer.encode(prompt)
    if tokenizer.dialect.calls is not None:
        earlier = prompt.partition("Write it.")[2]
        if name != "llama":
            assert tokenizer.dialect.calls.start in earlier
            begin = earlier.index(tokenizer.dialect.calls.start)
            parts = read(reader_of(tokenizer.dialect), [earlier[begin:]])
            assert calls_in(parts[:3]) == [("write", {"path": "a.py"})]


@names
def test_an_answer_is_read_from_its_tokens(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Marks are special tokens of the vocabulary, which readers need to see."""
    tokenizer = tokenizers[name]
    dialect = tokenizer.dialect
    if name == "harmony":
        answer = (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.write <|constrain|>json<|message|>{"path": "a.py"}'
        )
        expected: list[Any] = [Thought("hm"), CallHeader("write"), CallText('{"path": "a.py"}')]
    else:
        assert dialect.calls is not None
        written = FAMILIES[name if name in FAMILIES else "generic"][1]("write", {"path": "a.py"})
        answer = f"{dialect.calls.start}{written}{dialect.calls.end}"
        expected = [CallHeader("write"), CallText('{"path": "a.py"}')]
        if name != "llama":
            answer = f"Yes.{answer}"
            expected = [Text("Yes."), *expected]
        if dialect.reasoning is not None:
            answer = f"{dialect.reasoning.start}hm{dialect.reasoning.end}{answer}"
            expected = [Thought("hm"), *expected]
    stream = tokenizer.stream(keep_marks=True)
    pieces = [stream.push(token) for token in tokenizer.encode(answer)] + [stream.finish()]
    parts = read(reader_of(dialect), pieces)
    for part in parts:
        if isinstance(part, CallHeader):
            assert part.name == "write"
    assert [type(part) for part in parts[: len(expected)]] == [type(part) for part in expected]
    assert [getattr(part, "text", None) for part in parts[: len(expected)]] == [
        getattr(part, "text", None) for part in expected
    ]


@names
def test_the_tool_grammar_of_each_model_can_be_compiled(
    name: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    grammar = tokenizer.tool_grammar(TOOLS)
    assert grammar is not None
    tokenizer.grammars.check(grammar.text, "tools")


@names
def test_the_tool_grammar_does_not_restrict_reasoning(
    name: str, tokenizers: dict[str, Tokenizer]
) -> None:
    """Models that open their reasoning themselves need its marks, which may be several tokens."""
    tokenizer = tokenizers[name]
    reasoning = tokenizer.dialect.reasoning
    grammar = tokenizer.tool_grammar(TOOLS)
    assert grammar is not None
    text = "Hello."
    if name == "harmony":
        text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        text += "<|channel|>final<|message|>Hello."
    elif reasoning is not None:
        text = f"{reasoning.start}\nhm, {{1}}\n{reasoning.end}Hello."
    folder = str(tokenizer.folder / "tokenizer.json")
    matcher = LLMatcher(LLTokenizer(folder), grammar.text, log_level=0)
    tokens = tokenizer.encode(text)
    assert matcher.try_consume_tokens(tokens) == len(tokens), matcher.get_error()
    assert matcher.is_accepting()


@names
def test_reasoning_is_turned_off_by_a_variable_of_the_template(
    name: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    reasoning = tokenizer.dialect.reasoning
    asked = [{"role": "user", "content": "hi"}]
    if reasoning is None or (reasoning.switch is None and reasoning.effort is None):
        assert name in {"gemma3", "llama", "mistral_list", "mistral", "qwen3_coder", "minimax_m2"}
        return
    if reasoning.switch is not None:
        on, off = (
            tokenizer.render(asked, reasoning.variables(None, enabled)) for enabled in (True, False)
        )
        assert on != off
        opened = [text.rstrip().endswith(reasoning.start) for text in (on, off)]
        assert not opened[1]
        assert reasoning.variables("none") == reasoning.variables(None, False)
    if reasoning.effort is not None:
        low, high = (
            tokenizer.render(asked, reasoning.variables(effort)) for effort in ("minimal", "max")
        )
        assert low != high


def test_harmony_maps_efforts_and_keeps_earlier_reasoning_in_the_prompt(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["harmony"]
    reasoning = tokenizer.dialect.reasoning
    assert reasoning is not None
    assert reasoning.variables("minimal") == {"reasoning_effort": "low"}
    assert reasoning.variables("xhigh") == {"reasoning_effort": "high"}
    assert "<|channel|>analysis<|message|>I must write.<|end|>" in tokenizer.render(HISTORY, {})
    ids = {tokenizer.id_of("<|return|>"), tokenizer.id_of("<|call|>")}
    assert tokenizer.eos_ids == ids


def test_harmony_answers_are_read_as_openai_harmony_reads_them() -> None:
    """The cases were rendered and parsed by openai-harmony 0.0.8 with its own vocabulary, which is
    not in the package."""
    cases = json.loads(Path(__file__).with_name("harmony_cases.json").read_text())
    assert len(cases) == 40
    for case in cases:
        parts = read(reader_of(NAMED["harmony"]), list(case["text"]))
        got: list[list[str]] = []
        for part in parts:
            if isinstance(part, CallHeader):
                got.append(["call", part.name])
            elif isinstance(part, CallText):
                got[-1].append(part.text)
            elif isinstance(part, Text | Thought):
                got.append(["text" if isinstance(part, Text) else "thought", part.text])
        assert got == case["parts"]


def test_the_prompt_of_deepseek_v32_equals_that_of_mlx_lm(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["deepseek_v32"]
    asked = [{"role": "user", "content": "hi"}]
    begin = "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>"
    assert tokenizer.render(asked, {}) == f"{begin}<think>"
    assert tokenizer.render(asked, {"enable_thinking": False}) == f"{begin}</think>"
    # Without a message of the system, tools make one.
    assert '"name": "write"' in tokenizer.render(asked, {}, tools=TOOLS)


def test_the_prompt_of_deepseek_v31_lists_tools_as_its_model_card_does(
    tokenizers: dict[str, Tokenizer],
) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get_weather", "description": "Weather now", "parameters": parameters}
    two = [{"type": "function", "function": {**function, "name": name}} for name in ("a", "b")]
    prompt = tokenizers["deepseek_v31"].render(HISTORY[:2], {}, tools=two)
    listed = "".join(
        f"### {name}\nDescription: Weather now\n\nParameters: {json.dumps(parameters)}\n\n"
        for name in ("a", "b")
    )
    assert prompt.startswith(
        "<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\nYou have access to the following tools:\n\n"
        f"{listed}IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments"
        "<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>\n\nWhere:\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
        "Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces\n"
        "<｜User｜>"
    )


def test_the_prompt_of_deepseek_v4_joins_tool_results_with_questions(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """As DeepSeek's published encoding of V4 writes it."""
    tokenizer = tokenizers["deepseek_v4"]
    prompt = tokenizer.render(HISTORY, {}, tools=TOOLS)
    assert prompt.startswith("<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\n\n")
    assert prompt.endswith(
        "to invoke tool calls.\n<｜User｜>Write it.<｜Assistant｜><think>I must write.</think>\n\n"
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n'
        '<｜DSML｜parameter name="path" string="true">a.py</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>written: 5 bytes</tool_result><｜Assistant｜><think>"
    )
    more = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "old"},
        {"role": "user", "content": "c"},
    ]
    assert tokenizer.render(more, {}) == (
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>b<｜end▁of▁sentence｜>"
        "<｜User｜>c<｜Assistant｜><think>"
    )
    assert tokenizer.render(more, {"enable_thinking": False}).endswith("c<｜Assistant｜></think>")
    hard = tokenizer.render(more, {"reasoning_effort": "max"})
    assert hard.startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum")


def test_the_prompt_of_deepseek_v4_sorts_tool_results_by_their_calls(
    tokenizers: dict[str, Tokenizer],
) -> None:
    calls = [{**call("now", {}), "id": id} for id in ("one", "two")]
    results = [{"role": "tool", "content": id, "tool_call_id": id} for id in ("two", "one")]
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
        {"role": "user", "content": "and?"},
    ]
    prompt = tokenizers["deepseek_v4"].render(history, {})
    joined = "<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>\n\nand?"
    assert f"<｜User｜>{joined}<｜Assistant｜>" in prompt


def test_tools_are_described_even_in_a_template_without_tools_and_system_messages(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """Gemma 3 refuses a system's message and roles that do not alternate."""
    tokenizer = tokenizers["gemma3"]
    history = [*HISTORY, {"role": "user", "content": "Good?"}]
    prompt = tokenizer.render(history, {}, tools=TOOLS)
    assert prompt.startswith("<bos><start_of_turn>user\nBe brief.\n\n# Tools")
    assert prompt.endswith(
        "<start_of_turn>model\n<tool_call>\n"
        '{"name": "write", "arguments": {"path": "a.py"}}\n</tool_call><end_of_turn>\n'
        "<start_of_turn>user\n<tool_response>\nwritten: 5 bytes\n</tool_response>\nGood?"
        "<end_of_turn>\n<start_of_turn>model\n"
    )
    described = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line)["name"] for line in described] == ["write", "now"]
    assert tokenizer.dialect.calls == GENERIC_CALLS
    with pytest.raises(RequestError):
        tokenizer.render(HISTORY[:2], {})  # What a template refuses without tools stays refused.


def test_a_history_with_calls_can_be_rendered_without_tools(
    tokenizers: dict[str, Tokenizer],
) -> None:
    for name, tokenizer in tokenizers.items():
        history = HISTORY[1:] if name == "gemma3" else HISTORY
        assert "written: 5 bytes" in tokenizer.render(history, {}), name


def test_arguments_are_given_as_text_only_to_templates_that_need_text(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """V3.1's template joins texts; a conversion of it may have `tojson` instead."""
    wanting = {name for name, each in tokenizers.items() if each._wants_text_arguments}
    assert wanting == {"deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4"}


def test_a_template_gets_a_description_even_if_the_tool_has_no_description(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """gpt-oss' template fails for a tool without a description."""
    prompt = tokenizers["harmony"].render(HISTORY, {}, tools=TOOLS)
    assert "// \ntype write = " in prompt
    with pytest.raises(RequestError):
        tokenizers["gemma3"].render([{"role": "assistant", "content": "a"}], {}, tools=None)


def test_a_word_in_a_comment_of_a_template_is_not_taken_for_a_variable(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """The template of MiniMax M2 mentions thinking in a comment and as a field."""
    reasoning = tokenizers["minimax_m2"].dialect.reasoning
    assert reasoning is not None
    assert reasoning.switch is None


def test_the_parser_of_calls_can_be_chosen_by_its_name(tmp_path: Path) -> None:
    folder = save("gemma3", tmp_path)
    assert Tokenizer(folder, "mistral").dialect.calls == NAMED["mistral"].calls
    longcat = Tokenizer(folder, "longcat").dialect
    assert longcat.calls is not None
    assert longcat.calls.start == "<longcat_tool_call>"
    with fails(UsageError, "unknown_name", match="deepseek_v31"):
        Tokenizer(folder, "none")


def test_rendering_a_prompt_does_not_import_mlx(tmp_path: Path) -> None:
    folder = save("deepseek_v32", tmp_path)
    code = (
        "import sys, pathlib; from serve.front.text.tokens import Tokenizer; "
        f"t = Tokenizer(pathlib.Path({str(folder)!r})); "
        "t.render([{'role': 'user', 'content': 'x'}], {}); "
        "assert not {'mlx', 'mlx.core', 'mlx_lm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_value_of_the_flag_tool_call_parser_has_a_dialect() -> None:
    assert set(NAMED) <= set(call_formats())
    assert set(OWN_FORMATS) <= set(NAMED)


def test_a_chosen_tool_parser_with_a_grammar_gives_a_tool_grammar() -> None:
    assert tool_grammar(NAMED["qwen3_coder"], TOOLS, lambda _: None) is not None
