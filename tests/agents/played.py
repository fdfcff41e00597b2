"""A real HTTP front whose engine plays prepared answers, for the agents and for what they send."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from serve.core.types import Sampling
from serve.front.pipeline.interface import Prompt
from serve.front.text.tokens import Tokenizer
from serve.rank.grammar import GrammarCompiler
from tests.front.fakes import CONFIG, Events, FakeEngine, FakeRanks, byte_level, save

MAX_CONTEXT = 1 << 17

# The call format that most models write: Hermes', which mlx-lm calls json_tools.
TEMPLATE = r"""
{%- if tools -%}
<|im_start|>system
# Tools
For each call, write <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' -}}
{%- if message.reasoning_content -%}
{{ '<think>\n' + message.reasoning_content + '\n</think>\n' -}}
{%- endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set tool_call = call.function %}
<tool_call>{"name": "{{ tool_call.name }}", {# -#}
"arguments": {{ tool_call.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
""".lstrip()

# Returns the model's answer to a prompt, given a check of what its grammar allows.
Play = Callable[[str, Callable[[str], bool]], str]


def save_model(folder: Path, template: str = TEMPLATE) -> Path:
    """A tokenizer without a model. Every byte is a token, so any prompt can be encoded."""
    backend: Backend = byte_level()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "</think>"])
    return save(backend, folder, template)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an agent's tool."""

    name: str
    arguments: dict[str, Any]

    def forms(self) -> Iterator[str]:
        """What a model may write: its own format, and where a grammar forces the call, JSON."""
        call = json.dumps({"name": self.name, "arguments": self.arguments})
        yield f"<tool_call>\n{call}\n</tool_call>"
        yield json.dumps([{"name": self.name, "parameters": self.arguments}])
        yield json.dumps(self.arguments)


@dataclass(slots=True)
class Script:
    """Plays `calls` one by one to prompts that declare the tool, the next one after each result,
    and then `text`. Other prompts, such as those for a title, get `aside`. result is what the
    template puts before a tool's result. A thought comes before each answer."""

    text: str
    calls: list[Call] = field(default_factory=list)
    aside: str = "A title"
    thought: str = ""
    result: str = "<|im_start|>tool\n"

    def __call__(self, prompt: str, is_allowed: Callable[[str], bool]) -> str:
        thought = f"<think>\n{self.thought}\n</think>\n" if self.thought else ""
        forms = [thought + text for text in self._forms(prompt)]
        return next(filter(is_allowed, forms))

    def _forms(self, prompt: str) -> Iterator[str]:
        num_results = prompt.count(self.result)
        if num_results < len(self.calls):
            call = self.calls[num_results]
            if f'"name": "{call.name}"' in prompt:
                yield from call.forms()
            yield self.aside
        yield self.text


class PlayedEngine(FakeEngine):
    """Answers each prompt with what `play` returns for its text."""

    def __init__(self, tokenizer: Tokenizer, play: Play, model: str = CONFIG.model_name) -> None:
        super().__init__(tokenizer)
        self.play = play
        self.ranks = FakeRanks(served_model_name=model)
        self.adapters = self.ranks.adapters
        self._grammars = GrammarCompiler(tokenizer.folder)

    def _events(self, prompt: Prompt, sampling: Sampling, number: int) -> Events:
        def is_allowed(answer: str) -> bool:
            return sampling.grammar is None or self._follows(sampling.grammar, answer)

        text = self.tokenizer.decode(prompt.ids, skip_special_tokens=False)
        self.answer = self.play(text, is_allowed)
        return super()._events(prompt, sampling, number)

    def _follows(self, grammar: str, answer: str) -> bool:
        """Whether a model could have written it."""
        matcher = self._grammars.matcher(grammar)
        return matcher.consume_tokens(self.tokenizer.encode(answer)) and matcher.is_accepting()
