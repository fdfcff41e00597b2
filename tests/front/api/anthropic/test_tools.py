"""Which of the declared tools a model is offered."""

from typing import Any

import pytest

from serve.core.errors import RequestError
from serve.front.api.anthropic.body import MessagesBody
from serve.front.api.anthropic.known_tools import KNOWN_TOOLS
from serve.front.api.openai import parse
from serve.front.text import grammars
from tests.errors import fails

HELLO: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hello"}],
}
ADD = {"name": "add", "input_schema": {"type": "object"}}
LATER = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
HOSTED = [
    SEARCH,
    {"type": "web_fetch_20260318", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "mcp_toolset", "mcp_server_name": "files"},
    {"type": "computer_toolset_20260801"},
]


def offered(*tools: Any, **fields: Any) -> tuple[list[str], tuple[str, ...]]:
    """The names of the tools that are offered, and of those that are not."""
    body = parse(MessagesBody, {**HELLO, "tools": list(tools), **fields})
    assert body.prompt().tools == body.offer.tools
    return [tool.function.name for tool in body.offer.tools], body.offer.left_out


def system(kind: str, name: str) -> dict[str, Any]:
    change = {"type": kind, "tool": {"type": "tool_reference", "name": name}}
    return {"role": "system", "content": [change]}


def result(*parts: Any) -> list[Any]:
    call = {"type": "tool_use", "id": "a", "name": "find", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "a", "content": list(parts)}
    return [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [found]},
    ]


def test_tools_that_anthropic_hosts_are_left_out() -> None:
    names = ("web_search", "web_fetch", "code_execution", "files", "computer_toolset_20260801")
    assert offered(ADD, *HOSTED) == (["add"], names)
    servers = [{"type": "url", "name": "files", "url": "https://x"}]
    assert offered(ADD, mcp_servers=servers) == (["add"], ("files",))
    assert offered(HOSTED[3], mcp_servers=servers) == ([], ("files",))


@pytest.mark.parametrize(
    "choice", [{"type": "tool", "name": "web_search"}, {"type": "any"}], ids=["tool", "any"]
)
def test_forcing_a_tool_that_anthropic_hosts_is_refused(choice: Any) -> None:
    with fails(RequestError, "invalid_value", match="web_search") as caught:
        offered(SEARCH, tool_choice=choice)
    assert caught.value.param == "tool_choice"
    assert offered(ADD, SEARCH, tool_choice={"type": "any"})[0] == ["add"]


@pytest.mark.parametrize("type", KNOWN_TOOLS)
def test_tools_that_anthropic_defines_and_clients_run_are_offered(type: str) -> None:
    declared = {"type": type, "name": "own", "max_characters": 800}
    body = parse(MessagesBody, {**HELLO, "tools": [declared]})
    (tool,) = body.offer.tools
    assert tool.function.name == "own"
    assert (tool.function.description or "").endswith("up to 800 characters.")
    schema = tool.function.parameters
    assert schema
    assert schema["required"] or type.startswith("bash")
    assert grammars.of_schema(schema)


@pytest.mark.parametrize("type", ["memory_20250818", "computer_20251124"])
def test_unknown_tools_that_clients_run_are_refused(type: str) -> None:
    with fails(RequestError, "invalid_value", match="custom"):
        offered({"type": type, "name": "own"})


def test_fields_of_a_tool_are_kept() -> None:
    more = {"eager_input_streaming": True, "allowed_callers": ["direct"], "input_examples": [{}]}
    body = parse(MessagesBody, {**HELLO, "tools": [{**ADD, "strict": True, **more}]})
    (tool,) = body.offer.tools
    assert tool.function.strict is True
    assert tool.function.parameters == {"type": "object"}


def test_a_deferred_tool_is_offered_once_a_message_refers_to_it() -> None:
    """Until a search of the client, or the system, refers to it."""
    assert offered(ADD, LATER)[0] == ["add"]
    reference = {"type": "tool_reference", "tool_name": "later"}
    asked = HELLO["messages"]
    assert offered(ADD, LATER, messages=[*asked, *result(reference)])[0] == ["add", "later"]
    added = [*asked, system("tool_addition", "later")]
    assert offered(ADD, LATER, messages=added)[0] == ["add", "later"]
    removed = [*added, system("tool_removal", "later"), system("tool_removal", "add")]
    assert offered(ADD, LATER, messages=removed)[0] == []
    forced = {"type": "tool", "name": "later"}
    assert offered(ADD, LATER, tool_choice=forced)[0] == ["add", "later"]


def test_deferred_tools_are_offered_at_once_if_their_search_is_hosted() -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "search"}
    assert offered(ADD, LATER, search) == (["add", "later"], ("search",))
