"""The shapes of the requests that agents send: field names, types and the words that APIs define.

What the agents' makers wrote (prompts, descriptions) is left out. A shape is itself a request that
is valid for whoever accepts the recorded one.
"""

import json
import re
from pathlib import Path
from typing import Any

from tests.agents.recorder import Request

FOLDER = Path(__file__).parent / "shapes"
KEPT_HEADERS = "anthropic-beta", "anthropic-version"

# Fields whose strings belong to an API or a schema, or change what a request means.
_KEPT = {
    *("type", "role", "name", "model", "status", "phase", "object", "required", "enum", "const"),
    *("effort", "reasoning_effort", "summary", "verbosity", "display", "include", "tool_choice"),
    *("service_tier", "truncation", "format", "syntax", "$schema", "$ref", "ttl", "detail"),
    *(
        "context",
        "search_content_types",
        "execution",
        "keep",
        "edits",
        "scope",
        "pattern",
        "namespace",
        "finish_reason",
    ),
}
_WORD = re.compile(r"[\w./:@#$-]{1,100}", re.ASCII)
_TEXT = "text"
_GRAMMAR = "start: /[a-z]+/"


def shapes_of(requests: list[Request], model: str) -> list[dict[str, Any]]:
    """The shapes of the requests with a body, each once. The served name becomes MODEL. A tool that
    an earlier shape has too is left out."""
    found: dict[str, dict[str, Any]] = {}
    known_tools: list[Any] = []
    for request in requests:
        if request.body is None:
            continue
        headers = {name: request.headers[name] for name in KEPT_HEADERS if name in request.headers}
        body = _Reader(model).shape(request.body)
        if body.get("tools"):
            first, *others = body["tools"]
            new = [tool for tool in others if tool not in known_tools]
            known_tools += [first, *new]
            body["tools"] = [first, *new]
        shape = {"path": request.path, "headers": headers, "body": body}
        found.setdefault(json.dumps(shape, sort_keys=True), shape)
    return list(found.values())


def read(agent: str) -> list[dict[str, Any]]:
    return list(json.loads((FOLDER / f"{agent}.json").read_text()))


def write(agent: str, shapes: list[dict[str, Any]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{agent}.json").write_text(json.dumps(shapes, indent=1, ensure_ascii=False) + "\n")


class _Reader:
    """Reads one request. Ids are numbered, so that those that were equal stay so."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._ids: dict[str, str] = {}

    def shape(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self.shape(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return _once([self.shape(inner, key) for inner in value])
        if isinstance(value, str):
            return self._text(value, key)
        return value

    def _text(self, text: str, key: str) -> str:
        if not text:
            return text
        if key == "model" and text == self._model:
            return "MODEL"
        if key in ("id", "call_id", "tool_use_id", "tool_call_id"):
            return self._ids.setdefault(text, f"id-{len(self._ids) + 1}")
        if key == "arguments":
            return json.dumps(self.shape(json.loads(text)))
        if key == "definition":
            return _GRAMMAR
        return text if key == "pattern" or (key in _KEPT and _WORD.fullmatch(text)) else _TEXT


def _once(shapes: list[Any]) -> list[Any]:
    """Merges equal neighbours."""
    kept = shapes[:1]
    kept += [shape for before, shape in zip(shapes, shapes[1:], strict=False) if shape != before]
    return kept
