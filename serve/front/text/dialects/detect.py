"""Detects the dialect of a model from its template, its vocabulary and its config."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, meta

from serve.core.errors import UsageError
from serve.core.tool_parsers import call_formats, tool_parsers
from serve.front.text.dialects.deepseek import (
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
)
from serve.front.text.dialects.deepseek_prompts import render_v4, render_v32
from serve.front.text.dialects.gemma import GEMMA4
from serve.front.text.dialects.generic import GENERIC, prepare_if_tools
from serve.front.text.dialects.glm import GLM
from serve.front.text.dialects.harmony import HARMONY
from serve.front.text.dialects.interface import Dialect, ReasoningFormat
from serve.front.text.dialects.kimi import KIMI_K2
from serve.front.text.dialects.llama import LLAMA
from serve.front.text.dialects.minimax import MINIMAX_M2, MINIMAX_M3
from serve.front.text.dialects.mistral import MISTRAL, MISTRAL_LIST
from serve.front.text.dialects.mlx_lm import mlx_lm_dialect
from serve.front.text.dialects.nemotron import NEMOTRON
from serve.front.text.dialects.qwen import QWEN, QWEN_CODER
from serve.front.text.tool_formats import mlx_lm_module

# The dialects by name. Formats that mlx-lm knows too have mlx-lm's names.
NAMED = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "gemma4": GEMMA4,
    "generic": GENERIC,
    "glm47": GLM,
    "harmony": HARMONY,
    "json_tools": QWEN,
    "kimi_k2": KIMI_K2,
    "llama": LLAMA,
    "minimax_m2": MINIMAX_M2,
    "minimax_m3": MINIMAX_M3,
    "mistral": MISTRAL,
    "nemotron": NEMOTRON,
    "qwen3_coder": QWEN_CODER,
}

# Models without a chat template, whose authors publish a program instead.
_PROGRAMS: dict[str, tuple[Dialect, Callable[..., str]]] = {
    "deepseek_v32": (DEEPSEEK_V32, render_v32),
    "deepseek_v4": (DEEPSEEK_V4, render_v4),
    "deepseek_v41": (DEEPSEEK_V4, render_v4),
}
_SWITCHES = ("enable_thinking", "thinking_mode", "thinking")
_EFFORTS = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Traits that decide a dialect. vocabulary maps tokens to ids; template_type is mlx-lm's."""

    template: str
    vocabulary: Mapping[str, int]
    model_type: str = ""
    template_type: str = ""


def _has(*texts: str) -> Callable[[ModelTraits], bool]:
    return lambda model: all(text in model.template for text in texts)


def _is_harmony(model: ModelTraits) -> bool:
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")
    return all(mark in model.vocabulary for mark in marks)


def _is_llama(model: ModelTraits) -> bool:
    ends = ("<|eot_id|>", "<|eot|>")
    is_llama = any(end in model.vocabulary for end in ends)
    return is_llama and '"parameters"' in model.template and "tools" in model.template


def _is_hermes(model: ModelTraits) -> bool:
    has_calls = "<tool_call>" in model.template and "arguments" in model.template
    return has_calls and "<tool_calls>" not in model.template


