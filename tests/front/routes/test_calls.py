"""Calls over HTTP in all three APIs: how they stream, and what they report of schemas that a
grammar can only partly enforce. An engine plays answers that the real grammar allows."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from serve.front.text.tokens import Tokenizer
from tests.agents.played import Call, PlayedEngine, save_model
from tests.front.fakes import Running

PATH = "notes/todo.txt"
TEXT = 'Buy "milk"\nand bread.\n' * 8
WRITE: Any = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
    "required": ["path", "text"],
    "additionalProperties": False,
}
DAYS: Any = {
    "type": "object",
    "properties": {"days": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["days"],
}
RIGHT, WRONG = {"days": [1, 2]}, {"days": [1, 1]}
ASKED: Any = [{"role": "user", "content": "hi"}]


class Playing(PlayedEngine):
    """Plays the first of `answers` that the grammar allows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, self._first_allowed)
        self.answers: list[str] = []

    def _first_allowed(self, _: str, is_allowed: Callable[[str], bool]) -> str:
        return next(filter(is_allowed, self.answers))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Playing:
    return Playing(Tokenizer(save_model(tmp_path_factory.mktemp("played"))))


@pytest.fixture(scope="module")
def url(engine: Playing) -> Iterator[str]:
    with Running(engine, max_context=4096) as running:
        yield running.url


