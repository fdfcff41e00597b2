"""The bodies of /v1/responses, which become the requests of chats."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from serve.core.errors import RequestError
from serve.front.api.messages import ChatMessage
from serve.front.api.openai import CacheSalt, Effort
from serve.front.api.request import DEFAULT_MODEL, ChatPrompt, ChatRequest, ToolUse
from serve.front.api.responses.items import Items, ToolItem, items_of, messages_of
from serve.front.api.responses.offer import (
    NamedChoice,
    OfferedTool,
    OfferedTools,
    ToolDeclaration,
    offer_of,
)
from serve.front.api.sampling import MAX_LOGPROBS, PARAMETERS, SamplingBody
from serve.front.api.structured import format_grammar
from serve.front.api.thinking import Thinking
from serve.front.api.tools import MAX_TOOLS, NamedTool, Tool, ToolChoice
from serve.front.http.body import Tolerant, refuse
from serve.front.http.replies import Json, encode
from serve.front.output.answer import Listing
from serve.front.text.tokens import Tokenizer

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

_MAX_WARNINGS = 16

Strings = Annotated[list[str], Field(fail_fast=True)]


class Format(Tolerant):
    """The format of the text: a chat's response_format without its inner object."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "Format":
        if self.type != "json_schema" and len(self.model_fields_set) > 1:
            refuse("name, description, schema and strict are allowed with type json_schema only")
        return self

    def grammar(self) -> str | None:
        """Returns the grammar of the format, None for text."""
        return format_grammar(self.type, self.schema_ or {})


class TextOptions(Tolerant):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Tolerant):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


Name = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Name, Value], Field(max_length=16)]  # the limits are OpenAI's


# A null model is the same as none.
_MODEL_TYPE = WithJsonSchema({"type": ["string", "null"], "default": DEFAULT_MODEL})


