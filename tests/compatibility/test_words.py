"""Other servers' words for the same thing: each means what it says.

The engine answers with the first text that a model could have written under the request's grammar,
so an answer that is not the first one shows that the grammar refused the others.
"""

import json
from typing import Any

import pytest

from tests.compatibility.asking import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    OLLAMA_CHAT,
    RESPONSES,
    Server,
    name_of,
    text_of,
    tool,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
}
OBJECT, OTHER_OBJECT = '{"a": 1}', '{"b": 1}'
TAG = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
TAGGED, WRONG_TAG = f"Well, <f>{OBJECT}</f>", f"Well, <f>{OTHER_OBJECT}</f>"
LARK = 'start: "yes" | "no"'
GBNF = 'root ::= "yes" | "no"'
YES, NUMBER = "yes", "42"
# Schemas with keywords that a grammar leaves out.
WITH_UNIQUE = {**SCHEMA, "properties": {"a": {"type": "integer"}}, "uniqueItems": True}
WITH_IF = {**SCHEMA, "if": {"required": ["b"]}, "then": {"required": ["c"]}}
WITH_NOT = {**SCHEMA, "not": {"required": ["b"]}}


def in_json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


# Fields that demand a form, a text that does not have it, and one that does.
FORMS: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        (path, fields, wrong, right)
        for path in (CHAT, COMPLETIONS, RESPONSES)
        for fields, wrong, right in (
            ({"guided_json": SCHEMA}, OTHER_OBJECT, OBJECT),
            ({"guided_regex": "[0-9]+"}, ANSWER, NUMBER),
            ({"guided_choice": ["yes", "no"]}, ANSWER, YES),
            ({"guided_grammar": LARK}, ANSWER, YES),
            ({"json_schema": SCHEMA}, OTHER_OBJECT, OBJECT),
            ({"json_schema": {"const": "42"}}, ANSWER, '"42"'),
            ({"regex": "[0-9]+"}, ANSWER, NUMBER),
            ({"grammar": GBNF}, ANSWER, YES),
            ({"ebnf": GBNF}, ANSWER, YES),
            ({"structured_outputs": {"json": SCHEMA}}, OTHER_OBJECT, OBJECT),
            ({"structured_outputs": {"choice": ["yes"]}}, ANSWER, YES),
            ({"structured_outputs": {"grammar": GBNF}}, ANSWER, YES),
            ({"structured_outputs": {"json_object": True}}, ANSWER, OBJECT),
        )
    ),
    *(
        (CHAT, {"response_format": format}, wrong, right)
        for format, wrong, right in (
            ({"type": "json_object"}, ANSWER, OBJECT),
            ({"type": "json_object", "schema": SCHEMA}, OTHER_OBJECT, OBJECT),
            ({"type": "json_schema", "schema": SCHEMA}, OTHER_OBJECT, OBJECT),
            (in_json_schema(SCHEMA), OTHER_OBJECT, OBJECT),
            (in_json_schema(WITH_UNIQUE), OTHER_OBJECT, OBJECT),
            (in_json_schema(WITH_IF), OTHER_OBJECT, OBJECT),
            (in_json_schema(WITH_NOT), OTHER_OBJECT, OBJECT),
            ({"type": "regex", "regex": "[0-9]+"}, ANSWER, NUMBER),
            ({"type": "regex", "pattern": "[0-9]+"}, ANSWER, NUMBER),
            ({"type": "grammar", "grammar": GBNF}, ANSWER, YES),
            (
                {"type": "structural_tag", "structures": [TAG], "triggers": ["<f>"]},
                WRONG_TAG,
                TAGGED,
            ),
            (
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "triggered_tags",
                        "triggers": ["<f>"],
                        "tags": [
                            {
                                "type": "tag",
                                "begin": "<f>",
                                "content": {"type": "json_schema", "json_schema": SCHEMA},
                                "end": "</f>",
                            }
                        ],
                    },
                },
                WRONG_TAG,
                TAGGED,
            ),
        )
    ),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
        OTHER_OBJECT,
        OBJECT,
    ),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, ANSWER, OBJECT),
    (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        OTHER_OBJECT,
        OBJECT,
    ),
    (
        MESSAGES,
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        OTHER_OBJECT,
        OBJECT,
    ),
    (OLLAMA_CHAT, {"format": SCHEMA}, OTHER_OBJECT, OBJECT),
    (OLLAMA_CHAT, {"format": "json"}, ANSWER, OBJECT),
]


