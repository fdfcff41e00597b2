"""Every family: calls as its models write them, compared with mlx-lm's parser where it has one."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from serve.front.text.calls.parts import CallEnd, CallHeader, CallText, Text, Thought
from serve.front.text.dialects import (
    deepseek,
    gemma,
    generic,
    glm,
    harmony,
    kimi,
    llama,
    minimax,
    mistral,
    nemotron,
    qwen,
)
from serve.front.text.dialects.interface import Dialect
from serve.front.text.tool_formats import parsed_calls, tool_format
from tests.front.text.dialects.answers import (
    ARGUMENTS,
    TOOLS,
    Json,
    calls_in,
    every_way,
    joined,
    reader_of,
)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def json_call(name: str, arguments: Json) -> str:
    return f"\n{dumped({'name': name, 'arguments': arguments})}\n"


def coder_call(name: str, arguments: Json) -> str:
    values = "".join(
        f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"\n<function={name}>\n{values}</function>\n"


def glm_call(name: str, arguments: Json) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"{name}\n{values}"


def m2_call(name: str, arguments: Json) -> str:
    values = "".join(
        f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in arguments.items()
    )
    return f'\n<invoke name="{name}">\n{values}</invoke>\n'


def m3_call(name: str, arguments: Json) -> str:
    mark = "]<]minimax[>["

    def value_of(value: Any) -> str:
        if isinstance(value, dict) and value:
            return "".join(f"{mark}<{k}>{value_of(v)}{mark}</{k}>" for k, v in value.items())
        if isinstance(value, list) and value:
            return "".join(f"{mark}<item>{value_of(each)}{mark}</item>" for each in value)
        return plain(value)

    values = "".join(f"{mark}<{k}>{value_of(v)}{mark}</{k}>\n" for k, v in arguments.items())
    return f'\n{mark}<invoke name="{name}">\n{values}{mark}</invoke>\n'


def kimi_call(name: str, arguments: Json) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{dumped(arguments)}"
        "<|tool_call_end|>"
    )


def v31_call(name: str, arguments: Json) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(arguments)}<｜tool▁call▁end｜>"


def v3_call(name: str, arguments: Json) -> str:
    fenced = f"```json\n{dumped(arguments)}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{fenced}<｜tool▁call▁end｜>"


def dsml_call(name: str, arguments: Json) -> str:
    values = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{plain(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'\n<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        pairs = ",".join(f"{key}:{gemma_value(each)}" for key, each in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    return dumped(value)


def gemma_call(name: str, arguments: Json) -> str:
    return f"call:{name}{gemma_value(arguments)}"


def mistral_call(name: str, arguments: Json) -> str:
    return f"{name}[ARGS]{dumped(arguments)}"


def listed_call(name: str, arguments: Json) -> str:
    return f"[{dumped({'name': name, 'arguments': arguments})}]"


def llama_call(name: str, arguments: Json) -> str:
    return dumped({"name": name, "parameters": arguments})


Writer = Callable[[str, Json], str]

# The dialect, how it writes what stands between its marks, and the name of mlx-lm's parser.
FAMILIES: dict[str, tuple[Dialect, Writer, str | None]] = {
    "qwen3": (qwen.QWEN, json_call, "json_tools"),
    "qwen3_coder": (qwen.QWEN_CODER, coder_call, "qwen3_coder"),
    "glm": (glm.GLM, glm_call, "glm47"),
    "minimax_m2": (minimax.MINIMAX_M2, m2_call, "minimax_m2"),
    "minimax_m3": (minimax.MINIMAX_M3, m3_call, None),
    "kimi_k2": (kimi.KIMI_K2, kimi_call, "kimi_k2"),
    "deepseek_v3": (deepseek.DEEPSEEK_V3, v3_call, None),
    "deepseek_v31": (deepseek.DEEPSEEK_V31, v31_call, None),
    "deepseek_v32": (deepseek.DEEPSEEK_V32, dsml_call, None),
    "deepseek_v4": (deepseek.DEEPSEEK_V4, dsml_call, None),
    "gemma4": (gemma.GEMMA4, gemma_call, "gemma4"),
    "mistral": (mistral.MISTRAL, mistral_call, "mistral"),
    "mistral_list": (mistral.MISTRAL_LIST, listed_call, "mistral"),
    "nemotron": (nemotron.NEMOTRON, listed_call, None),
    "llama": (llama.LLAMA, llama_call, None),
    "generic": (generic.GENERIC, json_call, "json_tools"),
}
families = pytest.mark.parametrize("name", FAMILIES)


@families
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_a_call_is_read_with_the_arguments_it_was_written_with(name: str, arguments: Json) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    body = write("write", arguments)
    parts = every_way(dialect, f"I write.\n{dialect.calls.start}{body}{dialect.calls.end}")
    assert parts[0] == Text("I write.")
    assert calls_in(parts) == [("write", arguments)]
    assert [type(part) for part in parts[1:]] == [CallHeader, CallText, CallEnd]


def stripped(value: Any) -> Any:
    """mlx-lm strips some values, and changes strings that look like null."""
    if isinstance(value, dict):
        return {key: stripped(each) for key, each in value.items()}
    return value.strip() if isinstance(value, str) else value


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family[2]])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_calls_equal_those_that_the_parser_of_mlx_lm_reads(name: str, arguments: Json) -> None:
    dialect, write, parser = FAMILIES[name]
    assert dialect.calls is not None
    assert parser is not None
    body = write("write", arguments)
    expected = parsed_calls(tool_format(parser).parse(body, TOOLS))
    parts = every_way(dialect, f"{dialect.calls.start}{body}{dialect.calls.end}")
    got = [(name, stripped(arguments)) for name, arguments in calls_in(parts)]
    assert got == [(call.name, stripped(json.loads(call.arguments))) for call in expected]
    ids = [part.id for part in parts if isinstance(part, CallHeader)]
    assert ids == [call.id for call in expected]


@families
def test_a_call_without_arguments_gets_an_empty_object(name: str) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    parts = every_way(dialect, f"{dialect.calls.start}{write('now', {})}{dialect.calls.end}")
    assert calls_in(parts) == [("now", {})]


@families
def test_several_calls_can_follow_each_other(name: str) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    start, end = dialect.calls.start, dialect.calls.end
    written = [write("write", {"path": str(number)}) for number in range(3)]
    text = "\n".join(f"{start}{call}{end}" for call in written)
    if name in ("llama", "mistral_list"):  # One mark for all calls.
        text = start + "; ".join(written)
    assert calls_in(every_way(dialect, text)) == [("write", {"path": str(n)}) for n in range(3)]


@families
def test_the_name_of_a_call_is_read_first_and_its_arguments_while_they_are_written(
    name: str,
) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    body = write("write", {"path": "a.py", "text": "x" * 400})
    reader = reader_of(dialect)
    seen: list[Any] = []
    num_before_the_end = 0
    for character in dialect.calls.start + body:
        seen += reader.feed(character)
        num_before_the_end = len(seen)
    assert isinstance(seen[0], CallHeader)
    assert all(isinstance(part, CallText | CallEnd) for part in seen[1:])
    assert num_before_the_end > 300


@families
def test_a_call_that_was_cut_off_is_not_complete_json(name: str) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    text = dialect.calls.start + write("write", {"path": "a.py", "text": "abcdefgh"})
    parts = every_way(dialect, text[: text.index("efgh")])
    assert isinstance(parts[0], CallHeader)
    assert isinstance(parts[-1], CallText)
    with pytest.raises(ValueError, match="."):
        json.loads(parts[-1].text)


@families
@pytest.mark.parametrize("body", ["", " ", "no call at all", "\n<b>", "{}", '{"a": 1}', "[]"])
def test_text_that_is_not_a_call_is_kept_as_text(name: str, body: str) -> None:
    dialect, _, _ = FAMILIES[name]
    assert dialect.calls is not None
    text = f"Look: {dialect.calls.start}{body}{dialect.calls.end} end"
    if not dialect.calls.end:
        text = f"Look: {dialect.calls.start}{body}"
    parts = every_way(dialect, text)
    assert [type(part) for part in parts] == [Text]
    assert "".join(part.text for part in parts if isinstance(part, Text)) == text


@families
def test_reasoning_is_read_from_between_its_marks(name: str) -> None:
    dialect, write, _ = FAMILIES[name]
    if dialect.reasoning is None or dialect.calls is None:
        return
    begin, end = dialect.reasoning.start, dialect.reasoning.end
    call = f"{dialect.calls.start}{write('now', {})}{dialect.calls.end}"
    parts = every_way(dialect, f"{begin}hm{end}Yes.{call}")
    assert parts[:2] == [Thought("hm"), Text("Yes.")]
    assert calls_in(parts) == [("now", {})]
    assert every_way(dialect, f"hm{end}Yes.", thinks=True) == [Thought("hm"), Text("Yes.")]
    # A call inside of thoughts is none.
    assert every_way(dialect, f"{begin}{call}{end}x") == [Thought(call), Text("x")]


@families
def test_readers_can_be_sent_to_another_process(name: str) -> None:
    dialect, write, _ = FAMILIES[name]
    assert dialect.calls is not None
    reader = pickle.loads(pickle.dumps(reader_of(dialect)))
    text = f"{dialect.calls.start}{write('now', {})}{dialect.calls.end}"
    assert calls_in(joined([*reader.feed(text), *reader.finish()])) == [("now", {})]


# --- what only one family has


def test_kimi_calls_keep_the_id_that_the_model_wrote() -> None:
    section = kimi.KIMI_K2.calls
    assert section is not None
    body = kimi_call("write", {"path": "a"}).replace(":0", ":7")
    parts = every_way(kimi.KIMI_K2, f"{section.start}{body}{section.end}")
    assert parts[0] == CallHeader("write", "functions.write:7")


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"name": "now", "parameters": {}}', "now", {}),
        ('<|python_tag|>{"name": "now", "parameters": {"a": 1}}', "now", {"a": 1}),
        ('{"type": "function", "name": "now", "parameters": {}}', "now", {}),
        ("[now()]", "now", {}),
        ('[write(path="a, b", lines=[1, 2], deep=true)]', "write", None),
    ],
)
def test_llama_calls_are_read_without_a_mark(text: str, name: str, arguments: Json | None) -> None:
    expected = {"path": "a, b", "lines": [1, 2], "deep": True} if arguments is None else arguments
    assert calls_in(every_way(llama.LLAMA, text)) == [(name, expected)]


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Rome"}',
        '{"name": "Rome", "parameters": {}}',
        '{"size": 1, "name": "now"}',
        "[1, 2]",
        "[link](url)",
        "{",
        "[a for",
    ],
)
def test_llama_text_that_only_begins_like_calls_is_kept_as_text(text: str) -> None:
    assert every_way(llama.LLAMA, text) == [Text(text)]


def m3(*tags: Any) -> str:
    """Tags of MiniMax M3: a key with a value, or with tags."""
    mark = "]<]minimax[>["
    return "".join(
        f"{mark}<{key}>{value if isinstance(value, str) else m3(*value)}{mark}</{key}>"
        for key, value in tags
    )


def test_nested_values_of_minimax_m3_get_the_types_of_their_schema() -> None:
    """Beyond the first level every value was read as JSON if it looked like it, and a tag ended at
    the first end tag of its name."""
    address = {"zip": {"type": "string"}, "floor": {"type": "integer"}}
    properties = {
        "to": {"type": "object", "properties": address},
        "grid": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "any": {"anyOf": [{"type": "object", "properties": address}, {"type": "null"}]},
        "node": {"type": "object", "properties": {"node": {"type": "object"}}},
    }
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "send", "parameters": parameters}}]
    body = m3(
        ("to", [("zip", "018956"), ("floor", "007")]),
        ("grid", [("item", [("item", "1"), ("item", "2")]), ("item", [("item", "3")])]),
        ("labels", [("a", "1"), ("b", "null")]),
        ("any", [("zip", "12")]),
        ("node", [("node", [("tag", "x"), ("tag", "y")])]),
    )
    mark = "]<]minimax[>["
    call = f'{mark}<tool_call>{mark}<invoke name="send">{body}{mark}</invoke>{mark}</tool_call>'
    ((_, got),) = calls_in(every_way(minimax.MINIMAX_M3, call, tools=tools))
    assert got == {
        "to": {"zip": "018956", "floor": 7},
        "grid": [[1, 2], [3]],
        "labels": {"a": "1", "b": "null"},
        "any": {"zip": "12"},
        "node": {"node": {"tag": ["x", "y"]}},
    }


def test_mistral_calls_with_ids_and_in_older_lists_are_read() -> None:
    text = '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]now{"a": 1}'
    parts = every_way(mistral.MISTRAL, text)
    assert calls_in(parts) == [("now", {}), ("now", {"a": 1})]
    assert parts[0] == CallHeader("now", "abcdefghi")
    old = '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "123456789"}]'
    assert calls_in(every_way(mistral.MISTRAL, old)) == [("now", {})]


def test_a_string_argument_that_looks_like_another_type_is_kept_as_text() -> None:
    arguments = {"path": "null", "text": "\n two\n\n", "note": "null"}
    for dialect, write in ((qwen.QWEN_CODER, coder_call), (deepseek.DEEPSEEK_V32, dsml_call)):
        assert dialect.calls is not None
        text = f"{dialect.calls.start}{write('write', arguments)}{dialect.calls.end}"
        ((_, got),) = calls_in(every_way(dialect, text))
        assert got["path"] == "null"
        assert got["text"] == "\n two\n\n"


def test_json_arguments_can_come_before_the_name_or_as_a_string() -> None:
    for body in (
        '{"arguments": {"a": "}"}, "name": "now"}',
        '{"name": "now", "arguments": "{\\"a\\": \\"}\\"}"}',
        '{"id": "x", "name": "now", "arguments": {"a": "}"}, "more": [{}]}',
    ):
        text = f"<tool_call>{body}</tool_call>"
        assert calls_in(every_way(qwen.QWEN, text)) == [("now", {"a": "}"})]


def test_many_texts_that_look_like_calls_take_linear_time() -> None:
    """Each failed call is read again as text, so their number is bounded."""
    for name in FAMILIES:
        dialect, _, _ = FAMILIES[name]
        assert dialect.calls is not None
        text = (dialect.calls.start + '{"x": "') * 2000
        parts = reader_of(dialect)
        given = [*parts.feed(text), *parts.finish()]
        assert sum(len(part.text) for part in given if isinstance(part, Text)) == len(text)


# --- harmony

HARMONY = harmony.HARMONY


def test_harmony_channels_become_reasoning_and_text_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>User asks.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
        '{"path": "a"}<|call|>'
    )
    parts = every_way(HARMONY, text)
    assert parts == [
        Thought("User asks."),
        Text("I look."),
        CallHeader("write"),
        CallText('{"path": "a"}'),
        CallEnd(),
    ]
    recipient = (
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    parts = every_way(HARMONY, recipient)
    assert parts == [CallHeader("now"), CallText("{}"), CallEnd(), Text("Done.")]


def test_harmony_text_without_a_header_is_kept_as_text() -> None:
    assert every_way(HARMONY, "plain words") == [Text("plain words")]
    assert every_way(HARMONY, "<|channel|>ana") == []
