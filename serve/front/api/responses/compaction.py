"""/v1/responses/compact: the model summarizes a conversation, and an item with the summary takes
the conversation's place."""

from typing import Any

from serve.front.api.messages import ChatMessage
from serve.front.api.request import ChatRequest, ToolUse
from serve.front.api.responses.body import Conversation, Strings
from serve.front.api.responses.items import SUMMARY, new_item_id
from serve.front.http.replies import Json
from serve.front.text.tokens import Tokenizer

MAX_KEPT_CHARACTERS = 40_000

_REQUEST = """\
Write a summary of this conversation for whoever continues it without having seen it. Say what the \
user wants, what was done and decided, what was learned that is still needed (names, paths, \
commands, results), and what is left to do. Write the summary and nothing else."""


class CompactBody(Conversation):
    """The body of a compaction. Unknown fields are refused."""

    store: bool | None = None
    stream: bool | None = None
    include: Strings | None = None
    metadata: dict[str, Any] | None = None

    def request(self, messages: list[ChatMessage], tokenizer: Tokenizer) -> ChatRequest:
        """Converts this body to the request for a summary. Tools are shown, because the
        conversation has their calls, and none may be called. A conversation that is too long
        loses its oldest messages."""
        asking: ChatMessage = {"role": "user", "content": _REQUEST}
        shown_tools = ToolUse(self.tool_use.tools, "none")
        return ChatRequest(
            model=self.model,
            prompt=self.prompt([*messages, asking]),
            thinking=self.thinking,
            samplings=self.samplings(tokenizer, logprobs=None),
            end_ids=self.end_ids(tokenizer),
            stop=self.stop_rules(tokenizer),
            tool_use=shown_tools,
            max_tokens=self.max_output_tokens,
            drops_oldest=True,
            shows_thoughts=False,
            cache_salt=self.cache_salt,
        )

    def grammars(self) -> dict[str, str]:
        """A summary is free text, whatever the conversation's answers must be."""
        return {}


def kept_messages(messages: list[ChatMessage]) -> list[Json]:
    """Returns the user's last messages as items: they stay as they were said."""
    kept: list[Json] = []
    num_left = MAX_KEPT_CHARACTERS
    for message in reversed(messages):
        text = message.get("content", "")
        is_summary = text.startswith(SUMMARY)
        if message["role"] != "user" or is_summary:
            continue
        num_left -= len(text)
        if num_left < 0:
            break
        kept.append(_message(text))
    return kept[::-1]


def _message(text: str) -> Json:
    return {
        "type": "message",
        "id": new_item_id("message"),
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": text}],
    }
