"""Tools and choices in the words of several servers, and the answers in OpenAI's older words."""

from typing import Any

import pytest

from serve.core.errors import RequestError
from serve.front.api.openai import ChatBody, parse
from serve.front.api.tools import MAX_TOOLS, NamedTool, Tool, ToolChoice, grammar_of_call
from serve.front.api.writers.chat import ChatWriter, WholeChat
from serve.front.output.deltas import CallBegin, CallEnd, CallText
from serve.front.text.tokens import Tokenizer
from tests.errors import fails
from tests.front.api.test_chat import job
from tests.front.api.writers.updates import begin, end

USER = {"role": "user", "content": "hi"}


def tool(name: str, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}, **others}


def body(**fields: Any) -> ChatBody:
    return parse(ChatBody, {"messages": [USER], **fields})


def offered(**fields: Any) -> tuple[list[str], Any]:
    tools, choice = body(**fields).offered
    return [each.function.name for each in tools], choice


@pytest.mark.parametrize("name", ["a:b", "mcp__server/tool", "x" * 128, "a.b-c_d"])
def test_tool_names_with_the_characters_of_gateways_are_accepted(name: str) -> None:
    assert offered(tools=[tool(name)])[0] == [name]


def test_the_largest_allowed_number_of_tools_is_accepted_and_one_tool_more_refused() -> None:
    assert len(offered(tools=[tool(f"f{n}") for n in range(MAX_TOOLS)])[0]) == MAX_TOOLS == 1024
    with pytest.raises(RequestError) as caught:
        body(tools=[tool("f")] * (MAX_TOOLS + 1))
    assert caught.value.param == "tools"


def test_unknown_keys_of_tools_are_ignored() -> None:
    hints = {"cache_control": {"type": "ephemeral"}, "defer_loading": True}
    with_hints = tool("f", **hints)
    with_hints["function"] = {"name": "f", "returns": {}, "eager_input_streaming": True}
    assert body(tools=[with_hints]).tools == body(tools=[tool("f")]).tools


def test_a_tool_choice_of_any_means_required() -> None:
    assert offered(tools=[tool("f")], tool_choice="any") == (["f"], "required")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered_to_the_model(mode: str) -> None:
    allowed = {"mode": mode, "tools": [tool("b")]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert offered(tools=[tool("a"), tool("b")], tool_choice=choice) == (["b"], mode)
    with pytest.raises(RequestError) as caught:
        offered(tools=[tool("a")], tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_functions_of_the_older_form_are_read_as_tools() -> None:
    functions = [{"name": "f", "parameters": {"type": "object"}}]
    assert offered(functions=functions) == (["f"], "auto")
    assert offered(functions=functions, function_call="none") == (["f"], "none")
    names, choice = offered(functions=functions, function_call={"name": "f"})
    assert names == ["f"]
    assert isinstance(choice, NamedTool)
    assert not body(functions=functions).is_parallel
    with pytest.raises(RequestError) as caught:
        body(functions=functions, tools=[tool("g")])
    assert caught.value.param == "functions"


def test_calls_are_returned_in_the_older_form_if_functions_were_sent(tokenizer: Tokenizer) -> None:
    asked = job(tokenizer, 2000, functions=[{"name": "f"}], function_call="none")
    updates = [begin(CallBegin("1", "f"), CallText('{"x"'), CallText(":1}"), CallEnd())]
    updates.append(end("tool_calls"))
    writer, whole = ChatWriter(asked, tokenizer), WholeChat(asked, tokenizer)
    deltas = [
        chunk["choices"][0]["delta"].get("function_call")
        for update in updates
        for chunk in writer.feed(update)
    ]
    assert [delta for delta in deltas if delta] == [
        {"name": "f", "arguments": '{"x"'},
        {"arguments": ":1}"},
    ]
    for update in updates:
        list(whole.feed(update))
    (choice,) = whole.whole()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["content"] is None
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"x":1}'}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_tool_is_refused_if_its_grammar_would_leave_out_a_keyword(
    choice: ToolChoice,
) -> None:
    def with_strict(strict: bool | None) -> Tool:
        parameters = {
            "type": "object",
            "properties": {"a": {"type": "array", "uniqueItems": True}},
        }
        function = {"name": "f", "parameters": parameters, "strict": strict}
        return Tool.model_validate({"type": "function", "function": function})

    assert bool(grammar_of_call([with_strict(None)], choice, True)) == (choice == "required")
    with fails(RequestError, "unsupported_schema", match="uniqueItems") as raised:
        grammar_of_call([with_strict(None), with_strict(True)], choice, True)
    assert raised.value.param == "tools[1]"
