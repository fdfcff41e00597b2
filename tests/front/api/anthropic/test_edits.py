"""What context_management leaves out of a prompt, and what it says of it."""

from typing import Any

import pytest
from anthropic.types.beta import BetaContextManagementResponse

from serve.core.errors import RequestError
from serve.front.api.anthropic.body import EditedPrompt, MessagesBody
from serve.front.api.anthropic.edits import CLEARED
from serve.front.api.openai import parse
from serve.front.api.request import ChatPrompt

THINKING = "clear_thinking_20251015"
TOOLS = "clear_tool_uses_20250919"


def turns(num_calls: int, result: str = "x" * 100) -> list[Any]:
    """A question for each call, which has a thought before it and another one after its result."""
    found: list[Any] = []
    for number in range(num_calls):
        thought = {"type": "thinking", "thinking": f"before {number}"}
        call = {
            "type": "tool_use",
            "id": f"id{number}",
            "name": ("read", "list")[number % 2],
            "input": {"path": f"p{number}"},
        }
        answer = {"type": "tool_result", "tool_use_id": f"id{number}", "content": result}
        after = {"type": "thinking", "thinking": f"after {number}"}
        found += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [answer]},
            {"role": "assistant", "content": [after, {"type": "text", "text": f"done {number}"}]},
        ]
    return [*found, {"role": "user", "content": "And now?"}]


def count(prompt: ChatPrompt) -> int:
    """A token is a character of text, of a thought or of arguments."""
    total = 0
    for message in prompt.messages:
        total += len(message.get("content") or "") + len(message.get("reasoning_content") or "")
        calls = message.get("tool_calls") or []
        total += sum(len(call["function"]["arguments"]) for call in calls)
    return total


def edited(messages: list[Any], *edits: Any) -> EditedPrompt:
    fields = {"model": "m", "max_tokens": 5, "messages": messages}
    body = parse(MessagesBody, {**fields, "context_management": {"edits": list(edits)}})
    found = body.edited(count)
    plain = parse(MessagesBody, fields).edited(count).prompt
    BetaContextManagementResponse.model_validate(
        {"applied_edits": found.applied_edits}, strict=True
    )
    if found.applied_edits:
        cleared = sum(edit["cleared_input_tokens"] for edit in found.applied_edits)
        assert found.num_tokens_before == count(plain) == count(found.prompt) + cleared
    else:
        assert (found.prompt, found.num_tokens_before) == (plain, None)
    return found


def thoughts(found: EditedPrompt) -> list[str]:
    return [m["reasoning_content"] for m in found.prompt.messages if "reasoning_content" in m]


def results(found: EditedPrompt) -> list[str]:
    return [str(m["content"]) for m in found.prompt.messages if m["role"] == "tool"]


def arguments(found: EditedPrompt) -> list[str]:
    calls = [call for m in found.prompt.messages for call in m.get("tool_calls", [])]
    return [call["function"]["arguments"] for call in calls]


@pytest.mark.parametrize(
    ("keep", "num_kept"),
    [
        (None, 1),
        ({"type": "thinking_turns", "value": 2}, 2),
        ({"type": "thinking_turns", "value": 9}, 3),
        ("all", 3),
        ({"type": "all"}, 3),
    ],
)
def test_clear_thinking_keeps_the_last_turns(keep: Any, num_kept: int) -> None:
    """A turn is all that comes between two questions, results of tools included."""
    found = edited(turns(3), {"type": THINKING, "keep": keep})
    kept = range(3 - num_kept, 3)
    assert thoughts(found) == [f"{when} {n}" for n in kept for when in ("before", "after")]
    num_cleared = [edit["cleared_thinking_turns"] for edit in found.applied_edits or []]
    assert num_cleared == ([3 - num_kept] if num_kept < 3 else [])


def test_clear_thinking_leaves_the_turn_that_goes_on() -> None:
    going_on = turns(2)[:-2]  # It ends with the result of a tool.
    assert thoughts(edited(going_on, {"type": THINKING})) == ["before 1"]


def test_clear_tool_uses_waits_for_its_trigger() -> None:
    """100,000 tokens unless the request says otherwise."""
    short, long = turns(5), turns(5, "x" * 30_000)
    assert not edited(short, {"type": TOOLS}).applied_edits
    found = edited(long, {"type": TOOLS})
    assert results(found) == [CLEARED] * 2 + ["x" * 30_000] * 3
    assert found.applied_edits
    assert found.applied_edits[0]["cleared_tool_uses"] == 2
    for trigger, num_applied in (
        ({"type": "tool_uses", "value": 4}, 1),
        ({"type": "tool_uses", "value": 5}, 0),
        ({"type": "input_tokens", "value": 100}, 1),
    ):
        assert len(edited(short, {"type": TOOLS, "trigger": trigger}).applied_edits or []) == (
            num_applied
        )


NOW: dict[str, Any] = {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 0}}


@pytest.mark.parametrize(
    ("fields", "cleared"),
    [
        ({}, {0}),
        ({"keep": {"type": "tool_uses", "value": 0}}, {0, 1, 2, 3}),
        ({"keep": {"type": "tool_uses", "value": 9}}, set()),
        ({"keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["read"]}, {1}),
        ({"clear_at_least": {"type": "input_tokens", "value": 10}}, {0}),
        ({"clear_at_least": {"type": "input_tokens", "value": 1000}}, set()),
    ],
)
def test_clear_tool_uses_keeps_what_it_is_told(fields: Any, cleared: set[int]) -> None:
    found = edited(turns(4), {**NOW, **fields})
    assert results(found) == [CLEARED if n in cleared else "x" * 100 for n in range(4)]
    assert arguments(found) == [f'{{"path": "p{n}"}}' for n in range(4)]


@pytest.mark.parametrize(
    ("inputs", "cleared"), [(True, {0, 1}), (["list"], {1}), (False, set()), ([], set())]
)
def test_clear_tool_uses_may_clear_inputs(inputs: Any, cleared: set[int]) -> None:
    keep = {"type": "tool_uses", "value": 1}
    found = edited(turns(3), {**NOW, "keep": keep, "clear_tool_inputs": inputs})
    wanted = ["{}" if n in cleared else f'{{"path": "p{n}"}}' for n in range(3)]
    assert arguments(found) == wanted


def test_edits_are_applied_one_after_the_other() -> None:
    found = edited(turns(4), {"type": THINKING}, NOW)
    assert [edit["type"] for edit in found.applied_edits or []] == [THINKING, TOOLS]
    assert thoughts(found) == ["before 3", "after 3"]
    assert results(found)[0] == CLEARED


def test_compaction_changes_nothing_and_is_not_called_applied() -> None:
    found = edited(turns(2), {"type": "compact_20260112", "pause_after_compaction": True})
    assert found.applied_edits == []


def test_edits_that_nobody_asked_for_are_not_spoken_of() -> None:
    body = parse(MessagesBody, {"model": "m", "max_tokens": 5, "messages": turns(1)})
    assert body.edited(count).applied_edits is None


def test_edits_are_few_because_each_counts_the_prompt() -> None:
    clear = {"type": TOOLS, "trigger": {"type": "tool_uses", "value": 1}}
    edited(turns(2), *[clear] * 4)
    with pytest.raises(RequestError) as caught:
        edited(turns(2), *[clear] * 5)
    assert caught.value.param == "context_management.edits"