@pytest.mark.parametrize(("path", "fields", "wrong", "right"), FORMS, ids=name_of)
def test_fields_that_demand_a_form_of_the_answer_enforce_it(
    server: Server, path: str, fields: dict[str, Any], wrong: str, right: str
) -> None:
    assert text_of(path, server.ask(path, fields, wrong, right).body) == right


@pytest.mark.parametrize(
    ("schema", "names"), [(WITH_UNIQUE, "uniqueItems"), (WITH_IF, "if"), (WITH_NOT, "not")]
)
def test_schema_keywords_that_no_grammar_enforces_are_listed_in_a_header(
    server: Server, schema: Any, names: str
) -> None:
    fields = {"response_format": in_json_schema(schema)}
    asked = server.ask(CHAT, fields, OBJECT)
    assert names in asked.reply.headers["x-not-enforced"]


# --- tools

WEATHER = tool("weather", city={"type": "string"})
NAMED = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"city": "Oslo"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
FORCED = '[{"name": "weather", "parameters": {"city": "Oslo"}}]'
WRITTEN = ANSWER, CALL, FORCED, ARGUMENTS


def allowed(mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}


FLAT = {"type": "function", **WEATHER["function"]}
IN_MESSAGES = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
FORCING: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {"tools": [WEATHER], "tool_choice": choice}) for choice in ("required", "any", NAMED)),
    (CHAT, {"tools": [WEATHER, tool("other")], "tool_choice": allowed("required")}),
    *(
        (RESPONSES, {"tools": [FLAT], "tool_choice": choice})
        for choice in (
            "required",
            "any",
            {"type": "function", "name": "weather"},
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
        )
    ),
    *(
        (MESSAGES, {"tools": [IN_MESSAGES], "tool_choice": choice})
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"})
    ),
]


def calls_of(path: str, body: Any) -> list[tuple[str, str]]:
    """The names and arguments of the calls in a reply."""
    if path == RESPONSES:
        items = [item for item in body["output"] if item["type"] == "function_call"]
        return [(item["name"], item["arguments"]) for item in items]
    if path == MESSAGES:
        uses = [block for block in body["content"] if block["type"] == "tool_use"]
        return [(use["name"], json.dumps(use["input"])) for use in uses]
    calls = body["choices"][0]["message"]["tool_calls"] or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize(("path", "fields"), FORCING, ids=name_of)
