"""Anthropic's Messages: its bodies, which become the request of a chat."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from serve.core.errors import RequestError
from serve.front.api.anthropic.blocks import Texts, Turn, parts_of
from serve.front.api.anthropic.tools import DeclaredTools, ToolChoice, ToolSelection, select_tools
from serve.front.api.messages import AssistantPart, ChatMessage, joined_parts
from serve.front.api.openai import CacheSalt
from serve.front.api.request import DEFAULT_MODEL, ChatPrompt, ChatRequest, ToolUse
from serve.front.api.sampling import StopList, Temperature, TopK, TopP, basic_sampling, only_grammar
from serve.front.api.structured import format_grammar
from serve.front.api.thinking import Thinking
from serve.front.http.body import Body, Tolerant
from serve.front.output.choice import StopRules
from serve.front.text.tokens import Tokenizer


class JsonFormat(Tolerant):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Format and effort of an answer. task_budget, a hint to some models, has no effect."""

    format: JsonFormat | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    task_budget: Any = None


class AdaptiveThinking(Tolerant):
    """The model thinks as much as it likes."""

    type: Literal["adaptive", "between_tools"]
    display: Literal["summarized", "omitted", "updates"] | None = None


class EnabledThinking(Tolerant):
    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class DisabledThinking(Tolerant):
    type: Literal["disabled"]
    display: Any = None


ThinkingConfig = Annotated[
    AdaptiveThinking | EnabledThinking | DisabledThinking, Field(discriminator="type")
]


class McpServer(Tolerant):
    name: str


class HarmlessFields(Body):
    """The fields that cannot change the meaning of an answer, whatever their values."""

    betas: Any = None
    billing_policy: Any = None
    cache_control: Any = None
    container: None = None
    context_management: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    metadata: Any = None
    safeguards: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None


class CountBody(HarmlessFields):
    """The fields that form a prompt. Unknown fields are refused."""

    model: str = DEFAULT_MODEL
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: DeclaredTools | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    mcp_servers: Annotated[list[McpServer], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_thinking(self) -> Thinking:
        """The reasoning that the request asks for."""
        effort = self.output_config.effort if self.output_config else None
        if self.thinking is None:
            return Thinking(effort)
        is_wanted = not isinstance(self.thinking, DisabledThinking)
        budget = None
        if isinstance(self.thinking, EnabledThinking):
            budget = self.thinking.budget_tokens
        return Thinking(effort, budget, is_wanted, "thinking.budget_tokens")

    @cached_property
    def offer(self) -> ToolSelection:
        """The tools that the model is offered. Raises RequestError."""
        found = select_tools(self.tools or [], self.messages, self.tool_choice)
        servers = [server.name for server in self.mcp_servers or ()]
        left_out = dict.fromkeys((*found.left_out, *servers))
        found = replace(found, left_out=tuple(left_out))
        found.check(self.tool_choice)
        return found

    def prompt(self) -> ChatPrompt:
        """Returns the parts that the prompt is rendered from. Raises RequestError."""
        messages = self._messages()
        continues = messages[-1]["role"] == "assistant"
        return ChatPrompt(
            messages=messages,
            tools=self.offer.tools,
            options=self.chat_template_kwargs or {},
            adds_generation_prompt=not continues,
            continues=continues,
        )

    def _messages(self) -> list[ChatMessage]:
        parts: list[ChatMessage | AssistantPart] = []
        for block in self.system or ():
            parts += block.parts("system")
        parts += parts_of(self.messages)
        messages = list(_joined(joined_parts(parts)))
        last: ChatMessage = messages[-1] if messages else {"role": "assistant"}
        can_be_continued = bool(last.get("content")) and "tool_calls" not in last
        if last["role"] == "assistant" and not can_be_continued:
            raise RequestError(
                "messages: the last one must be the user's, or text of the assistant "
                "that can be continued.",
                param="messages",
            )
        return messages


class MessagesBody(CountBody):
    """The body of a request for an answer."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: StopList = ()
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    cache_salt: CacheSalt | None = None

    @property
    def omits_thoughts(self) -> bool:
        """Whether thinking blocks come without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def request(self, tokenizer: Tokenizer) -> ChatRequest:
        """Converts this body to the request of a chat. Raises RequestError."""
        use = self._tool_use()
        grammars = self._grammars(use)
        numbers = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        sampling = basic_sampling(tokenizer, numbers, only_grammar(grammars))
        return ChatRequest(
            model=self.model,
            prompt=self.prompt(),
            samplings=(sampling,),
            end_ids=tokenizer.eos_ids,
            stop=StopRules(strings=self.stop_sequences),
            tool_use=use,
            thinking=self.wanted_thinking,
            shows_thoughts=not isinstance(self.thinking, DisabledThinking),
            grammar_param=next(iter(grammars), None),
            max_tokens=self.max_tokens,
            is_stream=bool(self.stream),
            cache_salt=self.cache_salt,
        )

    def _tool_use(self) -> ToolUse:
        if self.tool_choice is None:
            return ToolUse(self.offer.tools)
        is_parallel = not self.tool_choice.disable_parallel_tool_use
        return ToolUse(self.offer.tools, self.tool_choice.as_chat(), is_parallel)

    def _grammars(self, use: ToolUse) -> dict[str, str]:
        """Returns the grammars that the answer must follow, by the field that demands each."""
        format = (self.output_config and self.output_config.format) or self.output_format
        found: dict[str, str] = {}
        if format:
            demanded = format_grammar(format.type, format.schema_)
            if demanded:
                found["output_config.format"] = demanded
        call_grammar = use.grammar()
        if call_grammar:
            found["tool_choice"] = call_grammar
        return found


def _joined(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Joins consecutive messages of the user, or of the system, as lines of one message."""
    for role, run in groupby(messages, lambda message: message["role"]):
        if role in ("system", "user"):
            contents = [message["content"] for message in run]
            yield {"role": role, "content": "\n".join(contents)}
        else:
            yield from run
