"""Writes llguidance's variant of Lark: free text, and after each mark text that follows a rule."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from serve.front.text.schemas import GUIDANCE, WHITE_SPACE, closed, without_inexpressible_patterns

_TEXT = "TEXT: /(.|\\n)*/"
_MAX_BRANCHES = 1024
# Some models write an empty line between marks, which many vocabularies have as one token.
_BLANK = f"BLANK: /({WHITE_SPACE}|\\n\\n)?/"

TokenId = Callable[[str], int | None]


class Lark:
    """Collects the rules of a grammar. token_id returns the id of a text that is a single added
    token, or None. A model writes a mark as this token, or spells the mark in ordinary tokens.
    left_out are the keywords of schemas that the rules do not enforce. Unless is_parallel, an
    answer contains one call. inputs are grammars, by name, for tools that take a single text."""

    def __init__(
        self,
        token_id: TokenId,
        added_tokens: Iterable[str] = (),
        *,
        is_parallel: bool = True,
        inputs: Mapping[str, str] = {},
    ) -> None:
        self.token_id = token_id
        self.is_parallel = is_parallel
        self.left_out: set[str] = set()
        self.enforced_inputs: dict[str, str] = {}  # names of grammars, by tool
        self._num_branches = 0
        self._inputs = inputs
        self._added = sorted((each for each in added_tokens if each), key=len, reverse=True)
        self._names: dict[str, str] = {}
        self._rules: dict[str, str] = {}

    def allows_branches(self, number: int) -> bool:
        """Counts nested branches, which references multiply. Returns whether they may get rules."""
        self._num_branches += number
        return self._num_branches <= _MAX_BRANCHES

    def text(self) -> str:
        return "\n".join(["%llguidance {}", *self._rules.values(), _TEXT, _BLANK])

    def rule(self, body: str, options: str = "") -> str:
        """Returns the name of a rule with this body."""
        return self._definition("r", body, options)

    def _definition(self, kind: str, body: str, options: str) -> str:
        """Returns the name of a rule or a terminal. Equal definitions share a name."""
        key = f"{kind}{options} {body}"
        next_name = f"{kind}{len(self._names)}"
        name = self._names.setdefault(key, next_name)
        self._rules[name] = f"{name}{options}: {body}"
        return name

    def terminal(self, body: str) -> str:
        """Returns the name of a terminal with this body."""
        return self._definition("T", body, "")

    def start(self, body: str) -> None:
        self._rules["start"] = f"start: {body}"

    def mark(self, text: str) -> str:
        """Returns the body of a rule for exactly this text, as added tokens or spelled out."""
        if not text:
            return ""
        return " ".join(self._one(piece) for piece in self._pieces(text))

    def token_ids_in(self, text: str) -> list[int]:
        """Returns the ids of the added tokens in a text."""
        ids = map(self.token_id, self._pieces(text))
        return [id for id in ids if id is not None]

    def text_without(self, mark: str, body: str) -> str:
        """Returns the name of a terminal with this body for texts that do not contain the mark."""
        return self.terminal(f"{body} & ~/(.|\\n)*{_escaped(mark)}(.|\\n)*/")

    def until(self, mark: str, text: str = "TEXT") -> str:
        """Returns a rule's body for text and the mark after it. text names the text's terminal."""
        first, *rest = self._pieces(mark)
        id = self.token_id(first)
        spelled = self.rule(f"{text} {_quoted(mark)}", "[lazy]")
        tail = " ".join(self._one(piece) for piece in rest)
        if id is not None:
            return f"( {text} <[{id}]> {tail} | {spelled} )"
        if not rest:
            return spelled
        # The mark begins with ordinary text, and an added token follows. Where that token comes,
        # the text before it ends with the ordinary part.
        ending = self.terminal(f"{text} {_quoted(first)}")
        return f"( {ending} {tail} | {spelled} )"

    def json(self, schema: dict[str, Any] | bool) -> str:
        """Returns the name of a rule for JSON by a tool's schema, with closed objects. A schema
        that no grammar can express is left out, so that other tools keep theirs."""
        if not isinstance(schema, dict):
            schema = {}
        whole = closed(schema)
        expressible = without_inexpressible_patterns(whole)
        if expressible != whole:
            self.left_out.add("pattern")
        body = json.dumps({**expressible, "x-guidance": GUIDANCE})
        return self.rule(f"%json {body}")

    def calls(self, call: str) -> str:
        """Returns a rule's body for a section's calls: each has the body `call`, after blanks."""
        return f"( BLANK {call} )+" if self.is_parallel else f"BLANK {call}"

    def input_before(self, tool: str, mark: str) -> str:
        """Returns the body of a rule for a tool's input and the mark after it. Returns "" if any
        text is allowed, or if the mark begins with ordinary text, which would be recognised too
        late."""
        first = self._pieces(mark)[0]
        is_text = first[0] != "\n" and self.token_id(first) is None
        if tool not in self._inputs or is_text:
            return ""
        name = self.enforced_inputs.setdefault(tool, f"input{len(self.enforced_inputs)}")
        return f"@{name} {self.mark(mark)}"

    def choice(self, bodies: Iterable[str]) -> str:
        return "( " + " | ".join(bodies) + " )"

    def _pieces(self, text: str) -> list[str]:
        """Returns the text cut at added tokens."""
        for token in self._added:
            if token in text and self.token_id(token) is not None:
                before, _, after = text.partition(token)
                cut = [self._pieces(part) if part else [] for part in (before, after)]
                return [*cut[0], token, *cut[1]]
        return [text]

    def _one(self, piece: str) -> str:
        id = self.token_id(piece)
        spelled = _quoted(piece)
        return spelled if id is None else f"( <[{id}]> | {spelled} )"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(each):x}}}" for each in text)
