"""Qwen3 writes calls as JSON; Qwen3-Coder and later ones, and Nemotron 3, arguments between
marks."""

from serve.front.text.calls.argument_marks import ArgumentMarks
from serve.front.text.calls.json_calls import JsonCalls
from serve.front.text.dialects.interface import Dialect, ReasoningFormat

REASONING = ReasoningFormat("<think>", "</think>", switch="enable_thinking")

JSON_CALLS = JsonCalls("<tool_call>", "</tool_call>")

CODER_CALLS = ArgumentMarks(
    start="<tool_call>",
    end="</tool_call>",
    function="<function=",
    function_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    named=">",
    lines=True,
)

QWEN = Dialect("qwen", JSON_CALLS, REASONING)
QWEN_CODER = Dialect("qwen_coder", CODER_CALLS, REASONING)