# As Qwen3-Coder writes calls: each argument is text between marks.
CODER = """\
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Playing:
    return Playing(Tokenizer(save_model(tmp_path_factory.mktemp("coder"), CODER)))


@pytest.fixture(scope="module")
def coder_url(coder: Playing) -> Iterator[str]:
    with Running(coder, max_context=4096) as running:
        yield running.url


@pytest.fixture
def ai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def play(engine: Playing, name: str, arguments: dict[str, Any]) -> None:
    engine.answers = list(Call(name, arguments).forms())


def chat_tool(schema: Any, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": "use", "parameters": schema, **fields}}


# --- streams


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_streams_of_chats_send_the_name_of_a_call_first(
    engine: Playing, ai: openai.OpenAI, choice: str
) -> None:
    play(engine, "use", {"path": PATH, "text": TEXT})
    named = {"type": "function", "function": {"name": "use"}}
    asked: Any = {"model": "tiny", "messages": ASKED, "tools": [chat_tool(WRITE, strict=True)]}
    asked["tool_choice"] = named if choice == "named" else choice
    with ai.chat.completions.stream(**asked) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        whole = stream.get_final_completion().choices[0]
    (call,) = whole.message.tool_calls or []
    assert call.function.name == "use"
    assert json.loads(call.function.arguments) == {"path": PATH, "text": TEXT}
    assert whole.finish_reason == ("stop" if choice == "named" else "tool_calls")
    deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].id
    assert deltas[0].function
    assert deltas[0].function.name == "use"
    assert not any(each.function and each.function.name for each in deltas[1:])
    assert len(deltas) > 20, "arguments come as they are written"


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_streams_of_responses_send_the_name_of_a_call_first(
    engine: Playing, ai: openai.OpenAI, choice: str
) -> None:
    play(engine, "use", {"path": PATH, "text": TEXT})
    tool = {"type": "function", "name": "use", "parameters": WRITE, "strict": True}
    asked: Any = {"model": "tiny", "input": "hi", "tools": [tool]}
    asked["tool_choice"] = {"type": "function", "name": "use"} if choice == "named" else choice
    with ai.responses.stream(**asked) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert call.name == "use"
    assert json.loads(call.arguments) == {"path": PATH, "text": TEXT}
    types = [event.type for event in events]
    begin = types.index("response.output_item.added")
    added: Any = events[begin]
    assert (added.item.name, added.item.arguments) == ("use", "")
    deltas = types.count("response.function_call_arguments.delta")
    assert deltas > 20, "arguments come as they are written"
    first_delta = types.index("response.function_call_arguments.delta")
    assert begin < first_delta < types.index("response.function_call_arguments.done")


@pytest.mark.parametrize("choice", ["auto", "any", "tool"])
def test_streams_of_messages_send_the_name_of_a_call_first(
    engine: Playing, claude: anthropic.Anthropic, choice: str
) -> None:
    play(engine, "use", {"path": PATH, "text": TEXT})
    asked: Any = {"model": "tiny", "max_tokens": 900, "messages": ASKED}
    asked["tools"] = [{"name": "use", "input_schema": WRITE}]
    asked["tool_choice"] = {"type": choice, **({"name": "use"} if choice == "tool" else {})}
    with claude.messages.stream(**asked) as stream:
        events = [event for event in stream if event.type.startswith(("content", "message"))]
        whole = stream.get_final_message()
    (block,) = whole.content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("use", {"path": PATH, "text": TEXT})
    assert whole.stop_reason == "tool_use"
    types = [event.type for event in events]
    assert types[:2] == ["message_start", "content_block_start"]
    start: Any = events[1]
    assert (start.content_block.name, start.content_block.input) == ("use", {})
    assert types.count("content_block_delta") > 20, "arguments come as they are written"


# --- schemas that no grammar holds whole


class Api:
    """One of the APIs: how it is asked with the tool `use`, or with a format."""

    def __init__(self, path: str, body: Any, forced: Any, tool: Any, formats: Any) -> None:
        self.path, self.body, self.forced = path, body, forced
        self.tools, self.formats = {"tools": [tool]}, formats

    def ask(self, url: str, **fields: Any) -> httpx2.Response:
        body = {"model": "tiny", **self.body, **fields}
        return httpx2.post(url + self.path, json=body).raise_for_status()

    def streamed(self, url: str, **fields: Any) -> list[Any]:
        lines = self.ask(url, stream=True, **fields).text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        return [json.loads(each) for each in data]


FORMAT = {"type": "json_schema", "name": "days", "schema": DAYS}
APIS = {
    "chat": Api(
        "/v1/chat/completions",
        {"messages": ASKED},
        {"tool_choice": "required"},
        chat_tool(DAYS),
        {"response_format": {"type": "json_schema", "schema": DAYS}},
    ),
    "responses": Api(
        "/v1/responses",
        {"input": "hi"},
        {"tool_choice": {"type": "function", "name": "use"}},
        {"type": "function", "name": "use", "parameters": DAYS},
        {"text": {"format": FORMAT}},
    ),
    "messages": Api(
        "/v1/messages",
        {"messages": ASKED, "max_tokens": 200},
        {"tool_choice": {"type": "any"}},
        {"name": "use", "input_schema": DAYS},
        {"output_config": {"format": {"type": "json_schema", "schema": DAYS}}},
    ),
}
apis = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


def warnings_in(events: list[Any]) -> list[str]:
    """The warnings in the last event of a stream that has any."""
    found = [event.get("response", event).get("warnings") for event in events]
    return next((each for each in reversed(found) if each), [])


@apis
@pytest.mark.parametrize("is_forced", [False, True])
def test_a_call_that_breaks_its_schema_is_reported(
    engine: Playing, url: str, api: Api, is_forced: bool
) -> None:
    fields = {**api.tools, **(api.forced if is_forced else {})}
    play(engine, "use", WRONG)
    whole = api.ask(url, **fields)
    assert whole.headers["x-not-enforced"] == "uniqueItems"
    assert whole.headers["x-schema-violations"] == "uniqueItems"
    (warning,) = whole.json()["warnings"]
    assert warning.startswith("tool_calls[0] (use) $.days: ")
    assert warnings_in(api.streamed(url, **fields)) == [warning]
    play(engine, "use", RIGHT)
    whole = api.ask(url, **fields)
    assert whole.headers["x-not-enforced"] == "uniqueItems"
    assert "x-schema-violations" not in whole.headers
    assert "warnings" not in whole.json()
    assert warnings_in(api.streamed(url, **fields)) == []


@apis
def test_a_text_that_breaks_its_format_is_reported(engine: Playing, url: str, api: Api) -> None:
    engine.answers = [json.dumps(WRONG)]
    for more in ({}, api.tools):
        whole = api.ask(url, **api.formats, **more)
        assert whole.headers["x-schema-violations"] == "uniqueItems"
        (warning,) = whole.json()["warnings"]
        assert warning.startswith("content $.days: ")
        assert warnings_in(api.streamed(url, **api.formats, **more)) == [warning]
    engine.answers = [json.dumps(RIGHT)]
    assert "warnings" not in api.ask(url, **api.formats).json()


def test_each_answer_of_a_request_is_checked_against_its_schema(engine: Playing, url: str) -> None:
    engine.answers = [json.dumps(WRONG)]
    chat = APIS["chat"]
    assert len(chat.ask(url, **chat.formats, n=3).json()["warnings"]) == 3
    completion = Api("/v1/completions", {"prompt": "hi", "max_tokens": 50}, {}, {}, {})
    outputs = {"structured_outputs": {"json": DAYS}}
    (warning,) = completion.ask(url, **outputs).json()["warnings"]
    assert warning.startswith("content $.days: ")
    streamed = completion.streamed(url, **outputs)
    assert [event.get("warnings") for event in streamed if event.get("warnings")] == [[warning]]


def test_an_answer_that_was_cut_off_is_not_checked_against_its_schema(
    engine: Playing, url: str
) -> None:
    chat = APIS["chat"]
    play(engine, "use", {"days": list(range(99))})
    reply = chat.ask(url, **chat.tools, max_tokens=40)
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert "warnings" not in reply.json()


def test_a_pattern_that_is_slow_to_check_delays_only_its_own_client(
    engine: Playing, url: str
) -> None:
    """Python's regular expressions can take years, and no grammar holds a look-ahead."""
    slow = {"type": "string", "pattern": "^(?!b)(a+)+$"}
    schema = {"type": "object", "properties": {"a": slow}, "required": ["a"]}
    chat = APIS["chat"]
    play(engine, "use", {"a": "a" * 60 + "!"})
    reply = chat.ask(url, tools=[chat_tool(schema)])
    assert reply.headers["x-not-enforced"] == "pattern"
    assert reply.headers["x-schema-violations"] == "unchecked"
    assert json.loads(
        reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    )
    play(engine, "use", WRONG)
    assert chat.ask(url, **chat.tools).headers["x-schema-violations"] == "uniqueItems"


