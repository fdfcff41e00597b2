"""The request of a chat, which each API's body becomes; `chat.prepare` turns it into a job."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from serve.core.errors import RequestError
from serve.core.types import Sampling
from serve.front.api.messages import CallPart, ChatMessage, FunctionPart, template_message
from serve.front.api.thinking import Thinking
from serve.front.api.tools import NamedTool, Tool, ToolChoice, declared, grammar_of_call
from serve.front.output.answer import Listing, UsageInStream
from serve.front.output.choice import StopRules
from serve.front.output.splitter import Splitting
from serve.front.text.tokens import Tokenizer

# The name that stands for the model in a request without one.
DEFAULT_MODEL = "default"
# The content of made-up messages. Few real messages begin with the same text.
_PROBE = "§ What comes next?"
_PROBE_ID = "p00000000"  # Some templates accept only ids of nine letters and digits.


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The parts that a chat's prompt is rendered from. options are variables of the chat template.
    If continues, the last message is left open, and the answer continues it."""

    messages: list[ChatMessage]
    tools: list[Tool] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)
    adds_generation_prompt: bool = True
    continues: bool = False

    def with_defaults(self, options: Mapping[str, Any]) -> "ChatPrompt":
        """Returns the same parts, with these variables unless the request itself sets them."""
        return replace(self, options={**options, **self.options})

    def later(self) -> Iterator["ChatPrompt"]:
        """Yields prompts that may come later and share a prefix with this one: another chat with
        the same system prompt and tools, and the next turns of this chat."""
        roles = [message["role"] for message in self.messages]
        is_system = [role in ("system", "developer") for role in roles]
        num_fixed = (*is_system, False).index(False)
        question: ChatMessage = {"role": "user", "content": _PROBE}
        if num_fixed or self.tools:
            yield replace(self, messages=[*self.messages[:num_fixed], question])
        if self.continues or not self.adds_generation_prompt:
            return
        answer: ChatMessage = {"role": "assistant", "content": _PROBE}
        yield replace(self, messages=[*self.messages, answer, question])
        if roles[-1:] == ["tool"] and self.tools:
            function: FunctionPart = {"name": self.tools[0].function.name, "arguments": "{}"}
            call: CallPart = {"id": _PROBE_ID, "type": "function", "function": function}
            calling: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
            result: ChatMessage = {"role": "tool", "content": _PROBE, "tool_call_id": _PROBE_ID}
            yield replace(self, messages=[*self.messages, calling, result])

    def render(self, tokenizer: Tokenizer) -> str:
        """Returns the prompt's text. Raises RequestError."""
        reads = tokenizer.template_reads
        messages = [template_message(message, reads) for message in self.messages]
        return tokenizer.render(
            messages,
            self.options,
            self.adds_generation_prompt,
            self.continues,
            declared(self.tools),
        )


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model may call, and whether it has to. If is_raw, the whole answer is a
    tool's input. inputs maps tools to the grammars of their inputs, which are optional for the
    tools in lark_inputs."""

    tools: list[Tool] = field(default_factory=list)
    choice: ToolChoice = "auto"
    is_parallel: bool = True
    is_raw: bool = False
    inputs: Mapping[str, str] = field(default_factory=dict)
    lark_inputs: frozenset[str] = frozenset()

    def has_unenforced_inputs(self, enforced: Collection[str]) -> bool:
        """Whether the model may call a tool whose Lark grammar is not enforced."""
        may_call = self.choice != "none" and not self.is_raw
        return may_call and not self.lark_inputs <= set(enforced)

    @property
    def is_free(self) -> bool:
        """Whether the model decides if it calls a tool."""
        return bool(self.tools) and self.choice == "auto"

    @property
    def is_forced(self) -> bool:
        """Whether the model has to call a tool."""
        return self.choice not in ("none", "auto")

    @property
    def is_strict(self) -> bool:
        """Whether a tool demands that its calls follow its schema."""
        return any(tool.function.strict for tool in self.tools)

    @property
    def declared(self) -> list[dict[str, Any]]:
        """The declared tools as JSON, in the form that chat templates take."""
        return declared(self.tools)

    def grammar(self) -> str | None:
        """Returns the grammar of a forced call, None if there is none. Raises RequestError."""
        if self.is_raw and isinstance(self.choice, NamedTool):
            return self.inputs.get(self.choice.function.name)
        return grammar_of_call(self.tools, self.choice, self.is_parallel)

    @property
    def demanded(self) -> list[dict[str, Any]]:
        """The declared tools that a forced call may name."""
        if not isinstance(self.choice, NamedTool):
            return self.declared
        name = self.choice.function.name
        return [tool for tool in self.declared if tool["function"]["name"] == name]

    @property
    def allows_several(self) -> bool:
        """Whether an answer may contain more than one call. A named tool is called once."""
        return self.is_parallel and not isinstance(self.choice, NamedTool)

    def splitting(
        self,
        is_thinking: bool,
        shows_thoughts: bool,
        *,
        is_native: bool = False,
    ) -> Splitting:
        """Returns how the text of answers is split. is_native says that forced calls are in the
        format of the model's dialect, and not in the JSON that a grammar can force on any model."""
        named = self.choice.function.name if isinstance(self.choice, NamedTool) else None
        return Splitting(
            reads_marks=True,
            finds_calls=self.is_free or is_native,
            is_thinking=is_thinking,
            declared=tuple(self.declared),
            forced_tool=None if is_native else named,
            forces_calls=self.choice == "required" and not is_native,
            demands_call=self.is_forced,
            names_tool=named is not None,
            is_parallel=self.allows_several,
            shows_thoughts=shows_thoughts,
        )


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The decisions about a chat, which gets an answer for each of samplings. The engine ends an
    answer at end_ids. grammar_param is the field that demands the grammar. Only the prompt's last
    keep tokens are used, if keep is not None; with drops_oldest, whole messages are left out.
    prediction is the text that the client expects, which may make answers faster."""

    model: str
    prompt: ChatPrompt
    samplings: tuple[Sampling, ...]
    end_ids: frozenset[int]
    stop: StopRules = field(default_factory=StopRules)
    tool_use: ToolUse = field(default_factory=ToolUse)
    thinking: Thinking = field(default_factory=Thinking)
    listing: Listing = field(default_factory=Listing)
    grammar_param: str | None = None
    max_tokens: int | None = None
    keep: int | None = None
    drops_oldest: bool = False
    adds_special_tokens: bool = False
    skips_special_tokens: bool = True
    shows_thoughts: bool = True
    is_stream: bool = False
    usage_in_stream: UsageInStream = UsageInStream.NONE
    cache_salt: str | None = None
    prediction: str = ""
    ignored_fields: tuple[str, ...] = ()


def check_num_answers(num_answers: int, limit: int) -> None:
    """Raises RequestError if a request asks for more answers than the server takes at a time."""
    if num_answers > limit:
        raise RequestError(
            f"The request asks for {num_answers} answers, but only {limit} are allowed at "
            "a time: send fewer prompts or a smaller n."
        )
