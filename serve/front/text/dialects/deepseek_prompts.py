"""Prompts of DeepSeek V3.2 and V4, which have programs instead of chat templates.

V3.2 uses mlx-lm's program. V4 joins results of tools with the user's messages.
"""

import json
from collections.abc import Sequence
from typing import Any

from serve.front.text.calls.parts import Tools
from serve.front.text.dialects.generic import with_system
from serve.front.text.dialects.interface import Messages
from serve.front.text.tool_formats import mlx_lm_module

_BOS = "<｜begin▁of▁sentence｜>"
_EOS = "<｜end▁of▁sentence｜>"
_USER = "<｜User｜>"
_ASSISTANT = "<｜Assistant｜>"
_THINK = "<think>"
_THINK_END = "</think>"

# V4 was trained with this text (encoding/encoding_dsv4.py of its repository, MIT).
_MAX_EFFORT = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

"""
_TOOLS = """\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def render_v32(
    messages: Messages,
    tools: Tools = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """Renders with mlx-lm's program, which shows tools in the system's message only."""
    program = mlx_lm_module("chat_templates.deepseek_v32")
    if tools and not any(each["role"] == "system" for each in messages):
        messages = [{"role": "system", "content": ""}, *messages]
    text: str = program.apply_chat_template(
        messages,
        tools=list(tools) or None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **variables,
    )
    return text


def render_v4(
    messages: Messages,
    tools: Tools = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    enable_thinking: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """Renders the prompt. Without tools, reasoning before the last question is dropped."""
    if tools:
        schemas = "\n".join(_json(each.get("function") or each) for each in tools)
        messages = with_system(messages, _TOOLS.format(schemas=schemas), keeps_empty=True)
    turns = _turns(messages)
    users = [number for number, turn in enumerate(turns) if turn["role"] == "user"]
    last_user = users[-1] if users else -1
    last = len(turns) - 1
    text = _BOS
    if enable_thinking and reasoning_effort == "max":
        text += _MAX_EFFORT
    for number, turn in enumerate(turns):
        has_thought = enable_thinking and (bool(tools) or number >= last_user)
        if turn["role"] == "system":
            text += turn["content"]
        elif turn["role"] == "user":
            text += _USER + turn["content"]
            if number < last or add_generation_prompt:
                text += _ASSISTANT
                text += _THINK if has_thought else _THINK_END
        else:
            text += _answer(turn, has_thought)
            if number < last or not continue_final_message:
                text += _EOS
    return text


def _turns(messages: Messages) -> list[dict[str, Any]]:
    """Returns the messages, with results of tools as parts of the user's."""
    turns: list[dict[str, Any]] = []
    for message in _ordered(messages):
        content = str(message.get("content") or "")
        is_result = message["role"] == "tool"
        if is_result:
            content = f"<tool_result>{content}</tool_result>"
        role = "user" if is_result else message["role"]
        if role == "user" and turns and turns[-1]["role"] == "user":
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n\n{content}"}
        else:
            turns.append({**message, "role": role, "content": content})
    return turns


def _ordered(messages: Messages) -> Messages:
    """Sorts results in the order of their calls, as far as their ids allow it."""
    order: dict[str, int] = {}
    ordered: Messages = []
    results: Messages = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            results.append(message)
            continue
        ordered += sorted(results, key=lambda each: order.get(each.get("tool_call_id", ""), 0))
        results = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            order[call.get("id", "")] = number
        ordered.append(message)
    return ordered[:-1]


def _answer(turn: dict[str, Any], has_thought: bool) -> str:
    text = str(turn["content"])
    if has_thought:
        thought = turn.get("reasoning_content") or ""
        text = f"{thought}{_THINK_END}{text}"
    if calls := turn.get("tool_calls"):
        text += _calls(calls)
    return text


def _calls(calls: Sequence[dict[str, Any]]) -> str:
    lines = ["\n\n<｜DSML｜tool_calls>"]
    for call in calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        parameters = [_parameter(name, value) for name, value in arguments.items()]
        lines.append(f'<｜DSML｜invoke name="{function["name"]}">')
        lines.append("\n".join(parameters))  # without parameters, an empty line
        lines.append("</｜DSML｜invoke>")
    lines.append("</｜DSML｜tool_calls>")
    return "\n".join(lines)


def _parameter(name: str, value: Any) -> str:
    if isinstance(value, str):
        is_string, text = "true", value
    else:
        is_string, text = "false", _json(value)
    return f'<｜DSML｜parameter name="{name}" string="{is_string}">{text}</｜DSML｜parameter>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
