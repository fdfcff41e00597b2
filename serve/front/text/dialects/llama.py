"""Llama 3 and 4: the whole answer is calls, as JSON or in Python's syntax, without marks."""

import ast
import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

from serve.front.text.calls.json_calls import JsonCalls, tool_name
from serve.front.text.calls.json_values import read_json_calls
from serve.front.text.calls.lark import Lark
from serve.front.text.calls.parts import (
    CallEnd,
    CallHeader,
    CallPart,
    CallReader,
    CallText,
    PulledReader,
    TextBuffer,
    Tools,
)
from serve.front.text.dialects.interface import Dialect

_MAX_CALL = 1 << 16  # the most characters of calls in Python's syntax, which are read as a whole
_PYTHON_NAME = re.compile(r"\[?\s*([\w.]+)\(")
_LITERALS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class LlamaCalls:
    """JSON with "parameters". A call that begins with a character in `unmarked` needs no mark."""

    start: str = "<|python_tag|>"
    end: str = ""
    unmarked: str = "{["

    def reader(self, tools: Tools, /) -> CallReader:
        return PulledReader(partial(_read, frozenset(map(tool_name, tools))))

    def grammar(self, tools: Tools, lark: Lark) -> str | None:
        calls = JsonCalls("", "", key="parameters").grammar(tools, lark)
        if lark.is_parallel:
            return f'{calls} ( ";" {calls} )*'
        return str(calls)


def _read(names: frozenset[str], source: TextBuffer) -> Generator[CallPart | None, None, None]:
    if not (yield from source.skip_blanks()):
        raise ValueError("no call")
    if source.text[0] == "{":
        yield from read_json_calls(source, names)
        return
    while not source.is_ended:
        if len(source.text) > _MAX_CALL:
            raise ValueError("a call that is too long")
        yield None
    found = _PYTHON_NAME.match(source.text)
    if found and found[1] in names:
        source.named = CallHeader(found[1])
    yield from _python_calls(source.consume(len(source.text)))


def _python_calls(text: str) -> Iterator[CallPart]:
    """Reads calls such as `[f(a=1), g(b="x")]`. Raises ValueError if the text is something else."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no call") from error
    calls = parsed.elts if isinstance(parsed, ast.List) else [parsed]
    read = [_python_call(call) for call in calls]
    if not read:
        raise ValueError("no call")
    for name, arguments in read:
        yield CallHeader(name)
        yield CallText(arguments)
        yield CallEnd()


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("no call with named arguments")
    for part in ast.walk(node):
        for field in ("value", "elts", "values"):
            _replace_literals(part, field)
    values = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    return ast.unparse(node.func), json.dumps(values, ensure_ascii=False, allow_nan=False)


def _replace_literals(node: ast.AST, field: str) -> None:
    """Replaces JSON's literals: models write `true`, too, because templates show values as JSON."""
    value = getattr(node, field, None)
    if isinstance(value, ast.Name) and value.id in _LITERALS:
        setattr(node, field, ast.Constant(_LITERALS[value.id]))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            if isinstance(each, ast.Name) and each.id in _LITERALS:
                value[index] = ast.Constant(_LITERALS[each.id])


LLAMA = Dialect(
    "llama", LlamaCalls(), end_tokens=("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>")
)
