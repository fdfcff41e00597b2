"""The typed deltas of an answer while it is generated, independent of any API.

The writer of each API turns deltas into its events. Readers of dialects make some deltas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from serve.core.helper_messages import Violation
from serve.core.types import Score
from serve.front.text.calls.parts import CallEnd, CallText, Text, Thought

__all__ = [
    "AnswerBegin",
    "CallBegin",
    "CallEnd",
    "CallText",
    "Delta",
    "AnswerEnd",
    "PromptProgress",
    "Text",
    "Thought",
    "TokenUsage",
    "Update",
]

# tool_calls: the model ended the answer, after at least one call.
Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The token counts of a request so far. cached_tokens are among its prompts' tokens,
    reasoning_tokens among its answers'. of_parts holds the counts of the scheduler's parts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    of_parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The progress of a request's prompts: of `total` tokens, `done` are computed, and the prefix
    cache gave `cached` of these. seconds is the time since the submission."""

    total: int
    done: int
    cached: int
    seconds: float

    def at_start(self) -> "PromptProgress":
        """Returns the progress before anything was computed."""
        return replace(self, done=self.cached)

    def at_end(self) -> "PromptProgress":
        """Returns the progress with all tokens done."""
        return replace(self, done=self.total)


@dataclass(frozen=True, slots=True)
class AnswerBegin:
    """The first delta of an answer. prompt_scores begin with the second token of the prompt."""

    usage: TokenUsage
    prompt_scores: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. The CallText deltas up to the next CallEnd are its arguments."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last delta of an answer. `stop` is the stop string or token that ended it, if one did.
    usage counts the whole request. violations are the rules of schemas that the answer breaks."""

    reason: Reason
    stop: str | int | None
    usage: TokenUsage
    violations: tuple[Violation, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """The warnings of the reply, one for each violation."""
        return [violation.message for violation in self.violations]


Delta = PromptProgress | AnswerBegin | Text | Thought | CallBegin | CallText | CallEnd | AnswerEnd


@dataclass(frozen=True, slots=True)
class Update:
    """The part that an event of the engine adds to the answer with this number. Text may be held
    back, tokens and scores never. A PromptProgress concerns all answers, and comes alone."""

    number: int
    deltas: tuple[Delta, ...]
    tokens: tuple[int, ...] = ()
    scores: tuple[Score, ...] = ()

    @property
    def begin(self) -> AnswerBegin | None:
        """The delta that begins the answer, if this is its first update."""
        first = self.deltas[0] if self.deltas else None
        return first if isinstance(first, AnswerBegin) else None

    @property
    def end(self) -> AnswerEnd | None:
        """The delta that ends the answer, if this is its last update."""
        last = self.deltas[-1] if self.deltas else None
        return last if isinstance(last, AnswerEnd) else None
