"""/v1/responses over HTTP with the official client, whose types check every event, and an engine
that plays prepared answers."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from serve.core.types import Sampling
from serve.front.text.tokens import Tokenizer
from tests.agents.played import PlayedEngine, save_model
from tests.errors import fails
from tests.front.fakes import Running

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LARK = r'start: "put " /[a-z"]+/ "\n"'


class Played:
    """A server whose next answer is `text`, and what it was asked. Unless it breaks_grammars, a
    model could have written the answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = "Done."
        self.prompts: list[str] = []
        self.breaks_grammars = False
        self.engine = PlayedEngine(tokenizer, self._play)

    @property
    def samplings(self) -> list[Sampling]:
        return self.engine.samplings

    def _play(self, prompt: str, is_allowed: Callable[[str], bool]) -> str:
        self.prompts.append(prompt)
        return self.text if self.breaks_grammars or is_allowed(self.text) else "(not allowed)"


def written(name: str, arguments: dict[str, Any]) -> str:
    """A call as the played model writes it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def played_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_model(tmp_path_factory.mktemp("played")))


@pytest.fixture
def played(played_tokenizer: Tokenizer) -> Played:
    return Played(played_tokenizer)


@pytest.fixture
def server_url(played: Played) -> Iterator[str]:
    with Running(played.engine, max_context=4096) as running:
        yield running.url


@pytest.fixture
def client(server_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, given: Any = "hi", **fields: Any) -> Any:
    return client.responses.create(model="tiny", input=given, **fields)


def events(client: OpenAI, given: Any = "hi", **fields: Any) -> list[Any]:
    """The events of a stream, each checked by OpenAI's types."""
    raw = client.responses.with_raw_response.create(
        model="tiny", input=given, stream=True, **fields
    )
    lines = raw.http_response.read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [EVENT.validate_python(json.loads(each)) for each in data]


def types(found: list[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in found]


# --- tools of every type

NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "exec", "description": "Runs code."},
    ],
}
CUSTOM = {"type": "custom", "name": "apply", "description": "Edits files."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": LARK}
CLOSE = {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}
SEARCH = {"type": "tool_search", "execution": "client"}


def test_a_custom_tool_is_called_with_text_that_is_streamed(client: OpenAI, played: Played) -> None:
    text = 'say "hi"\n\tünd 😀 \\ done'
    played.text = written("apply", {"input": text})
    found = events(client, tools=[CUSTOM])
    item = found[-1].response.output[0]
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply", text)
    deltas = [e.delta for e in found if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text
    (done,) = [e for e in found if e.type == "response.custom_tool_call_input.done"]
    assert (done.input, done.item_id) == (text, item.id)
    assert types(found)[-3:] == ["custom_tool_call_input.done", "output_item.done", "completed"]
    assert "Edits files." in played.prompts[0]


def test_the_whole_answer_is_the_input_of_a_custom_tool_that_is_demanded(
    client: OpenAI, played: Played
) -> None:
    played.text = 'put a"b\n'
    tool = {**CUSTOM, "format": GRAMMAR}
    reply = ask(client, tools=[tool], tool_choice={"type": "custom", "name": "apply"})
    assert [(item.type, item.input) for item in reply.output] == [
        ("custom_tool_call", 'put a"b\n'),
    ]
    assert "put " in (played.samplings[0].grammar or "")


@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "apply"}])
@pytest.mark.parametrize(
    ("definition", "syntax"), [("start: (", "lark"), ("a(", "regex"), ("start: missing", "lark")]
)
def test_a_custom_tool_with_an_unreadable_grammar_is_refused(
    client: OpenAI, definition: str, syntax: str, choice: Any
) -> None:
    format = {"type": "grammar", "syntax": syntax, "definition": definition}
    with pytest.raises(BadRequestError) as caught:
        ask(client, tools=[{**CUSTOM, "format": format}], tool_choice=choice)
    assert caught.value.param in ("tool_choice", "tools")


