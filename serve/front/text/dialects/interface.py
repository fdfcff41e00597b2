"""The interface of a dialect: how a family of models writes thoughts and calls."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import CallReader, Part, Tools

Messages = list[dict[str, Any]]


class CallFormat(Protocol):
    """How a family writes calls: one or more between start and end ("": the answer's end)."""

    @property
    def start(self) -> str: ...

    @property
    def end(self) -> str: ...

    def reader(self, tools: Tools, /) -> CallReader:
        """Returns a reader for one answer. tools are the declared tools as OpenAI's JSON."""

    def grammar(self, tools: Tools, lark: Lark, /) -> str | None:
        """Returns a rule's body for the text after the start mark, up to the end mark, or None."""


class AnswerReader(Protocol):
    """Turns the text of one answer into its parts."""

    @property
    def call_length(self) -> int | None:
        """The length of the call that is held until it can be parsed; None outside a call."""

    def feed(self, delta: str) -> Iterator[Part]: ...

    def finish(self, is_whole: bool = True) -> Iterator[Part]:
        """Yields the parts that were held back. is_whole: the answer was not cut off."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model reasons, between two marks. The template's variable `switch` takes one of
    `states` (None: no switch), and `effort` one of the efforts, the lowest first."""

    start: str
    end: str
    switch: str | None = None
    states: tuple[Any, Any] = (False, True)  # the switch's values for off and on
    effort: str | None = None
    efforts: tuple[str, ...] = ()

    def variables(self, effort: str | None, enabled: bool | None = None) -> dict[str, Any]:
        """Returns the template's variables for an effort of OpenAI's API, and for whether reasoning
        is enabled, as far as the template knows them."""
        if enabled is None and effort is not None:
            enabled = effort != "none"
        found: dict[str, Any] = {}
        if self.switch is not None and enabled is not None:
            found[self.switch] = self.states[enabled]
        says_none = effort == "none" and "none" in self.efforts
        if self.effort is not None and effort is not None and (enabled or says_none):
            found[self.effort] = self.nearest(effort)
        return found

    def nearest(self, effort: str) -> str:
        """Returns the model's own name of an effort of OpenAI's API, or the nearest one."""
        if effort in self.efforts or effort not in EFFORTS:
            return effort
        wanted = EFFORTS.index(effort)
        distances = {
            name: abs(EFFORTS.index(name) - wanted) for name in self.efforts if name in EFFORTS
        }
        return min(distances, key=lambda name: distances[name], default=effort)


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The dialect of a family of models. calls or reasoning is None if the family has none.

    end_tokens end an answer, whatever the model's files say. other_marks are texts, besides the
    marks of calls and reasoning, whose special tokens a reader needs. `render` makes prompts in
    place of a chat template, from messages, tools, add_generation_prompt, continue_final_message
    and the template's variables; it gets the arguments of earlier calls as JSON text. `prepare`
    changes messages before a template gets them. Without shows_tools the template does not show
    tools, but `prepare` does. has_messages says that an answer consists of messages with headers
    (harmony), which marks alone cannot tell apart.
    """

    name: str
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    end_tokens: tuple[str, ...] = ()
    other_marks: tuple[str, ...] = ()
    render: Callable[..., str] | None = None
    prepare: Callable[[Messages, Tools], Messages] | None = None
    has_messages: bool = False
    shows_tools: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts whose special tokens must stay in the text that a reader gets."""
        calls = (self.calls.start, self.calls.end) if self.calls else ()
        thoughts = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        return (*calls, *thoughts, *self.other_marks)
