"""Anthropic's Messages: its bodies, which become the request of a chat."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from serve.core.errors import RequestError
from serve.front.api.anthropic.blocks import Texts, Turn, parts_of
from serve.front.api.anthropic.edits import Context, ContextManagement
from serve.front.api.anthropic.tools import DeclaredTools, Offer, ToolChoice, offer
from serve.front.api.messages import AssistantPart, ChatMessage, joined_parts
from serve.front.api.openai import CacheSalt
from serve.front.api.request import DEFAULT_MODEL, ChatPrompt, ChatRequest, ToolUse
from serve.front.api.sampling import StopList, Temperature, TopK, TopP, basic_sampling, only_grammar
from serve.front.api.structured import format_grammar
from serve.front.api.thinking import Thinking
from serve.front.http.body import Body, Tolerant
from serve.front.http.replies import Json
from serve.front.output.choice import StopRules
from serve.front.text.tokens import Tokenizer

Count = Callable[[ChatPrompt], int]


class JsonFormat(Tolerant):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """task_budget is a hint for models that were trained to read it, and changes nothing."""

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


@dataclass(frozen=True, slots=True)
class EditedPrompt:
    """A prompt after the edits that the request asked for. num_tokens_before is the length of the
    prompt without them, if any did something."""

    prompt: ChatPrompt
    offer: Offer
    applied_edits: list[Json] | None
    num_tokens_before: int | None


class HarmlessFields(Body):
    """The fields that cannot change the meaning of an answer, whatever they hold."""

    betas: Any = None
    billing_policy: Any = None
    cache_control: Any = None
    container: None = None
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
    context_management: ContextManagement | None = None
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

    def edited(self, count: Count) -> EditedPrompt:
        """Returns the prompt after the edits of context_management. count returns how many tokens a
        prompt has, and is called only if an edit depends on it. Raises RequestError."""
        tools = self._offer()
        context = Context(self.messages, lambda turns: count(self._prompt(turns, tools)))
        after = context
        applied: list[Json] | None = None
        if self.context_management:
            after, applied = self.context_management.apply(context)
        return EditedPrompt(
            prompt=self._prompt(after.turns, tools),
            offer=tools,
            applied_edits=applied,
            num_tokens_before=context.num_tokens if applied else None,
        )

    def _offer(self) -> Offer:
        found = offer(self.tools or [], self.messages, self.tool_choice)
        servers = [server.name for server in self.mcp_servers or ()]
        left_out = dict.fromkeys((*found.left_out, *servers))
        found = replace(found, left_out=tuple(left_out))
        found.check(self.tool_choice)
        return found

    def _prompt(self, turns: Sequence[Turn], offered: Offer) -> ChatPrompt:
        messages = self._messages(turns)
        continues = messages[-1]["role"] == "assistant"
        return ChatPrompt(
            messages=messages,
            tools=offered.tools,
            options=self.chat_template_kwargs or {},
            adds_generation_prompt=not continues,
            continues=continues,
        )

    def _messages(self, turns: Sequence[Turn]) -> list[ChatMessage]:
        parts: list[ChatMessage | AssistantPart] = []
        for block in self.system or ():
            parts += block.parts("system")
        parts += parts_of(turns)
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

    def request(self, tokenizer: Tokenizer, edited: EditedPrompt) -> ChatRequest:
        """Converts this body to the request of a chat with this prompt. Raises RequestError."""
        use = self._tool_use(edited.offer)
        grammars = self._grammars(use)
        numbers = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        sampling = basic_sampling(tokenizer, numbers, only_grammar(grammars))
        return ChatRequest(
            model=self.model,
            prompt=edited.prompt,
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

    def _tool_use(self, offered: Offer) -> ToolUse:
        if self.tool_choice is None:
            return ToolUse(offered.tools)
        is_parallel = not self.tool_choice.disable_parallel_tool_use
        return ToolUse(offered.tools, self.tool_choice.as_chat(), is_parallel)

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
    """Joins messages of users or of the system that follow each other: the content of each is a
    line of one message."""
    for role, run in groupby(messages, lambda message: message["role"]):
        if role in ("system", "user"):
            contents = [message["content"] for message in run]
            yield {"role": role, "content": "\n".join(contents)}
        else:
            yield from run