def test_a_custom_tool_whose_grammar_is_not_enforced_is_named_in_a_warning(
    client: OpenAI, played: Played
) -> None:
    tool = {**CUSTOM, "format": GRAMMAR}
    (warning,) = ask(client, tools=[tool]).warnings
    assert "'apply'" in warning
    assert json.dumps(LARK)[1:-1] in played.prompts[0]
    regex = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}
    for text, kind in (("abc", "custom_tool_call"), ("xyz", "message")):
        played.text = written("apply", {"input": text})  # "(not allowed)" if it breaks the regex
        reply = ask(client, tools=[{**CUSTOM, "format": regex}])
        assert reply.output[0].type == kind
        assert not hasattr(reply, "warnings")


def test_tools_in_a_namespace_are_called_by_namespace_and_name(
    client: OpenAI, played: Played
) -> None:
    played.text = written("close", {})
    reply = ask(client, tools=[NAMESPACE])
    assert (reply.output[0].name, reply.output[0].namespace) == ("close", "agents")
    played.text = written("exec", {"input": "1 + 1"})
    reply = ask(client, tools=[NAMESPACE])
    assert (reply.output[0].type, reply.output[0].namespace) == ("custom_tool_call", "agents")
    assert played.prompts[0].count("Other agents.") == 1


def test_two_tools_with_the_same_name_are_told_apart_by_their_namespaces(
    client: OpenAI, played: Played
) -> None:
    played.text = written("agents.close", {})
    history = [
        {"role": "user", "content": "hi"},
        {
            "type": "function_call",
            "call_id": "c",
            "name": "close",
            "namespace": "agents",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "c", "output": "closed"},
    ]
    reply = ask(client, history, tools=[CLOSE, NAMESPACE])
    assert (reply.output[0].name, reply.output[0].namespace) == ("close", "agents")
    assert '<tool_call>{"name": "agents.close"' in played.prompts[0]


@pytest.mark.parametrize(
    ("tool", "call", "kind", "fields"),
    [
        (
            {"type": "local_shell"},
            ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}),
            "local_shell_call",
            {"action": {"type": "exec", "env": {}, "command": ["ls", "-l"], "timeout_ms": 5}},
        ),
        (
            {"type": "shell", "environment": {"type": "local"}},
            ("shell", {"commands": ["ls"]}),
            "shell_call",
            {"action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}},
        ),
        (
            {"type": "apply_patch"},
            ("apply_patch", {"type": "delete_file", "path": "a"}),
            "apply_patch_call",
            {"operation": {"type": "delete_file", "path": "a"}},
        ),
        (
            SEARCH,
            ("tool_search", {"query": "files"}),
            "tool_search_call",
            {"arguments": {"query": "files"}, "execution": "client"},
        ),
    ],
)
def test_each_tool_that_openai_defines_has_its_own_type_of_item(
    client: OpenAI, played: Played, tool: Any, call: Any, kind: str, fields: Any
) -> None:
    played.text = written(*call)
    found = events(client, tools=[tool])
    item = found[-1].response.output[0].model_dump(exclude_unset=True)
    assert (item["type"], item["status"]) == (kind, "completed")
    assert {name: item[name] for name in fields} == fields
    assert types(found)[-3:] == ["output_item.added", "output_item.done", "completed"]
    assert len(found[-1].response.output) == 1


def test_a_call_whose_arguments_do_not_fit_its_tool_becomes_a_function_call(
    client: OpenAI, played: Played
) -> None:
    played.breaks_grammars = True
    played.text = written("local_shell", {"command": "ls"})
    (item,) = ask(client, tools=[{"type": "local_shell"}]).output
    assert (item.type, json.loads(item.arguments)) == ("function_call", {"command": "ls"})