def test_fields_that_demand_a_call_force_a_call(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    asked = server.ask(path, fields, *WRITTEN)
    assert calls_of(path, asked.body) == [("weather", ARGUMENTS)]


def test_only_allowed_tools_are_offered_to_the_model(server: Server) -> None:
    fields = {"tools": [WEATHER, tool("other")], "tool_choice": allowed("auto")}
    asked = server.ask(CHAT, fields)
    assert '"weather"' in asked.prompt
    assert '"other"' not in asked.prompt


@pytest.mark.parametrize("choice", [None, "auto", {"name": "weather"}])
def test_functions_of_the_old_form_are_called_like_tools(server: Server, choice: Any) -> None:
    fields = {"functions": [WEATHER["function"]], "function_call": choice}
    answers = WRITTEN[1:] if choice in (None, "auto") else WRITTEN
    message = server.ask(CHAT, fields, *answers).body["choices"][0]["message"]
    assert message["function_call"] == {"name": "weather", "arguments": ARGUMENTS}


def test_the_value_none_of_function_call_allows_no_call(server: Server) -> None:
    fields = {"functions": [WEATHER["function"]], "function_call": "none"}
    assert text_of(CHAT, server.ask(CHAT, fields, *WRITTEN).body) == ANSWER


def test_the_same_tool_in_any_api_gives_the_same_prompt(server: Server) -> None:
    """Otherwise the APIs would share no prefix, and a model would answer them differently."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"city": {"type": "string"}},
        "type": "object",
        "required": ["city"],
    }
    about = {"name": "weather", "description": "Tells the weather."}
    function = {**about, "parameters": schema}
    declared = {
        CHAT: {"type": "function", "function": function},
        OLLAMA_CHAT: {"type": "function", "function": function},
        RESPONSES: {"type": "function", **function},
        MESSAGES: {**about, "input_schema": schema},
    }
    prompts = {server.ask(path, {"tools": [tool]}).prompt for path, tool in declared.items()}
    (prompt,) = prompts
    assert json.dumps(schema) in prompt


@pytest.mark.parametrize("name", ["mcp:server/tool", "mcp__server__tool", "a.b", "n" * 128])
def test_tool_names_with_the_characters_of_gateways_are_accepted(server: Server, name: str) -> None:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    asked = server.ask(CHAT, {"tools": [tool(name)]}, call)
    assert calls_of(CHAT, asked.body) == [(name, "{}")]


def test_a_thousand_tools_are_accepted(server: Server) -> None:
    tools = [tool(f"t{number}") for number in range(1024)]
    call = '<tool_call>\n{"name": "t1023", "arguments": {}}\n</tool_call>'
    assert calls_of(CHAT, server.ask(CHAT, {"tools": tools}, call).body) == [("t1023", "{}")]


# --- limits, and sampling

SAMPLING: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (3, "top_k", 3),
    "min_p": (0.1, "min_p", 0.1),
    "seed": (7, "seed", 7),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (0.5, "frequency_penalty", 0.5),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "allowed_token_ids": ([1, 2, 3], "allowed_ids", (1, 2, 3)),
    "logit_bias": ({"5": 1.0}, "bias_ids", (5,)),
}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_sampling_parameters_of_other_servers_reach_the_engine(
    server: Server, path: str, name: str
) -> None:
    value, attribute, wanted = SAMPLING[name]
    found = getattr(server.ask(path, {name: value}).sampling, attribute)
    assert type(wanted)(found) == wanted


# Fields, and the text of the answer, its number of tokens with the end, and why it ended.
LIMITS: list[tuple[str, dict[str, Any], tuple[str, int, str]]] = [
    (CHAT, {"max_tokens": -1}, (ANSWER, 4, "stop")),
    (CHAT, {"max_tokens": 10**6}, (ANSWER, 4, "stop")),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, ("Done", 2, "length")),
    (CHAT, {"stop": ""}, (ANSWER, 4, "stop")),
    (CHAT, {"stop": []}, (ANSWER, 4, "stop")),
    (CHAT, {"stop": ["ne"]}, ("Do", 2, "stop")),
    (COMPLETIONS, {"max_tokens": -1}, (ANSWER, 4, "stop")),
    (COMPLETIONS, {"max_tokens": 10**6}, (ANSWER, 4, "stop")),
    (COMPLETIONS, {"stop": ""}, (ANSWER, 4, "stop")),
]


@pytest.mark.parametrize(("path", "fields", "wanted"), LIMITS, ids=name_of)
def test_limits_of_tokens_are_obeyed_under_every_name(
    server: Server, path: str, fields: dict[str, Any], wanted: tuple[str, int, str]
) -> None:
    body = server.ask(path, fields).body
    reason = body["choices"][0]["finish_reason"]
    assert (text_of(path, body), body["usage"]["completion_tokens"], reason) == wanted
