"""Nemotron Nano 2 and Super 1.5: a JSON list of calls between marks. Nemotron 3 writes Qwen's."""

from serve.front.text.calls.json_calls import JsonCalls
from serve.front.text.dialects.interface import Dialect, ReasoningFormat

NEMOTRON = Dialect(
    "nemotron",
    JsonCalls("<TOOLCALL>", "</TOOLCALL>", is_list=True),
    ReasoningFormat("<think>", "</think>", switch="enable_thinking"),
)
