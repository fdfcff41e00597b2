"""Writes an answer as a response: its items, and the events of a stream. Pure."""

import time
from collections.abc import Iterator, Sequence
from typing import Literal

from serve.core.errors import BrigadeError, RequestError
from serve.core.types import Score
from serve.front.api.opaque import opaque
from serve.front.api.responses.body import ResponsePlan
from serve.front.api.responses.items import new_item_id
from serve.front.api.responses.offer import OfferedTool, call_fields
from serve.front.api.writers.custom_input import CustomInput
from serve.front.api.writers.logprobs import ScoreWriter
from serve.front.http.replies import Json, error_object
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
from serve.front.text.tokens import Tokenizer

Kind = Literal["message", "reasoning"]

_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponsesWriter:
    """Writes the events of a stream. response is the part sent so far. tokenizer is for scores."""

    def __init__(self, plan: ResponsePlan, tokenizer: Tokenizer | None = None) -> None:
        self._plan = plan
        self._score_writer = ScoreWriter(tokenizer) if tokenizer else None
        self.response: Json = {
            "id": new_item_id("response"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            **plan.repeated,
            "output": [],
        }
        self._num_events = 0
        self._open: Json | None = None
        self._input: CustomInput | None = None  # the input of a custom tool's open call
        self._defined: tuple[CallBegin, OfferedTool, list[str]] | None = None
        self._scores: list[Score] = []  # the scores of tokens whose text is still to come
        self._is_cut = False

    def begin(self) -> Iterator[Json]:
        yield self._about_all("created")
        yield self._about_all("in_progress")

    def feed(self, update: Update) -> Iterator[Json]:
        self._scores += update.scores
        for delta in update.deltas:
            yield from self._events(delta)

    def _events(self, delta: Delta) -> Iterator[Json]:
        match delta:
            case Thought(text):
                self._scores.clear()
                yield from self._text("reasoning", text)
            case Text(text):
                yield from self._text("message", text)
            case CallBegin():
                self._scores.clear()
                yield from self._begin_call(delta)
            case CallText(text):
                self._scores.clear()
                yield from self._call_text(text)
            case CallEnd():
                yield from self._end_call()
            case AnswerEnd():
                self._is_cut = delta.reason == "length"
                self.response["usage"] = response_usage(delta.usage)
                if delta.violations:
                    warnings = self.response.get("warnings", ())
                    self.response["warnings"] = [*warnings, *delta.warnings]
            case PromptProgress() | AnswerBegin():
                pass  # Responses have no events for these.

    def finish(self) -> Iterator[Json]:
        status = "incomplete" if self._is_cut or self._has_open_call else "completed"
        if not self.response["output"] and self._defined is None:
            # The answer was empty, or cut before its call had a name: clients read the first item.
            yield from self._text("message", "")
        yield from self._end_items(status)
        if status == "incomplete":
            # OpenAI has no reason that fits a call cut off by a stop string or by the model itself.
            reason = "max_output_tokens" if self._is_cut else None
            self.response["incomplete_details"] = {"reason": reason}
        self._end(status)
        yield self._about_all(status)

    def failed(self, error: BrigadeError) -> Json:
        code = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
        message = error_object(error)["error"]["message"]
        self.response["error"] = {"code": code, "message": message}
        self._end("failed")
        return self._about_all("failed")

    def whole(self) -> Json:
        return self.response

    def _end(self, status: str) -> None:
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = int(time.time())

    # --- texts

    def _text(self, kind: Kind, text: str) -> Iterator[Json]:
        part_type = _TEXT[kind]
        if self._open is None or self._open["type"] != kind:
            yield from self._begin_text(kind, part_type)
        part = self._current["content"][0]
        part["text"] += text
        event_fields: Json = {"delta": text}
        if kind == "message":
            logprobs = self._logprobs()
            event_fields["logprobs"] = logprobs
            if logprobs:
                part["logprobs"] = [*part["logprobs"], *logprobs]
        yield self._event(f"{part_type}.delta", content_index=0, **event_fields)

    def _begin_text(self, kind: Kind, part_type: str) -> Iterator[Json]:
        part: Json = {"type": part_type, "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
            yield from self._begin_item(kind, content=[], role="assistant")
        else:
            yield from self._begin_item(kind, content=[], summary=[])
        yield self._event("content_part.added", content_index=0, part=dict(part))
        self._current["content"] = [part]

    def _logprobs(self) -> Sequence[Json]:
        """Returns the scores of all tokens that have not been sent yet."""
        scores = self._scores
        self._scores = []
        if not scores or self._score_writer is None:
            return []
        written = self._score_writer.chat(scores)
        return [dict(each) for each in written["content"]]

    # --- calls

    def _begin_call(self, call: CallBegin) -> Iterator[Json]:
        offered = self._plan.offered.get(call.name)
        if offered is None:
            yield from self._begin_function(call, call.name, None)
        elif offered.kind == "function":
            yield from self._begin_function(call, offered.name, offered.namespace)
        elif offered.kind == "custom":
            self._input = CustomInput(offered.is_raw)
            names = _names(offered.name, offered.namespace)
            yield from self._begin_item("custom_tool_call", call_id=call.id, **names, input="")
        else:
            yield from self._close("completed")
            self._defined = (call, offered, [])

    def _begin_function(self, call: CallBegin, name: str, namespace: str | None) -> Iterator[Json]:
        names = _names(name, namespace)
        yield from self._begin_item("function_call", call_id=call.id, **names, arguments="")

    def _call_text(self, text: str) -> Iterator[Json]:
        if self._defined is not None:
            self._defined[2].append(text)
        elif self._input is not None:
            yield from self._input_text(self._input.feed(text))
        else:
            self._current["arguments"] += text
            yield self._event("function_call_arguments.delta", delta=text)

    def _input_text(self, text: str) -> Iterator[Json]:
        if text:
            self._current["input"] += text
            yield self._event("custom_tool_call_input.delta", delta=text)

    def _end_call(self) -> Iterator[Json]:
        if self._defined is not None:
            call, offered, texts = self._defined
            fields = call_fields(offered.kind, "".join(texts))
            if fields is not None:
                self._defined = None
                yield from self._begin_item(f"{offered.kind}_call", call_id=call.id, **fields)
        yield from self._end_items("completed", "completed")

    @property
    def _has_open_call(self) -> bool:
        is_item = self._open is not None and self._open["type"] not in _TEXT
        return is_item or self._defined is not None

    def _end_items(self, status: str, call_status: str = "incomplete") -> Iterator[Json]:
        """Ends the open item, with call_status if it is a call. Arguments that do not fit a defined
        tool become a call of a function, so that the client sees them."""
        if self._defined is not None:
            call, offered, texts = self._defined
            self._defined = None
            yield from self._begin_function(call, offered.name, None)
            yield from self._call_text("".join(texts))
        yield from self._close(status, call_status)

    # --- items

    @property
    def _current(self) -> Json:
        assert self._open is not None
        return self._open

    def _begin_item(self, kind: str, **fields: object) -> Iterator[Json]:
        yield from self._close("completed")
        self._open = {"type": kind, "id": new_item_id(kind), "status": "in_progress", **fields}
        self.response["output"].append(self._open)
        yield self._event("output_item.added", item=dict(self._open))

    def _close(self, status: str, call_status: str = "incomplete") -> Iterator[Json]:
        if self._open is None:
            return
        item = self._open
        if item["type"] not in _TEXT:
            status = call_status
        match item["type"]:
            case "function_call":
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._event("function_call_arguments.done", **done)
            case "custom_tool_call":
                yield from self._close_input(status)
            case "message" | "reasoning":
                yield from self._close_text(item)
            case _:
                pass  # Calls of other tools have no event of this kind.
        item["status"] = status
        yield self._event("output_item.done", item=item)
        self._open = None

    def _close_input(self, status: str) -> Iterator[Json]:
        assert self._input is not None
        if status == "completed":
            yield from self._input_text(self._input.finish())
        self._input = None
        yield self._event("custom_tool_call_input.done", input=self._current["input"])

    def _close_text(self, item: Json) -> Iterator[Json]:
        part = item["content"][0]
        fields: Json = {"text": part["text"]}
        if item["type"] == "message":
            fields["logprobs"] = part["logprobs"]
        yield self._event(f"{part['type']}.done", content_index=0, **fields)
        yield self._event("content_part.done", content_index=0, part=part)
        if item["type"] == "reasoning" and self._plan.encrypts:
            item["encrypted_content"] = opaque(part["text"])

    # --- events

    def _event(self, name: str, /, **fields: object) -> Json:
        """Returns an event about the open item, with the item's place."""
        num_items = len(self.response["output"])
        place: Json = {"output_index": num_items - 1}
        if "item" not in fields:
            place["item_id"] = self._current["id"]
        return self._numbered(name, **place, **fields)

    def _about_all(self, name: str) -> Json:
        return self._numbered(name, response=dict(self.response))

    def _numbered(self, name: str, /, **fields: object) -> Json:
        number = self._num_events
        self._num_events += 1
        return {"type": f"response.{name}", "sequence_number": number, **fields}


def _names(name: str, namespace: str | None) -> Json:
    names = {"name": name}
    if namespace:
        names["namespace"] = namespace
    return names


def response_usage(tokens: TokenUsage) -> Json:
    """Returns the token counts, as OpenAI's responses state them."""
    return {
        "input_tokens": tokens.prompt_tokens,
        "input_tokens_details": {"cached_tokens": tokens.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": tokens.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning_tokens},
        "total_tokens": tokens.prompt_tokens + tokens.completion_tokens,
    }
