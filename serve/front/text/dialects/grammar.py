"""The grammar of an answer that may or must call tools: free text (unless it must) up to the mark
that begins a call, then text that the tool's schema allows."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serve.front.text.calls.lark import Lark, TokenId
from serve.front.text.calls.parts import Tools
from serve.front.text.dialects.harmony import harmony_grammar
from serve.front.text.dialects.interface import CallFormat, Dialect, ReasoningFormat
from serve.front.text.schemas import TOOLS
from serve.front.text.sound_schemas import sound_tools

_CONTENT = "@content"  # how rules refer to the grammar of the content
# The beginning of calls without a mark: other JSON is an ordinary answer.
_UNMARKED = r"/[ \n\t]*\{[ \n\t]*\"name\"[ \n\t]*:(.|\n)*/"


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar in llguidance's Lark, the keywords that it does not enforce (`tools`: no schema at
    all), and the tools whose input has a grammar of its own."""

    text: str
    left_out: tuple[str, ...] = ()
    enforced_inputs: tuple[str, ...] = ()


def tool_grammar(
    dialect: Dialect,
    tools: Tools,
    token_id: TokenId,
    added_tokens: Iterable[str] = (),
    *,
    content: str | None = None,
    is_parallel: bool = True,
    is_forced: bool = False,
    inputs: Mapping[str, str] = {},
) -> AnswerGrammar | None:
    """Returns the grammar of an answer that may call tools, or must if is_forced; None if there is
    none. token_id returns the id of one of added_tokens. content is a grammar for answers without a
    call. Unless is_parallel, there is one call. inputs are grammars of tools that take a text."""
    lark = Lark(token_id, added_tokens, is_parallel=is_parallel, inputs=inputs)
    tools, changed = sound_tools(tools)
    lark.left_out |= changed
    if dialect.has_messages:
        final = "TEXT" if content is None else _CONTENT
        lark.start(harmony_grammar(tools, lark, None if is_forced else final))
        return _whole(lark, content, inputs)
    calls = dialect.calls
    if calls is None:
        return None
    body = calls.grammar(tools, lark)
    if body is None:
        if content is None or is_forced:
            return None
        body = lark.until(calls.end) if calls.end else "TEXT"
        lark.left_out.add(TOOLS)
    if content is None and not is_forced:
        lark.start(_free(dialect, calls, body, lark))
    else:
        called = _called(calls, body, lark)
        answer = called if is_forced else f"( {called} | {_CONTENT} )"
        lark.start(f"{_thought(dialect, lark)}{answer}")
    return _whole(lark, content, inputs)


def _free(dialect: Dialect, calls: CallFormat, body: str, lark: Lark) -> str:
    """Returns a rule's body for free text in which marks begin calls, with marks of reasoning."""
    ids: list[int] = []
    if dialect.reasoning:
        for of_mark in _token_ids(dialect.reasoning, lark):
            ids += of_mark
    segments = [lark.rule(f"TEXT <[{id}]>") for id in dict.fromkeys(ids)]
    others = f"{lark.choice(segments)}* " if segments else ""
    before_call = lark.until(calls.start)
    call = lark.rule(f"{before_call} {body}")
    if calls.end and lark.is_parallel:
        return f"{lark.choice([*segments, call])}* TEXT"
    if calls.end:
        return f"{others}( {call} BLANK | TEXT )"
    if not getattr(calls, "unmarked", ""):
        return f"{others}( {call} | TEXT )"
    text = lark.terminal(f"/(.|\\n)*/ & ~{_UNMARKED}")
    return f"{others}( {call} | {body} | {text} )"


def _thought(dialect: Dialect, lark: Lark) -> str:
    """Returns the body of a rule for an optional thought before the text that must follow."""
    reasoning = dialect.reasoning
    if not reasoning or not all(_token_ids(reasoning, lark)):
        return ""
    start = lark.mark(reasoning.start)
    thought = lark.until(reasoning.end)
    return f"( {start} {thought} )? "


def _called(calls: CallFormat, body: str, lark: Lark) -> str:
    """Returns the body of a rule for calls with nothing around them."""
    start = lark.mark(calls.start)
    call = lark.rule(f"BLANK {start} {body}")
    if not calls.end:
        if getattr(calls, "unmarked", ""):
            return f"( {call} | {body} )"
        return call
    if lark.is_parallel:
        return f"{call}+ BLANK"
    return f"{call} BLANK"


def content_grammar(grammar: str, token_id: TokenId, added_tokens: Iterable[str] = ()) -> str:
    """Returns the grammar of a harmony answer whose final message follows the given grammar."""
    lark = Lark(token_id, added_tokens)
    lark.start(harmony_grammar([], lark, _CONTENT))
    return _with_parts(lark, {_CONTENT: grammar})


def _whole(lark: Lark, content: str | None, inputs: Mapping[str, str]) -> AnswerGrammar:
    parts = {f"@{name}": inputs[tool] for tool, name in lark.enforced_inputs.items()}
    if content is not None:
        parts[_CONTENT] = content
    text = _with_parts(lark, parts)
    left_out = sorted(lark.left_out)
    return AnswerGrammar(text, tuple(left_out), tuple(lark.enforced_inputs))


def _with_parts(lark: Lark, parts: Mapping[str, str]) -> str:
    """Returns the grammar's text, with the grammars that its rules refer to as `@name`."""
    if not parts:
        return lark.text()
    grammars = [{"name": "answer", "lark_grammar": lark.text()}]
    for name, grammar in parts.items():
        part = {"lark_grammar": grammar}
        if grammar.lstrip().startswith("{"):
            part = json.loads(grammar)["grammars"][0]
        grammars.append({**part, "name": name.removeprefix("@")})
    return json.dumps({"grammars": grammars})


def _token_ids(reasoning: ReasoningFormat, lark: Lark) -> list[list[int]]:
    """Returns the added tokens in each of the marks around reasoning."""
    return [lark.token_ids_in(mark) for mark in (reasoning.start, reasoning.end)]
