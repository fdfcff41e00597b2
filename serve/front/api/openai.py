"""Validates the bodies of OpenAI's requests.

A field of OpenAI or vLLM that is not supported must have a value without effect, unless the field
is harmless (`serve.front.api.fields`). Unknown fields are ignored, as in vLLM, and recorded.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from serve.core.errors import RequestError
from serve.front.api.custom_tools import ChatCustomTool, CustomTool, NamedCustom
from serve.front.api.fields import HARMLESS, NEUTRAL, check_neutral
from serve.front.api.messages import AnyContent, RequestMessage, plain_messages
from serve.front.api.request import DEFAULT_MODEL, ChatPrompt, ChatRequest, ToolUse
from serve.front.api.sampling import MAX_LOGPROBS, SamplingBody, TokenIds
from serve.front.api.thinking import Thinking
from serve.front.api.tools import (
    MAX_TOOLS,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
)
from serve.front.api.wording import MAX_PATH_CHARACTERS, request_error
from serve.front.http.body import Body, refuse
from serve.front.output.answer import Listing, UsageInStream
from serve.front.text.tokens import Tokenizer

MAX_PROMPTS = 1024
# How many ignored names are kept: more than a reply's header can list.
_MAX_IGNORED_NAMES = 400

Parsed = TypeVar("Parsed", bound=Body)


class Lenient(Body):
    """A body whose unknown fields `parse` ignores. The body records the names of these fields."""

    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        return self._ignored

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        schema = handler.resolve_ref_schema(handler(core_schema))
        model = schema["properties"].get("model", {})
        if model.get("type") == "string":  # The field may also be null, which means none.
            schema["properties"]["model"] = {"anyOf": [model, {"type": "null"}]}
        for name in HARMLESS:
            schema["properties"].setdefault(name, {})
        for name, neutral in NEUTRAL.items():
            schema["properties"].setdefault(name, {"enum": [None, *neutral]})
        return schema | {"additionalProperties": True}


def _not_zero(num_tokens: int) -> int:
    if num_tokens == 0:
        refuse("must be at least 1, not 0")
    return num_tokens


class StreamOptions(Body):
    """include_obfuscation, padding that hides the lengths of tokens, has no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


# The limit of an answer. -1 means as many tokens as fit, as in llama.cpp and LM Studio.
MaxTokens = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]


def _num_listed(num: int) -> int:
    """Returns how many likely tokens to list: for -1, as many as the server allows."""
    return MAX_LOGPROBS if num < 0 else num


NumLogprobs = Annotated[int, Field(ge=-1, le=MAX_LOGPROBS), AfterValidator(_num_listed)]

# Prompts share cached prefixes only with prompts of the same salt, as in vLLM.
CacheSalt = Annotated[str, Field(min_length=1)]


class GenerationBody(SamplingBody, Lenient):
    """The body of a request for answers. Without stream, stream_options have no effect."""

    model: str = DEFAULT_MODEL
    max_tokens: MaxTokens | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 63)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    cache_salt: CacheSalt | None = None

    @model_validator(mode="after")
    def _stream_fits(self) -> "GenerationBody":
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs are not available with stream=true", "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            refuse(
                "truncate_prompt_tokens must not be 0: no token of the prompt would be left",
                "truncate_prompt_tokens",
            )
        return self

    @property
    def usage_in_stream(self) -> UsageInStream:
        options = self.stream_options
        if options is None or not options.include_usage:
            return UsageInStream.NONE
        return UsageInStream.EACH if options.continuous_usage_stats else UsageInStream.LAST


DeclaredTool = Annotated[Tool | ChatCustomTool, Discriminator("type")]
DeclaredTools = Annotated[list[DeclaredTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
NamedChoice = Annotated[NamedTool | NamedCustom, Discriminator("type")]


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, fail_fast=True)]