# --- inputs with a grammar of their own


def written_input(text: str) -> str:
    """A call of `put` as the coder writes it."""
    value = f"<parameter=input>\n{text}\n</parameter>"
    return f"<tool_call>\n<function=put>\n{value}\n</function>\n</tool_call>"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_input_of_a_custom_tool_follows_its_grammar_if_written_as_plain_text(
    coder: Playing, coder_url: str, choice: str
) -> None:
    lark = 'start: "put " /[a-z]+/ NL "done"\nNL: "\\n"'
    format = {"type": "grammar", "syntax": "lark", "definition": lark}
    coder.answers = [written_input("put 5\ndone"), written_input("put five\ndone")]
    with openai.OpenAI(base_url=f"{coder_url}/v1", api_key="none", max_retries=0) as client:
        tool: Any = {"type": "custom", "name": "put", "format": format}
        reply = client.responses.create(
            model="tiny",
            input="hi",
            tools=[tool],
            tool_choice=choice,  # type: ignore[arg-type]
        )
    (call,) = reply.output
    assert call.type == "custom_tool_call"
    assert call.input == "put five\ndone"
    assert not hasattr(reply, "warnings")


# --- custom tools of chats


def play_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it by itself."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


SH: dict[str, Any] = {"type": "custom", "custom": {"name": "sh", "description": "Runs commands."}}


def with_grammar(syntax: str, definition: str) -> dict[str, Any]:
    format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {**SH["custom"], "format": format}}


