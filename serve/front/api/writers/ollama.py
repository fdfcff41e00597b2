"""Writes answers as Ollama's chat and generate: as lines of JSON, or as one reply."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO

from serve.core.errors import BrigadeError
from serve.core.types import Score
from serve.front.api.messages import arguments_object
from serve.front.api.writers.logprobs import ScoreWriter
from serve.front.api.writers.writer import WholeWriter, Writer
from serve.front.http.replies import Json, ollama_error
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
    Update,
)
from serve.front.text.tokens import Tokenizer


class OllamaWriter(Writer):
    """Writes a line for each text, thought and whole call, and a last line with counts and
    nanoseconds. A token's scores come with its text, or in the next line."""

    def __init__(self, model: str, is_chat: bool, tokenizer: Tokenizer) -> None:
        self._model = model
        self._is_chat = is_chat
        self._score_writer = ScoreWriter(tokenizer)
        self._scores: list[Score] = []  # the scores of tokens whose line is still to come
        self._started = time.monotonic()
        self._first: float | None = None  # the time of the first token
        self._name = ""
        self._arguments = StringIO()

    def feed(self, update: Update) -> Iterator[Json]:
        if self._first is None:
            self._first = time.monotonic()
        self._scores += update.scores
        for delta in update.deltas:
            for line in self._lines(delta):
                yield {**line, **self._logprobs()}

    def failed(self, error: BrigadeError) -> Json:
        return ollama_error(error)

    def line(self, text: str, **others: object) -> Json:
        """Returns a line with text and other fields, which a chat has in its message."""
        return _line(self._model, self._is_chat, text, **others)

    def _logprobs(self) -> Json:
        """Returns the field with the scores of the tokens up to this line, if there are any."""
        if not self._scores:
            return {}
        written = self._score_writer.chat(self._scores)
        self._scores = []
        return {"logprobs": written["content"]}

    def _lines(self, delta: Delta) -> Iterator[Json]:
        match delta:
            case Text(text):
                yield self.line(text)
            case Thought(text):
                yield self.line("", thinking=text)
            case CallBegin(_, name):
                self._name = name
                self._arguments = StringIO()
            case CallText(text):
                self._arguments.write(text)
            case CallEnd():
                arguments = arguments_object(self._arguments.getvalue())
                function = {"name": self._name, "arguments": arguments}
                yield self.line("", tool_calls=[{"function": function}])
            case AnswerEnd():
                yield {**self.line(""), **self._last(delta)}
            case PromptProgress() | AnswerBegin():
                pass  # Ollama has no events for these.

    def _last(self, end: AnswerEnd) -> Json:
        now = time.monotonic()
        first = now if self._first is None else self._first
        return {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": _nanoseconds(now - self._started),
            "load_duration": 0,
            "prompt_eval_count": end.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._started),
            "eval_count": end.usage.completion_tokens,
            "eval_duration": _nanoseconds(now - first),
            **({"warnings": end.warnings} if end.violations else {}),
        }


class WholeOllama(WholeWriter):
    """Combines the lines into one reply."""

    def __init__(self, model: str, is_chat: bool, tokenizer: Tokenizer) -> None:
        self._writer = OllamaWriter(model, is_chat, tokenizer)
        self._is_chat = is_chat
        self._text = StringIO()
        self._thought = StringIO()
        self._calls: list[Json] = []
        self._logprobs: list[Json] = []
        self._last: Json = {}

    def feed(self, update: Update) -> Iterator[Json]:
        for line in self._writer.feed(update):
            said = line["message"] if self._is_chat else line
            text = said["content"] if self._is_chat else said["response"]
            self._text.write(text)
            self._thought.write(said.get("thinking", ""))
            self._calls += said.get("tool_calls", ())
            self._logprobs += line.pop("logprobs", ())
            self._last = line
        return iter(())

    def whole(self) -> Json:
        others: Json = {}
        thought = self._thought.getvalue()
        if thought:
            others["thinking"] = thought
        if self._calls:
            others["tool_calls"] = self._calls
        line = self._writer.line(self._text.getvalue(), **others)
        counts = {name: value for name, value in self._last.items() if name not in line}
        scores = {"logprobs": self._logprobs} if self._logprobs else {}
        return {**line, "done": True, **counts, **scores}


def without_answer(model: str, is_chat: bool, unloads: bool) -> Json:
    """Returns the reply to a request to load or unload the model; both do nothing."""
    line = _line(model, is_chat, "")
    return {**line, "done": True, "done_reason": "unload" if unloads else "load"}


def _line(model: str, is_chat: bool, text: str, **others: object) -> Json:
    head: Json = {"model": model, "created_at": _now()}
    if is_chat:
        message = {"role": "assistant", "content": text, **others}
        return {**head, "message": message, "done": False}
    return {**head, "response": text, **others, "done": False}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