class AllowedTools(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


# "any" is Mistral's and Anthropic's word for "required".
GivenChoice = Literal["none", "auto", "required", "any"] | NamedTool | NamedCustom | AllowedTools


def chosen(tools: list[Tool], given: GivenChoice | None) -> tuple[list[Tool], ToolChoice]:
    """Returns the offered tools, and how the model may choose among them. Raises RequestError."""
    match given:
        case None:
            return tools, "auto"
        case "any":
            return tools, "required"
        case NamedCustom():
            name = FunctionName(name=given.custom.name)
            return tools, NamedTool(type="function", function=name)
        case AllowedTools():
            return _allowed(tools, given.allowed_tools), given.allowed_tools.mode
        case _:
            return tools, given


def _allowed(tools: list[Tool], allowed: Allowed) -> list[Tool]:
    names = {_name(tool) for tool in allowed.tools}
    unknown = names - {tool.function.name for tool in tools}
    if unknown:
        raise RequestError(
            f"tool_choice allows {min(unknown)[:80]!r}, which is not among the tools.",
            param="tool_choice",
            code="unknown_tool",
        )
    return [tool for tool in tools if tool.function.name in names]


def _name(named: NamedTool | NamedCustom) -> str:
    return named.custom.name if isinstance(named, NamedCustom) else named.function.name


class Templated(Body):
    """The fields from which a prompt is rendered."""

    messages: Annotated[list[RequestMessage], Field(min_length=1), FailFast()]
    tools: DeclaredTools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "Templated":
        if self.continue_final_message and self.add_generation_prompt:
            refuse(
                "continue_final_message cannot be combined with add_generation_prompt",
                "continue_final_message",
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> "Templated":
        functions = {tool.function.name for tool in self.tools or () if isinstance(tool, Tool)}
        both = functions & self.custom_tools.keys()
        if both:
            refuse(f"has a function and a custom tool {min(both)!r}: rename one of them", "tools")
        return self

    @property
    def custom_tools(self) -> dict[str, CustomTool]:
        """The custom tools, by their names."""
        custom = (tool.plain() for tool in self.tools or () if isinstance(tool, ChatCustomTool))
        return {tool.name: tool for tool in custom}

    @property
    def functions_of_tools(self) -> list[Tool]:
        """All tools as functions, the only kind that a model knows."""
        tools = self.tools or ()
        return [tool if isinstance(tool, Tool) else tool.as_tool() for tool in tools]

    @property
    def offered(self) -> tuple[list[Tool], ToolChoice]:
        """The tools that are offered to the model, and the choice among them."""
        return self.functions_of_tools, "auto"

    def prompt(self) -> ChatPrompt:
        """Returns the parts that the prompt is rendered from."""
        tools, _ = self.offered
        continues = bool(self.continue_final_message)
        adds_prompt = self.add_generation_prompt
        if adds_prompt is None:
            adds_prompt = not continues
        return ChatPrompt(
            messages=plain_messages(self.messages),
            tools=tools,
            options=self.chat_template_kwargs or {},
            adds_generation_prompt=adds_prompt,
            continues=continues,
        )


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Prediction(Body):
    """The answer that a client expects, or a part of it: a prediction changes only the speed."""

    type: Literal["content"]
    content: AnyContent

    @property
    def text(self) -> str:
        return self.content.text if self.content else ""


class ChatBody(Templated, GenerationBody):
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tool_choice: GivenChoice | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    return_progress: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatBody":
        if self.functions and self.tools:
            refuse("functions is the older name of tools: give one of them", "functions")
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs needs logprobs=true", "top_logprobs")
        return self

    @property
    def offered(self) -> tuple[list[Tool], ToolChoice]:
        if self.functions is None:
            return chosen(self.functions_of_tools, self.tool_choice)
        tools = [Tool(type="function", function=function) for function in self.functions]
        if isinstance(self.function_call, FunctionName):
            return tools, NamedTool(type="function", function=self.function_call)
        return tools, self.function_call or "auto"

    @property
    def is_parallel(self) -> bool:
        """Whether an answer may contain several calls. The older fields allow only one."""
        return self.parallel_tool_calls is not False and self.functions is None

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the model may call, and whether it has to."""
        tools, choice = self.offered
        custom = {tool.function.name for tool in tools} & self.custom_tools.keys()
        inputs: dict[str, str] = {}
        for name in sorted(custom):
            grammar = self.custom_tools[name].grammar()
            if grammar:
                inputs[name] = grammar
        lark = frozenset(name for name in inputs if self.custom_tools[name].is_lark)
        return ToolUse(tools, choice, self.is_parallel, self._is_raw, inputs, lark)

    @property
    def _is_raw(self) -> bool:
        """Whether the whole answer is a custom tool's input, because that tool is demanded."""
        _, choice = self.offered
        return isinstance(choice, NamedTool) and choice.function.name in self.custom_tools

    def grammars(self) -> dict[str, str]:
        call_grammar = self.tool_use.grammar()
        if self._is_raw and call_grammar is None:
            return {}  # The tool's input is free text, whatever response_format is.
        found = super().grammars()
        if call_grammar:
            found["tool_choice"] = call_grammar
        return found

    @property
    def max_answer_tokens(self) -> int | None:
        """The limit of an answer. The newer of the two fields takes precedence."""
        return self.max_completion_tokens or self.max_tokens

    def request(self, tokenizer: Tokenizer) -> ChatRequest:
        """Converts this body to the request of a chat. Raises RequestError."""
        listing = self._listing()
        grammars = self.grammars()
        samplings = self.samplings(tokenizer, grammars, listing.logprobs, listing.prompt_logprobs)
        thinking = Thinking(
            self.reasoning_effort,
            self.thinking_token_budget,
            self.enable_thinking,
        )
        return ChatRequest(
            model=self.model,
            prompt=self.prompt(),
            samplings=samplings,
            end_ids=self.end_ids(tokenizer),
            stop=self.stop_rules(tokenizer),
            tool_use=self.tool_use,
            thinking=thinking,
            listing=listing,
            grammar_param=next(iter(grammars), None),
            max_tokens=self.max_answer_tokens,
            keep=self.truncate_prompt_tokens,
            adds_special_tokens=bool(self.add_special_tokens),
            skips_special_tokens=self.skip_special_tokens is not False,
            shows_thoughts=self.include_reasoning is not False,
            is_stream=bool(self.stream),
            usage_in_stream=self.usage_in_stream,
            cache_salt=self.cache_salt,
            prediction=self.prediction.text if self.prediction else "",
            ignored_fields=self.ignored_fields,
        )

    def _listing(self) -> Listing:
        return Listing(
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            token_ids=bool(self.return_token_ids),
            as_ids=bool(self.return_tokens_as_token_ids),
            function_call=self.functions is not None,
            progress=bool(self.return_progress),
            custom_tools=tuple(self.custom_tools),
            is_raw_input=self._is_raw,
        )


def list_prompts(prompt: Any, limit: int = MAX_PROMPTS) -> Any:
    """Returns one prompt or several, as a tuple. Raises ValueError."""
    is_one = isinstance(prompt, str) or (prompt and _is_prompt(prompt))
    prompts = [prompt] if is_one else prompt
    if not isinstance(prompts, list) or not prompts:
        refuse("must be a string, a list of strings, of token ids, or of lists of token ids")
    if len(prompts) > limit:
        refuse(f"has {len(prompts)} prompts, but only {limit} are allowed")
    for one in prompts:
        if not one:
            refuse("has an empty prompt")
        if not _is_prompt(one):
            refuse("has a prompt that is neither text nor a list of token ids from 0 to 2**31 - 1")
    return tuple(prompts)


def _is_prompt(given: Any) -> bool:
    """Whether given is one prompt: a text, or a list of token ids."""
    if isinstance(given, str):
        return True
    return isinstance(given, list) and all(type(id) is int and 0 <= id < 2**31 for id in given)


OnePrompt = str | list[int]
PromptsInput = str | list[int] | list[OnePrompt]  # as a client gives them
_LIST_PROMPTS = BeforeValidator(list_prompts, json_schema_input_type=PromptsInput)


class CompletionBody(GenerationBody):
    prompt: Annotated[tuple[OnePrompt, ...], _LIST_PROMPTS]
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens may be 0 only with echo=true", "max_tokens")
        if self.best_of is not None and self.best_of != self.num_choices:
            refuse("best_of other than n is not supported: leave it out", "best_of")
        return self

    @property
    def listing(self) -> Listing:
        """The details that the reply lists in addition to the text."""
        return Listing(
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            token_ids=bool(self.return_token_ids),
            as_ids=bool(self.return_tokens_as_token_ids),
            echo=bool(self.echo),
        )

    @property
    def num_scored(self) -> int | None:
        """How many likely tokens are listed for each token of the prompt; None for no scores."""
        counts = [self.prompt_logprobs]
        if self.echo:
            counts.append(self.logprobs)
        return max((num for num in counts if num is not None), default=None)


class TokenizeBody(Lenient):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(Templated, Lenient):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Lenient):
    model: str | None = None
    tokens: TokenIds


Tokenizable = TokenizeBody | TokenizeChatBody


# --- from JSON


def parse(kind: type[Parsed], body: dict[str, Any]) -> Parsed:
    """Validates a body without its nulls. Raises RequestError that names the first wrong field."""
    body = {name: value for name, value in body.items() if value is not None}
    if not issubclass(kind, Lenient):
        return _validated(kind, body)
    known = kind.model_fields.keys() | NEUTRAL.keys() | HARMLESS
    unknown = [name[:MAX_PATH_CHARACTERS] for name in sorted(body.keys() - known)]
    supported = {name: body[name] for name in body if name in kind.model_fields}
    unsupported = NEUTRAL.keys() - supported.keys()
    for name in body.keys() & unsupported:
        check_neutral(name, body[name])
    parsed = _validated(kind, supported)
    parsed._ignored = tuple(unknown[:_MAX_IGNORED_NAMES])
    return parsed


def _validated(kind: type[Parsed], body: dict[str, Any]) -> Parsed:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise request_error(error, body) from error