def chats(url: str, **fields: Any) -> list[Any]:
    """The replies of the official client: a whole one, and one whose calls are added up from a
    stream."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=ASKED, **fields)
        events = client.chat.completions.create(model="tiny", messages=ASKED, stream=True, **fields)
        chunks = [chunk.choices[0] for chunk in events]
    calls: list[Any] = []
    for chunk in chunks:
        for part in chunk.delta.tool_calls or ():
            if part.id:
                calls.append({**part.to_dict(), "custom": {**part.custom, "input": ""}})
            calls[-1]["custom"]["input"] += part.custom["input"]
    message = whole.choices[0].message
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    assert [{**call, "id": ""} for call in calls] == [
        {**call.to_dict(), "id": ""} for call in message.tool_calls or ()
    ]
    assert chunks[-1].finish_reason == whole.choices[0].finish_reason
    return [whole.choices[0], chunks]


def test_a_custom_tool_in_a_chat_is_called_with_text(engine: Playing, url: str) -> None:
    text = 'say "hi"\n\tünd 😀 \\ done'
    engine.answers = [play_text("sh", {"input": text})]
    choice, chunks = chats(url, tools=[SH])
    (call,) = choice.message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "sh", text)
    assert choice.finish_reason == "tool_calls"
    pieces = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert len(pieces) > 5, "the input streams"
    prompt = engine.tokenizer.decode(engine.prompts[-1])
    assert "Runs commands." in prompt
    history = [*ASKED, choice.message.to_dict()]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
    reply = httpx2.post(f"{url}/v1/chat/completions", json={"messages": history, "tools": [SH]})
    assert reply.status_code == 200
    assert json.dumps({"input": text}, ensure_ascii=False) in engine.tokenizer.decode(
        engine.prompts[-1]
    )


def test_no_json_around_the_input_of_a_custom_tool_is_returned_if_the_call_is_cut_off(
    engine: Playing, url: str
) -> None:
    """Only the text after `{"input": "` is input, however early the call is cut off."""
    text = "x" * 60
    call = play_text("sh", {"input": text})
    engine.answers = [call]
    begins = call.index('{"input": "') + len('{"input": "')
    inputs = []
    for limit in range(1, begins + 10):
        choice, _ = chats(url, tools=[SH], tool_choice="required", max_tokens=limit)
        assert choice.finish_reason == "length"
        inputs += [each.custom.input for each in choice.message.tool_calls or ()]
    assert len(inputs) > 5
    assert all(text.startswith(each) for each in inputs), inputs


@pytest.mark.parametrize("tool", [SH, with_grammar("lark", 'start: "put " /[a-z"]+/ "\\n"')])
@pytest.mark.parametrize("is_allowed_too", [False, True])
def test_the_whole_answer_is_the_input_if_a_chat_demands_a_custom_tool(
    engine: Playing, url: str, tool: Any, is_allowed_too: bool
) -> None:
    named = {"type": "custom", "custom": {"name": "sh"}}
    engine.answers = ['put a"b\n']
    demanded: Any = named
    if is_allowed_too:
        allowed = {"mode": "required", "tools": [named]}
        demanded = {"type": "allowed_tools", "allowed_tools": allowed}
        engine.answers = [play_text("sh", {"input": 'put a"b\n'})]
    choice, _ = chats(url, tools=[chat_tool(DAYS), tool], tool_choice=demanded)
    (call,) = choice.message.tool_calls
    assert (call.custom.name, call.custom.input) == ("sh", 'put a"b\n')
    assert choice.finish_reason == ("tool_calls" if is_allowed_too else "stop")


def test_the_regex_of_a_custom_tool_is_enforced(engine: Playing, url: str) -> None:
    engine.answers = [play_text("sh", {"input": text}) for text in ("a", "11")]
    choice, _ = chats(url, tools=[with_grammar("regex", "[0-9]+")])
    assert choice.message.tool_calls[0].custom.input == "11"


def test_a_grammar_of_a_custom_tool_that_is_not_enforced_is_reported(
    engine: Playing, url: str
) -> None:
    play(engine, "sh", {"input": "put 5"})
    body = {"messages": ASKED, "tools": [with_grammar("lark", 'start: "get"')]}
    reply = httpx2.post(f"{url}/v1/chat/completions", json=body)
    assert reply.headers["x-not-enforced"] == "lark"
    named = {"tool_choice": {"type": "custom", "custom": {"name": "sh"}}}
    engine.answers = ["get"]
    reply = httpx2.post(f"{url}/v1/chat/completions", json={**body, **named})
    assert "x-not-enforced" not in reply.headers


def test_the_input_of_a_custom_tool_that_is_cut_off_is_returned_in_part(
    engine: Playing, url: str
) -> None:
    play(engine, "sh", {"input": "a" * 200})
    choice, _ = chats(url, tools=[SH], max_tokens=120)
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert set(call.custom.input) == {"a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [with_grammar("yaml", "x")]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [with_grammar("lark", "start: (")]}, "tools"),
        ({"tools": [SH, {"type": "function", "function": {"name": "sh"}}]}, "tools"),
        ({"tools": [{"type": "other"}]}, "tools[0]"),
        (
            {"tools": [SH], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "tool_choice",
        ),
    ],
)
def test_errors_about_custom_tools_in_chats_name_the_field(
    url: str, fields: Any, param: str
) -> None:
    body = {"messages": ASKED, **fields}
    reply = httpx2.post(f"{url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
