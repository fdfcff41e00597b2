"""Checks whole answers against schemas that their grammar enforces only in part: calls against
their tool's schema, and text against a format's schema."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO

from serve.core.errors import OverloadedError
from serve.core.helper_messages import Claim, Violation
from serve.front.output.deltas import (
    AnswerBegin,
    AnswerEnd,
    CallBegin,
    CallEnd,
    CallText,
    Delta,
    PromptProgress,
    Text,
    Thought,
    Update,
)
from serve.front.text.schema_check import SchemaChecker, unchecked

MAX_WAIT_SECONDS = 5.0

# Runs a check of this size in a thread, when it is the client's turn.
InTurn = Callable[[int, Callable[[], list[Violation]]], Awaitable[list[Violation]]]


@dataclass(slots=True)
class _Call:
    name: str
    arguments: StringIO = field(default_factory=StringIO)
    is_whole: bool = False


@dataclass(slots=True)
class _Collected:
    """The text and the calls of one answer so far."""

    text: StringIO = field(default_factory=StringIO)
    calls: list[_Call] = field(default_factory=list)


class Conformance:
    """The check of one request's answers. parameters are the schemas of the tools' arguments, by
    tool name; format_schema is the schema of the text, if there is one. Schemas are JSON text."""

    def __init__(
        self,
        parameters: Mapping[str, str],
        format_schema: str | None,
        checker: SchemaChecker,
        in_turn: InTurn,
    ) -> None:
        self._parameters = parameters
        self._format_schema = format_schema
        self._checker = checker
        self._in_turn = in_turn
        self._collected: dict[int, _Collected] = {}

    async def checked(self, update: Update) -> Update:
        """Returns the update. An answer's last update gets all violations of the answer."""
        collected = self._collected.setdefault(update.number, _Collected())
        for delta in update.deltas:
            _collect(collected, delta)
        end = update.end
        if end is None:
            return update
        del self._collected[update.number]
        violations = await self._violations(collected, end)
        end = replace(end, violations=violations)
        return replace(update, deltas=(*update.deltas[:-1], end))

    async def _violations(self, collected: _Collected, end: AnswerEnd) -> tuple[Violation, ...]:
        unknown = [call.name for call in collected.calls if call.name not in self._parameters]
        found = [Violation("name", f"There is no tool {name[:80]!r}.") for name in unknown]
        if claims := self._claims(collected, end):
            found += await self._checked_claims(claims)
        return tuple(found)

    def _claims(self, collected: _Collected, end: AnswerEnd) -> list[Claim]:
        """Returns the texts to check. A text that was cut off cannot follow a schema."""
        claims: list[Claim] = []
        for number, call in enumerate(collected.calls):
            schema = self._parameters.get(call.name)
            if call.is_whole and schema is not None:
                place = f"tool_calls[{number}] ({call.name})"
                claims.append(Claim(place, schema, call.arguments.getvalue()))
        is_content = not collected.calls and end.reason == "stop"
        if self._format_schema is not None and is_content:
            claims.append(Claim("content", self._format_schema, collected.text.getvalue()))
        return claims

    async def _checked_claims(self, claims: Sequence[Claim]) -> list[Violation]:
        check = partial(self._checker.violations, claims)
        size = sum(len(claim.text) for claim in claims)
        try:
            return await asyncio.wait_for(self._in_turn(size, check), MAX_WAIT_SECONDS)
        except (TimeoutError, OverloadedError):
            return [unchecked("too many answers wait for this")]


def _collect(collected: _Collected, delta: Delta) -> None:
    match delta:
        case Text(text):
            collected.text.write(text)
        case CallBegin(_, name):
            collected.calls.append(_Call(name))
        case CallText(text):
            collected.calls[-1].arguments.write(text)
        case CallEnd():
            collected.calls[-1].is_whole = True
        case PromptProgress() | AnswerBegin() | Thought() | AnswerEnd():
            pass  # No schema applies to such deltas.