@pytest.mark.parametrize(
    "type", ["web_search", "web_search_preview_2025_03_11", "file_search", "mcp", "tool_search"]
)
def test_a_tool_that_the_server_would_have_to_run_is_not_offered(
    client: OpenAI, played: Played, type: str
) -> None:
    reply = ask(client, tools=[{"type": type, "vector_store_ids": ["v"], "server_label": "s"}])
    (warning,) = reply.warnings
    assert repr(type) in warning
    assert "# Tools" not in played.prompts[0]
    assert not hasattr(ask(client, tools=[CUSTOM]), "warnings")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search_preview"},
        {"type": "mcp", "server_label": "s"},
        {"type": "custom", "name": "close"},
        {"type": "function", "name": "nobody"},
        {"type": "function"},
        {"type": "local_shell"},
        {"type": "invented"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
    ],
)
def test_choosing_a_tool_that_is_not_offered_is_refused(client: OpenAI, choice: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, tools=[CLOSE, {"type": "web_search"}], tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_only_allowed_tools_are_offered_to_the_model(client: OpenAI, played: Played) -> None:
    allowed = [{"type": "custom", "name": "apply"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    ask(client, tools=[CLOSE, CUSTOM], tool_choice=choice)
    assert '"name": "apply"' in played.prompts[0]
    assert '"name": "close"' not in played.prompts[0]


# --- histories


def test_every_item_of_a_history_reaches_the_model(client: OpenAI, played: Played) -> None:
    call = {"call_id": "c", "id": "i", "status": "completed", "new_field": 1}
    history = [
        {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE]},
        {"role": "user", "content": [{"type": "input_text", "text": "Q", "cache_control": {}}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [{"type": "summary_text", "text": "S"}],
            "encrypted_content": "of another server",
        },
        {"type": "custom_tool_call", **call, "name": "exec", "input": "in-custom"},
        {"type": "custom_tool_call_output", **call, "output": "out-custom"},
        {"type": "local_shell_call", **call, "action": {"type": "exec", "command": ["in-local"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "out-local"},
        {"type": "shell_call", **call, "action": {"commands": ["in-shell"]}},
        {"type": "shell_call_output", **call, "output": [{"stdout": "out-shell"}]},
        {"type": "apply_patch_call", **call, "operation": {"path": "in-patch"}},
        {"type": "apply_patch_call_output", **call, "output": "out-patch"},
        {"type": "tool_search_call", **call, "arguments": {"query": "in-search"}},
        {"type": "tool_search_output", **call, "tools": [{**CLOSE, "name": "out_search"}]},
        {"type": "mcp_call", **call, "name": "m", "arguments": '"in-mcp"', "output": "out-mcp"},
        {"type": "code_interpreter_call", **call, "code": "in-code", "outputs": [{"logs": "o-c"}]},
        {"type": "file_search_call", **call, "queries": ["in-file"], "results": [{"text": "o-f"}]},
        {"type": "web_search_call", **call, "action": {"type": "search", "query": "hidden"}},
        {
            "type": "message",
            "role": "assistant",
            "phase": "final",
            "content": [{"type": "refusal", "refusal": "No."}],
        },
        {"role": "user", "content": []},
    ]
    ask(client, history, tools=[SEARCH])
    (prompt,) = played.prompts
    for kind in ("custom", "local", "shell", "patch", "mcp"):
        assert prompt.index(f"in-{kind}") < prompt.index(f"out-{kind}")
    assert prompt.index("in-code") < prompt.index("o-c")
    assert prompt.index("in-file") < prompt.index("o-f")
    assert "in-search" in prompt
    assert prompt.count("out_search") == 2  # as a tool, and in the result of the search
    assert "No." in prompt
    assert "hidden" not in prompt


def test_items_of_a_stored_response_can_be_sent_as_references(
    client: OpenAI, played: Played
) -> None:
    """Vercel's AI SDK sends the ids of earlier answers in place of their texts."""
    played.text = "The capital."
    first = ask(client)
    again = [{"type": "item_reference", "id": first.output[0].id}, {"id": first.output[0].id}]
    ask(client, [*again, {"role": "user", "content": "And?"}])
    assert played.prompts[1].count("The capital.") == 2
    ask(client, again, previous_response_id=first.id)
    assert played.prompts[2].count("The capital.") == 3
    client.responses.delete(first.id)
    with pytest.raises(BadRequestError) as caught:
        ask(client, again)
    assert (caught.value.param, caught.value.code) == ("input", "item_not_found")
    with pytest.raises(BadRequestError) as caught:
        ask(client, [{"type": "item_reference"}])
    assert (caught.value.param, caught.value.code) == ("input", "invalid_value")


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hi"},
        {"input": "hi", "instructions": "Be short.", "tools": [CUSTOM, CLOSE, SEARCH]},
        {"input": "And?", "previous_response_id": ...},
        {"input": [{"role": "user", "content": "hi " * 900}] * 5, "truncation": "auto"},
    ],
    ids=["plain", "tools", "continued", "cut"],
)
def test_counted_input_tokens_equal_those_that_the_response_reports(
    client: OpenAI, played: Played, fields: dict[str, Any]
) -> None:
    if "previous_response_id" in fields:
        fields = {**fields, "previous_response_id": ask(client).id}
    count = client.responses.input_tokens.count(model="tiny", **fields)
    num_played = len(played.prompts)
    reply = client.responses.create(model="tiny", **fields)
    assert (count.object, count.input_tokens) == ("response.input_tokens", reply.usage.input_tokens)
    assert len(played.prompts) == num_played + 1, "counting asks no model"


def test_counting_input_tokens_refuses_the_same_requests_as_creating_a_response(
    client: OpenAI,
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.input_tokens.count(model="tiny", input="hi", previous_response_id="resp_x")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(NotFoundError):
        client.responses.input_tokens.count(model="other", input="hi")
    with fails(BadRequestError, "unknown_parameter", match="personality"):
        client.responses.input_tokens.count(model="tiny", input="hi", personality="friendly")


def test_the_result_of_a_call_can_be_sent_with_the_id_of_its_response(
    client: OpenAI, played: Played
) -> None:
    played.text = written("apply", {"input": "patch"})
    first = ask(client, tools=[CUSTOM])
    played.text = "Done."
    result = {"type": "custom_tool_call_output", "call_id": first.output[0].call_id, "output": "ok"}
    ask(client, [result], tools=[CUSTOM], previous_response_id=first.id)
    prompt = played.prompts[1]
    assert prompt.index('"input": "patch"') < prompt.index("<|im_start|>tool\nok")


# --- fields


def test_the_name_of_the_model_may_be_left_out(server_url: str) -> None:
    for fields in ({}, {"model": None}, {"model": "default"}):
        reply = httpx2.post(f"{server_url}/v1/responses", json={"input": "hi", **fields})
        assert (reply.status_code, reply.json()["model"]) == (200, "tiny")


def test_a_format_beside_tools_still_allows_calls(client: OpenAI, played: Played) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    for answer, kind in (
        ('{"a": 1}', "message"),
        (written("close", {}), "function_call"),
    ):
        played.text = answer
        (item,) = ask(client, tools=[CLOSE], text=text).output
        assert item.type == kind
    played.text = written("close", {})
    (item,) = ask(client, tools=[CLOSE], text=text, tool_choice="required").output
    assert item.type == "function_call"


def test_a_forced_call_cut_off_by_the_limit_is_an_incomplete_item(
    client: OpenAI, played: Played
) -> None:
    tool = {**CLOSE, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    played.text = written("close", {"a": "long long long"})
    reply = ask(client, tools=[tool], tool_choice="required", max_output_tokens=52)
    (item,) = reply.output
    assert (reply.status, item.type, item.status) == ("incomplete", "function_call", "incomplete")
    assert item.arguments.startswith('{"a"')


def test_sampling_parameters_work_as_in_chats(client: OpenAI, played: Played) -> None:
    extra = {
        "seed": 7,
        "top_k": 3,
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.5,
        "stop": ["X"],
        "chat_template_kwargs": {"anything": 1},
    }
    played.text = "beforeXafter"
    reply = ask(client, extra_body=extra)
    assert reply.output_text == "before"
    (sampling,) = played.samplings
    assert (sampling.seed, sampling.top_k, sampling.min_p) == (7, 3, 0.25)
    assert (sampling.presence_penalty, sampling.repetition_penalty) == (0.5, 1.5)


def test_harmless_fields_do_not_change_the_prompt(client: OpenAI, played: Played) -> None:
    ask(client)
    ask(
        client,
        include=["file_search_call.results"],
        reasoning={"effort": "medium", "summary": "auto", "context": "all_turns"},
        service_tier="priority",
        max_tool_calls=3,
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        prompt_cache_options={"mode": "implicit"},
        safety_identifier="s",
        text={"verbosity": "low"},
        stream_options={"include_obfuscation": False},
        truncation="auto",
        context_management=[{"type": "compaction", "compact_threshold": 1000}],
        extra_body={"client_metadata": {"a": "b"}, "user": 5, "request_id": "r"},
    )
    assert played.prompts[0] == played.prompts[1]


def test_texts_have_logprobs_only_if_they_are_asked_for(client: OpenAI, played: Played) -> None:
    played.text = "ab"
    include = ["message.output_text.logprobs"]
    found = events(client, include=include, top_logprobs=2)
    deltas = [e for e in found if e.type == "response.output_text.delta"]
    scores = [score for delta in deltas for score in delta.logprobs]
    assert "".join(score.token for score in scores) == "ab"
    assert all(len(score.top_logprobs) == 2 for score in scores)
    (part,) = found[-1].response.output[0].content
    assert [score.token for score in part.logprobs] == [score.token for score in scores]
    assert found[-1].response.top_logprobs == 2
    (plain,) = ask(client).output[0].content
    assert plain.logprobs == []


def test_truncation_leaves_out_the_oldest_items(client: OpenAI, played: Played) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "first"}'}
    history = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "old " * 800},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "result " * 400},
        {"role": "user", "content": "newer"},
        {"role": "user", "content": "newest"},
    ]
    with pytest.raises(BadRequestError) as caught:
        ask(client, history)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    ask(client, history, truncation="auto", max_output_tokens=20)
    assert "old old" not in played.prompts[0]
    assert all(text in played.prompts[0] for text in ("Be kind.", "first", "result", "newest"))
    ask(client, history, truncation="auto", max_output_tokens=3000)
    assert "result" not in played.prompts[1]
    assert "newer" in played.prompts[1]
    with pytest.raises(BadRequestError):
        ask(client, "long " * 2000, truncation="auto")


# --- stored responses


def test_a_response_in_background_mode_is_refused(client: OpenAI) -> None:
    with fails(BadRequestError, "invalid_value", match="background") as caught:
        ask(client, background=True)
    assert caught.value.param == "background"
    assert ask(client, background=False).background is False


def test_many_tools_that_are_left_out_give_few_warnings_and_log_lines(
    client: OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """A client could otherwise fill the log, whose reader is slower than the server."""
    types = [f"web_search_{number}" for number in range(1000)]
    with caplog.at_level("WARNING"):
        warnings = ask(client, tools=[{"type": type} for type in types]).warnings
    assert len(warnings) == 17
    assert "'web_search_0'" in warnings[0]
    assert "984 further" in warnings[-1]
    assert len(caplog.records) <= 17
    with pytest.raises(BadRequestError) as caught:
        ask(client, tools=[{"type": "web_search" + "x" * 7000}])
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("place", ["tools", "input"])
def test_tools_in_namespaces_count_towards_the_limit(client: OpenAI, place: str) -> None:
    functions = [{"type": "function", "name": f"f{number}"} for number in range(600)]
    tools = [{"type": "namespace", "name": name, "tools": functions} for name in "ab"]
    fields: Any = {"tools": tools}
    if place == "input":
        fields = {"input": [{"type": "additional_tools", "role": "user", "tools": tools}]}
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "hi", **fields})
    assert caught.value.param == "tools"
    assert "1200" in str(caught.value)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "query"),
        ("starting_after=3", "query"),
        ("color=red", "query"),
        ("include=a&include=b&include[]=c", None),
    ],
)
def test_query_parameters_for_a_stored_response_are_checked(
    client: OpenAI, query: str, param: str | None
) -> None:
    path = f"/responses/{ask(client).id}?{query}"
    if param is None:
        client.get(path, cast_to=object)
        return
    with pytest.raises(BadRequestError) as caught:
        client.get(path, cast_to=object)
    assert caught.value.param == param


@pytest.mark.parametrize("type", [None, {}, "", "message"])
def test_the_type_of_an_item_must_be_a_string_but_may_be_left_out(
    client: OpenAI, type: Any
) -> None:
    item = {"type": type, "role": "user", "content": "hi"}
    if type in (None, "message"):
        ask(client, [item])
        return
    with pytest.raises(BadRequestError) as caught:
        ask(client, [item])
    assert caught.value.param == "input[0]"


def test_unknown_query_parameters_are_refused(client: OpenAI) -> None:
    reply = ask(client)
    url = f"{client.base_url}responses/{reply.id}?invented=1"
    assert httpx2.get(url).json()["error"]["param"] == "query"
