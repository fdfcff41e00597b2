"""Writes an answer as Anthropic's message: its blocks, and the events of a stream. Pure."""

import secrets
from collections.abc import Iterator

from serve.core.errors import BrigadeError
from serve.front.api.messages import arguments_object, invalid_arguments
from serve.front.api.opaque import opaque
from serve.front.api.writers.writer import Writer
from serve.front.http.replies import Json, anthropic_error
from serve.front.output.deltas import (
    AnswerBegin,
    AnswerEnd,
    CallBegin,
    CallEnd,
    CallText,
    Delta,
    PromptProgress,
    Text,
    Thought,
    TokenUsage,
    Update,
)

_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}


class MessagesWriter(Writer):
    """Writes the events of a stream. message is the part sent so far. omits_thoughts leaves
    thinking blocks empty, except for their signature."""

    def __init__(self, model: str, request_id: str, omits_thoughts: bool = False) -> None:
        self.message: Json = {
            "id": f"msg_{secrets.token_hex(16)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._request_id = request_id
        self._omits_thoughts = omits_thoughts
        self._thought = ""
        self._arguments = ""
        self._is_open = False

    def feed(self, update: Update) -> Iterator[Json]:
        for delta in update.deltas:
            yield from self._events(delta)

    def _events(self, delta: Delta) -> Iterator[Json]:
        match delta:
            case AnswerBegin():
                self.message["usage"] = _usage(delta.usage)
                empty = {**self.message, "content": []}
                yield {"type": "message_start", "message": empty}
            case Thought(text):
                yield from self._write_thought(text)
            case Text(text):
                yield from self._write_text(text)
            case CallBegin(id, name):
                yield from self._open_block(
                    {"type": "tool_use", "id": id, "name": name, "input": {}}
                )
                self._arguments = ""
                self._block["input"] = invalid_arguments("")
            case CallText(text):
                self._arguments += text
                self._block["input"] = invalid_arguments(self._arguments)  # until the end
                yield self._delta("input_json_delta", "partial_json", text)
            case CallEnd():
                self._block["input"] = arguments_object(self._arguments)
                yield from self._close_block()
            case AnswerEnd():
                self._end(delta)
            case PromptProgress():
                pass  # Anthropic has no event for this.

    def finish(self) -> Iterator[Json]:
        yield from self._close_block()
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        others: Json = {"usage": self.message["usage"]}
        if "warnings" in self.message:
            others["warnings"] = self.message["warnings"]
        yield {"type": "message_delta", "delta": delta, **others}
        yield {"type": "message_stop"}

    def failed(self, error: BrigadeError) -> Json:
        return anthropic_error(error, self._request_id)

    def whole(self) -> Json:
        return self.message

    def _end(self, end: AnswerEnd) -> None:
        self.message["usage"] = _usage(end.usage)
        if end.violations:
            self.message["warnings"] = end.warnings
        if isinstance(end.stop, str):
            self.message["stop_reason"] = "stop_sequence"
            self.message["stop_sequence"] = end.stop
        else:
            self.message["stop_reason"] = _REASONS[end.reason]

    def _write_thought(self, text: str) -> Iterator[Json]:
        if not self._continues("thinking"):
            yield from self._open_block({"type": "thinking", "thinking": "", "signature": ""})
            self._thought = ""
        self._thought += text
        if not self._omits_thoughts:
            self._block["thinking"] = self._thought
            yield self._delta("thinking_delta", "thinking", text)

    def _write_text(self, text: str) -> Iterator[Json]:
        if not self._continues("text"):
            yield from self._open_block({"type": "text", "text": ""})
        self._block["text"] += text
        yield self._delta("text_delta", "text", text)

    def _continues(self, kind: str) -> bool:
        return self._is_open and self._block["type"] == kind

    @property
    def _block(self) -> Json:
        block: Json = self.message["content"][-1]
        return block

    def _open_block(self, block: Json) -> Iterator[Json]:
        yield from self._close_block()
        self.message["content"].append(block)
        self._is_open = True
        yield self._event("start", content_block=dict(block))

    def _close_block(self) -> Iterator[Json]:
        if not self._is_open:
            return
        block = self._block
        self._is_open = False
        if block["type"] == "thinking":
            block["signature"] = self._signature()
            yield self._delta("signature_delta", "signature", block["signature"])
        yield self._event("stop")

    def _signature(self) -> str:
        """Returns a thinking block's signature. Clients drop blocks without a signature, and send
        signatures back. If thoughts are omitted, the signature contains the thought, which a model
        with tools needs."""
        return opaque(self._thought) if self._omits_thoughts else secrets.token_hex(16)

    def _delta(self, type: str, field: str, value: str) -> Json:
        return self._event("delta", delta={"type": type, field: value})

    def _event(self, name: str, **fields: object) -> Json:
        index = len(self.message["content"]) - 1
        return {"type": f"content_block_{name}", "index": index, **fields}


def _usage(tokens: TokenUsage) -> Json:
    return {
        "input_tokens": tokens.prompt_tokens - tokens.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached_tokens,
        "output_tokens": tokens.completion_tokens,
        "output_tokens_details": {"thinking_tokens": tokens.reasoning_tokens},
    }
