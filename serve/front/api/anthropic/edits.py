"""Anthropic's context_management: old thoughts and results of tools are left out of the prompt,
while the client keeps them. The request says which ones are old, and the reply lists what was left
out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from serve.front.api.anthropic.blocks import (
    AssistantTurn,
    Block,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserTurn,
)
from serve.front.http.body import Body
from serve.front.http.replies import Json

CLEARED = "[The result of this call was removed, because it is old.]"
_TRIGGER_TOKENS = 100_000
_KEPT_CALLS = 3

Size = Annotated[int, Field(ge=0)]
Names = Annotated[list[str], Field(fail_fast=True)]


class Context:
    """The turns of a conversation. count takes turns and returns how many tokens their prompt has,
    which is slow."""

    def __init__(self, turns: Sequence[Turn], count: Callable[[Sequence[Turn]], int]) -> None:
        self.turns = turns
        self.count = count

    @cached_property
    def num_tokens(self) -> int:
        return self.count(self.turns)

    @property
    def calls(self) -> Iterator[ToolUseBlock]:
        """The calls of tools that the client runs, in their order."""
        for turn in self.turns:
            for block in turn.content:
                if isinstance(block, ToolUseBlock) and block.type == "tool_use":
                    yield block

    def edited(self, edit: Callable[[int, Block], Block | None]) -> "Context":
        """Returns the same turns with other blocks. edit gets the number of a turn and each of its
        blocks; None leaves the block out."""
        turns = []
        for number, turn in enumerate(self.turns):
            blocks = [edit(number, block) for block in turn.content]
            kept = [block for block in blocks if block is not None]
            turns.append(turn.model_copy(update={"content": kept}))
        return Context(turns, self.count)


class InputTokens(Body):
    type: Literal["input_tokens"]
    value: Size


class ToolUses(Body):
    type: Literal["tool_uses"]
    value: Size


class ThinkingTurns(Body):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class AllTurns(Body):
    type: Literal["all"]


class ClearThinking(Body):
    """Leaves out the thoughts of all turns but the last ones. keep counts turns of the assistant
    that have thoughts; results of tools do not end a turn."""

    type: Literal["clear_thinking_20251015"]
    keep: (
        Literal["all"] | Annotated[ThinkingTurns | AllTurns, Field(discriminator="type")] | None
    ) = None

    def apply(self, context: Context) -> tuple[Context, Json | None]:
        """Returns the context after this edit, and what the reply says of it, if it did
        anything."""
        if self.keep == "all" or isinstance(self.keep, AllTurns):
            return context, None
        thinking = list(_thinking_turns(context.turns))
        num_kept = self.keep.value if self.keep else 1
        num_cleared = max(0, len(thinking) - num_kept)
        old: set[int] = set().union(*thinking[:num_cleared])
        if not old:
            return context, None

        def without_old_thoughts(number: int, block: Block) -> Block | None:
            return None if number in old and _is_thought(block) else block

        after = context.edited(without_old_thoughts)
        num_saved = context.num_tokens - after.num_tokens
        return after, {
            "type": self.type,
            "cleared_thinking_turns": num_cleared,
            "cleared_input_tokens": max(0, num_saved),
        }


class ClearToolUses(Body):
    """Replaces the results of all calls but the last ones by a note, once the conversation is long
    enough. Nothing is replaced if that would save no tokens, or fewer than clear_at_least."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] | None = None
    keep: ToolUses | None = None
    clear_at_least: InputTokens | None = None
    exclude_tools: Names | None = None
    clear_tool_inputs: bool | Names | None = None

    def apply(self, context: Context) -> tuple[Context, Json | None]:
        """Returns the context after this edit, and what the reply says of it, if it did
        anything."""
        cleared = self._old_calls(list(context.calls))
        if not cleared or not self._is_triggered(context):
            return context, None
        after = context.edited(lambda _, block: self._without(block, cleared))
        num_saved = context.num_tokens - after.num_tokens
        min_saved = self.clear_at_least.value if self.clear_at_least else 1
        if num_saved < max(1, min_saved):
            return context, None
        return after, {
            "type": self.type,
            "cleared_tool_uses": len(cleared),
            "cleared_input_tokens": num_saved,
        }

    def _old_calls(self, calls: Sequence[ToolUseBlock]) -> set[str]:
        num_kept = self.keep.value if self.keep else _KEPT_CALLS
        num_old = max(0, len(calls) - num_kept)
        excluded = self.exclude_tools or ()
        return {call.id for call in calls[:num_old] if call.name not in excluded}

    def _is_triggered(self, context: Context) -> bool:
        if isinstance(self.trigger, ToolUses):
            return sum(1 for _ in context.calls) > self.trigger.value
        limit = self.trigger.value if self.trigger else _TRIGGER_TOKENS
        return context.num_tokens > limit

    def _without(self, block: Block, cleared: set[str]) -> Block:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in cleared:
            note = TextBlock(type="text", text=CLEARED)
            return block.model_copy(update={"content": [note]})
        if isinstance(block, ToolUseBlock) and block.id in cleared and self._clears_input(block):
            return block.model_copy(update={"input": {}})
        return block

    def _clears_input(self, call: ToolUseBlock) -> bool:
        if isinstance(self.clear_tool_inputs, list):
            return call.name in self.clear_tool_inputs
        return bool(self.clear_tool_inputs)


class Compact(Body):
    """Asks for a summary of the conversation so far. This server makes none: the conversation stays
    as it is, and the reply does not list this edit as applied."""

    type: Literal["compact_20260112"]
    trigger: InputTokens | None = None
    instructions: str | None = None
    pause_after_compaction: bool | None = None

    def apply(self, context: Context) -> tuple[Context, Json | None]:
        """Returns the context as it is."""
        return context, None


Edit = Annotated[ClearThinking | ClearToolUses | Compact, Field(discriminator="type")]


# After each edit, the whole prompt is encoded again to count its tokens.
_MAX_EDITS = 4


class ContextManagement(Body):
    edits: Annotated[list[Edit], Field(max_length=_MAX_EDITS, fail_fast=True)] = []

    def apply(self, context: Context) -> tuple[Context, list[Json]]:
        """Applies the edits in their order. Returns the context after them, and what the reply says
        of each that did anything."""
        applied: list[Json] = []
        for edit in self.edits:
            context, done = edit.apply(context)
            if done is not None:
                applied.append(done)
        return context, applied


def _thinking_turns(turns: Sequence[Turn]) -> Iterable[list[int]]:
    """Yields the numbers of the messages of each turn of the assistant that has thoughts."""
    current: list[int] = []
    for number, turn in enumerate(turns):
        has_thoughts = any(map(_is_thought, turn.content))
        if isinstance(turn, AssistantTurn) and has_thoughts:
            current.append(number)
        if current and isinstance(turn, UserTurn) and not _is_result(turn):
            yield current
            current = []
    if current:
        yield current


def _is_result(turn: UserTurn) -> bool:
    return any(isinstance(block, ToolResultBlock) for block in turn.content)


def _is_thought(block: Any) -> bool:
    return block.type in ("thinking", "redacted_thinking")