class InputTokensBody(SamplingBody):
    """The fields of a prompt, and vLLM's sampling parameters. Unknown fields are refused."""

    model: Annotated[str, _MODEL_TYPE] = DEFAULT_MODEL
    input: Items
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[ToolDeclaration], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: Literal["none", "auto", "required", "any"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    cache_salt: CacheSalt | None = None
    n: Literal[1] | None = None
    response_format: None = None
    # The fields from here on have no effect on the answer.
    client_metadata: Any = None
    context_management: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    return_progress: bool | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    session_id: str | None = None
    timings_per_token: bool | None = None
    user: str | int | None = None

    @property
    def thinking(self) -> Thinking:
        effort = self.reasoning.effort if self.reasoning else None
        return Thinking(effort, self.thinking_token_budget)

    @cached_property
    def offer(self) -> OfferedTools:
        """The tools that the model is offered. Raises RequestError."""
        declared = list(self.tools or ())
        for item in self.input:
            if isinstance(item, ToolItem):
                declared += item.tools
        offer = offer_of(declared)
        if not isinstance(self.tool_choice, NamedChoice):
            return offer
        return self.tool_choice.narrowed(offer)

    @property
    def _choice(self) -> ToolChoice:
        """The choice among the offered tools. Raises RequestError."""
        if isinstance(self.tool_choice, NamedChoice):
            return self.tool_choice.choice(self.offer)
        return "required" if self.tool_choice == "any" else self.tool_choice or "auto"

    @property
    def _raw_name(self) -> str | None:
        """The name of the custom tool whose input is the whole answer, because it is demanded."""
        if not isinstance(self._choice, NamedTool):
            return None
        name = self._choice.function.name
        return name if self.offer.tools[name].kind == "custom" else None

    @cached_property
    def tool_use(self) -> ToolUse:
        """The tools in the form of a chat. Raises RequestError."""
        functions = self.offer.functions.values()
        tools = [Tool(type="function", function=function) for function in functions]
        inputs = {name: each.grammar for name, each in self.offer.tools.items() if each.grammar}
        is_raw = self._raw_name is not None
        return ToolUse(tools, self._choice, self.parallel_tool_calls is not False, is_raw, inputs)

    @property
    def offered(self) -> Mapping[str, OfferedTool]:
        """The offered tools by the model's names, as needed to read its calls."""
        tools = self.offer.tools
        raw_name = self._raw_name
        if raw_name is None:
            return tools
        return {**tools, raw_name: replace(tools[raw_name], is_raw=True)}

    def grammars(self) -> dict[str, str]:
        call_grammar = self.tool_use.grammar()
        if self.tool_use.is_raw and call_grammar is None:
            return {}  # The tool's input is free text, whatever text.format is.
        found = super().grammars()
        format_grammar = self._format_grammar()
        if format_grammar:
            found["response_format"] = format_grammar
        if call_grammar:
            found["tool_choice"] = call_grammar
        return found

    def _format_grammar(self) -> str | None:
        if self.text is None or self.text.format is None:
            return None
        return self.text.format.grammar()

    def warnings(self, enforced_inputs: Collection[str]) -> list[str]:
        """Returns a warning for each tool that is not offered, or whose grammar is not enforced."""
        free_tools = [
            offered
            for name, offered in self.offer.tools.items()
            if offered.is_lark and name not in enforced_inputs and name != self._raw_name
        ]
        warnings = [*self.offer.warnings, *map(_unenforced, free_tools)]
        num_more = len(warnings) - _MAX_WARNINGS
        if num_more <= 0:
            return warnings
        return [*warnings[:_MAX_WARNINGS], f"There are {num_more} further warnings."]

    def prompt(self, messages: list[ChatMessage]) -> ChatPrompt:
        """Returns the parts that the prompt of these messages is rendered from."""
        first: list[ChatMessage] = []
        if self.instructions:
            first = [{"role": "system", "content": self.instructions}]
        return ChatPrompt(
            messages=[*first, *messages],
            tools=self.tool_use.tools,
            options=self.chat_template_kwargs or {},
        )


def _unenforced(offered: OfferedTool) -> str:
    return (
        f"The Lark grammar of the tool {offered.name!r} is not enforced, only described "
        "to the model, because this model writes the input as JSON. It is enforced if "
        "tool_choice demands the tool."
    )


# The fields that a response repeats, in addition to the sampling parameters.
_REPEATED = {
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "safety_identifier",
    "seed",
    "store",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "user",
    *PARAMETERS,
}


def _in_foreground(background: bool) -> bool:
    if background:
        refuse("may not be true: keep the connection until the answer ends")
    return background


# Literal[False] would accept 0.
Foreground = Annotated[bool, AfterValidator(_in_foreground), WithJsonSchema({"const": False})]


class ResponsesBody(InputTokensBody):
    """The body of a request. Unknown fields are refused."""

    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    background: Foreground | None = None
    metadata: Metadata | None = None
    include: Strings | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None

    @property
    def encrypts(self) -> bool:
        """Whether items of reasoning carry their text as encrypted_content."""
        return ENCRYPTED in (self.include or ())

    def _listing(self) -> Listing:
        has_logprobs = bool(self.top_logprobs) or LOGPROBS in (self.include or ())
        if not has_logprobs:
            return Listing()
        return Listing(logprobs=self.top_logprobs or 0)

    def request(self, messages: list[ChatMessage], tokenizer: Tokenizer) -> ChatRequest:
        """Converts this body to the request of a chat. messages are the continued response's
        messages and then this one's own. Raises RequestError, which names the fields of a chat."""
        listing = self._listing()
        grammars = self.grammars()
        samplings = self.samplings(tokenizer, grammars, listing.logprobs)
        return ChatRequest(
            model=self.model,
            prompt=self.prompt(messages),
            thinking=self.thinking,
            samplings=samplings,
            end_ids=self.end_ids(tokenizer),
            stop=self.stop_rules(tokenizer),
            tool_use=self.tool_use,
            listing=listing,
            grammar_param=next(iter(grammars), None),
            max_tokens=self.max_output_tokens,
            drops_oldest=self.truncation == "auto",
            skips_special_tokens=self.skip_special_tokens is not False,
            is_stream=bool(self.stream),
            cache_salt=self.cache_salt,
        )

    def plan(self, enforced_inputs: Collection[str] = ()) -> "ResponsePlan":
        """Returns the writer's data. enforced_inputs are tools whose grammar is enforced."""
        return ResponsePlan(self._repeated(enforced_inputs), self.offered, self.encrypts)

    def _repeated(self, enforced_inputs: Collection[str]) -> Json:
        """Returns the fields that the response repeats, with their defaults."""
        given = self.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPEATED)
        default_text: Json = {"format": {"type": "text"}}
        default_reasoning = {"effort": None, "summary": None}
        repeated: Json = {
            "parallel_tool_calls": True,
            "truncation": "disabled",
            "metadata": {},
            "output": [],
            "temperature": 1.0,
            "top_p": 1.0,
            "top_logprobs": 0,
            "tool_choice": "auto",
            "tools": [],
            "store": True,
            "background": False,
            "service_tier": "default",
            "instructions": None,
            "max_output_tokens": None,
            "previous_response_id": None,
            "usage": None,
            **given,
            "text": default_text | given.get("text", {}),
            "reasoning": default_reasoning | given.get("reasoning", {}),
        }
        if warnings := self.warnings(enforced_inputs):
            repeated["warnings"] = warnings
        return repeated


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """The writer's data: repeated fields, tools by the model's names, encrypted reasoning."""

    repeated: Json
    offered: Mapping[str, OfferedTool]
    encrypts: bool = False


# The fields of a response, by the names of a chat's fields.
_FIELDS = {
    "messages": "input",
    "response_format": "text.format",
}


@contextmanager
def response_field_names() -> Iterator[None]:
    """Makes errors about a chat name the fields of a response."""
    try:
        yield
    except RequestError as error:
        error.param = _FIELDS.get(error.param or "", error.param)
        raise


def output_messages(output: Iterable[Json], offer: OfferedTools) -> list[ChatMessage]:
    """Converts a response's own items to messages of a chat."""
    return messages_of(items_of(list(output)), offer)


def joined(messages: bytes, more: list[ChatMessage]) -> bytes:
    """Returns a list as JSON, with more messages at its end."""
    if not more:
        return messages
    separator = b"" if messages == b"[]" else b","
    return messages[:-1] + separator + encode(more)[1:]