# The first rule that applies decides. The more specific one among similar rules comes first.
_RULES: tuple[tuple[Callable[[ModelTraits], bool], Dialect], ...] = (
    (_is_harmony, HARMONY),
    (_has("]<]minimax[>["), MINIMAX_M3),
    (_has("<minimax:tool_call>"), MINIMAX_M2),
    (_has("<|tool_call>", "<tool_call|>"), GEMMA4),
    (_has("｜DSML｜", "function_calls"), DEEPSEEK_V32),
    (_has("｜DSML｜"), DEEPSEEK_V4),
    (_has("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (_has("<｜tool▁calls▁begin｜>"), DEEPSEEK_V31),
    (_has("<arg_key>"), GLM),
    (_has("<tool_call>", "<function="), QWEN_CODER),
    (_has("<|tool_calls_section_begin|>"), KIMI_K2),
    (_has("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (_has("[TOOL_CALLS]"), MISTRAL_LIST),
    (_has("<TOOLCALL>"), NEMOTRON),
    (_is_hermes, QWEN),
    (_is_llama, LLAMA),
)


def dialect_of(tokenizer: Any, config: Mapping[str, Any], tool_parser: str | None) -> Dialect:
    """Returns the dialect of a tokenizer of transformers, with the fields of the model's
    config.json. tool_parser names another format of calls. Formats without a file here are detected
    by mlx-lm's own function: it is private, but saves a second list. Raises UsageError."""
    model = _model_of(tokenizer, config)
    found = _by_program(model) or _by_rules(model) or _by_mlx_lm(model, tokenizer)
    if tool_parser is not None:
        named = _dialect_named(tool_parser)
        reasoning = named.reasoning or found.reasoning
        found = replace(named, reasoning=reasoning, render=found.render)
    return replace(found, reasoning=_reasoning(found, model, tokenizer))


def _dialect_named(name: str) -> Dialect:
    if name in NAMED:
        return NAMED[name]
    if name not in tool_parsers():
        known = ", ".join(call_formats())
        raise UsageError(
            f"--tool-call-parser {name} is not known: give one of {known}.", code="unknown_name"
        )
    return mlx_lm_dialect(name, None)


def _model_of(tokenizer: Any, config: Mapping[str, Any]) -> ModelTraits:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # Several templates by name.
        template = "\n".join(str(each) for each in template.values())
    template_type = tokenizer.init_kwargs.get("chat_template_type")
    return ModelTraits(
        str(template or ""),
        tokenizer.get_vocab(),
        str(config.get("model_type") or ""),
        str(template_type or ""),
    )


def _by_program(model: ModelTraits) -> Dialect | None:
    """Returns the dialect of a model whose prompts are rendered by a program, or None."""
    if model.template_type == "deepseek_v32":
        return replace(DEEPSEEK_V32, render=render_v32)
    if model.template or model.model_type not in _PROGRAMS:
        return None
    dialect, render = _PROGRAMS[model.model_type]
    return replace(dialect, render=render)


def _by_rules(model: ModelTraits) -> Dialect | None:
    """Returns the dialect of the first rule that applies, or None."""
    dialect = next((dialect for applies, dialect in _RULES if applies(model)), None)
    if dialect is None:
        return None
    # Conversions of some models bring a template that shows tools itself.
    if not dialect.shows_tools and _reads(model, "tools"):
        return replace(dialect, shows_tools=True, prepare=None)
    return dialect


def _by_mlx_lm(model: ModelTraits, tokenizer: Any) -> Dialect:
    """Returns mlx-lm's dialect, or the generic one. Our rules come first: they are stricter."""
    name = mlx_lm_module("tokenizer_utils")._infer_tool_parser(tokenizer)
    if name in NAMED:
        return NAMED[name]
    if name is not None:
        return mlx_lm_dialect(name, None)
    if "tool_calls" in model.template:
        return replace(GENERIC, prepare=prepare_if_tools)
    return GENERIC


def _reasoning(dialect: Dialect, model: ModelTraits, tokenizer: Any) -> ReasoningFormat | None:
    """Returns the dialect's reasoning if the model knows its marks, and otherwise the reasoning
    that mlx-lm detects, each with the variables that the template reads."""
    own = dialect.reasoning
    if own is None or not _knows(model, own):
        start, end, *_ = mlx_lm_module("tokenizer_utils")._infer_thinking(tokenizer)
        own = ReasoningFormat(start, end) if start else None
    if own is None or dialect.render:
        return own
    switch = next((name for name in _SWITCHES if _reads(model, name)), None)
    if switch != own.switch:
        own = replace(own, switch=switch, states=(False, True))
    if _reads(model, "reasoning_effort"):
        return replace(own, effort="reasoning_effort", efforts=own.efforts or _EFFORTS)
    return replace(own, effort=None, efforts=())


def _reads(model: ModelTraits, variable: str) -> bool:
    """Whether the template reads this variable, and not only a field or a text of the same name."""
    is_tested = re.search(rf"\b{variable} is (not )?defined", model.template) is not None
    return is_tested or variable in _variables(model.template)


@lru_cache(8)
def _variables(template: str) -> frozenset[str]:
    """Returns the variables that a template expects from outside."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # transformers' own tag
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(plain)))
    except TemplateError:
        return frozenset()


def _knows(model: ModelTraits, reasoning: ReasoningFormat) -> bool:
    marks = (reasoning.start, reasoning.end)
    in_template = all(mark in model.template for mark in marks)
    is_harmony = any(token in model.vocabulary for token in ("<|channel|>", "<|channel>"))
    return in_template or is_harmony or all(mark in model.vocabulary for mark in marks)
