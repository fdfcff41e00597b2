"""Sends a request to a real HTTP front whose engine plays answers, and keeps what the model got."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from serve.core.types import Sampling
from tests.agents.played import PlayedEngine
from tests.cluster.servers import ROOT

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
OLLAMA_CHAT = "/api/chat"

ANSWER = "Done."
USER: dict[str, Any] = {"role": "user", "content": "hello"}
# The fields that a request of each API needs.
NEEDED: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": [USER], "max_tokens": 1000},
    OLLAMA_CHAT: {"messages": [USER], "stream": False},
}
_PAGES = " ".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A reply, and the prompt and the sampling of its answer."""

    reply: httpx2.Response
    prompt: str
    sampling: Sampling

    @property
    def body(self) -> Any:
        return self.reply.json()


class Server:
    """A server, and its engine, which answers with the first of some texts that a model could have
    written under the request's grammar."""

    def __init__(self, engine: PlayedEngine, client: httpx2.Client) -> None:
        self.engine = engine
        self.client = client
        self._plain: dict[str, Asked] = {}

    def post(self, path: str, fields: Mapping[str, Any]) -> httpx2.Response:
        """Sends the fields as they are."""
        return self.client.post(path, json=dict(fields))

    def will_answer(self, *answers: str) -> None:
        """The next requests are answered with the first of these texts that they allow."""
        self.engine.play = _first_of(answers)

    def ask(self, path: str, fields: Mapping[str, Any], *answers: str) -> Asked:
        """Sends the fields beside those that the API needs. The request has to be answered."""
        self.will_answer(*answers or (ANSWER,))
        reply = self.post(path, {**NEEDED[path], **fields})
        assert reply.status_code == 200, reply.text
        ids = self.engine.prompts[-1]
        prompt = self.engine.tokenizer.decode(ids, skip_special_tokens=False)
        return Asked(reply, prompt, self.engine.samplings[-1])

    def plain(self, path: str, fields: Mapping[str, Any]) -> Asked:
        """As ask, once for all requests that others are compared with."""
        key = path + json.dumps(fields)
        if key not in self._plain:
            self._plain[key] = self.ask(path, fields)
        return self._plain[key]

    def refusal(self, path: str, fields: Mapping[str, Any]) -> tuple[str, str]:
        """The field that is named by the error of a request that has to be refused, and the
        message."""
        reply = self.post(path, {**NEEDED[path], **fields})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["message"]
        return error.get("param") or "", error["message"]


def _first_of(answers: tuple[str, ...]) -> Callable[[str, Callable[[str], bool]], str]:
    def play(prompt: str, is_allowed: Callable[[str], bool]) -> str:
        return next(filter(is_allowed, answers))

    return play


def text_of(path: str, body: Any) -> str:
    """The text of a reply that was not streamed."""
    if path == RESPONSES:
        (item,) = (item for item in body["output"] if item["type"] == "message")
        return str(item["content"][0]["text"])
    if path == MESSAGES:
        return "".join(block["text"] for block in body["content"] if block["type"] == "text")
    if path == COMPLETIONS:
        return str(body["choices"][0]["text"])
    message = body["message"] if path == OLLAMA_CHAT else body["choices"][0]["message"]
    return str(message["content"])


def is_documented(reason: str) -> bool:
    """Whether docs/api has this text. Pipes and backticks do not count."""
    return _plain(reason) in _plain(_PAGES)


def _plain(text: str) -> str:
    return re.sub(r"[`|*]|\s+", " ", text).replace("  ", " ")


def tool(name: str = "f", **schema: Any) -> dict[str, Any]:
    """A function with these properties, in the form of chats."""
    parameters = {"type": "object", "properties": schema, "required": list(schema)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def name_of(value: Any) -> str:
    """The name of a test's parameter, the same in every process."""
    return value.__name__ if callable(value) else str(value)[:60]
