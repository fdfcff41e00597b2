"""Writes answers as OpenAI's chat: as chunks of a stream, or as one reply."""

from collections.abc import Iterator
from io import StringIO

from serve.front.api.writers.custom_input import CustomInput
from serve.front.api.writers.logprobs import ScoreWriter
from serve.front.api.writers.whole import WholeChoice, WholeChunks
from serve.front.api.writers.writer import ChunkWriter
from serve.front.http.replies import Json
from serve.front.output.answer import Job
from serve.front.output.deltas import (
    AnswerBegin,
    AnswerEnd,
    CallBegin,
    CallEnd,
    CallText,
    PromptProgress,
    Reason,
    Text,
    Thought,
    Update,
)
from serve.front.text.tokens import Tokenizer

# The field with a call's arguments or input, by the type of the call.
_TEXT_OF_CALL = {"function": "arguments", "custom": "input"}


class ChatWriter(ChunkWriter):
    """Writes the role, text, thoughts and calls, the finish reason, and the usage if wanted."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk", job)
        self._listing = job.listing
        self._prompt_ids = job.prompts[0].ids
        self._names_tool = job.splitting.names_tool
        self._scores = ScoreWriter(tokenizer, job.listing.as_ids)
        self._num_calls = [0] * job.num_answers
        self._inputs: dict[int, CustomInput] = {}  # the open call of a custom tool, by answer

    def chunks(self, update: Update) -> Iterator[Json]:
        number = update.number
        if update.deltas and isinstance(update.deltas[0], PromptProgress):
            waiting = _choice(number, {"role": "assistant", "content": None})
            yield {"choices": [waiting], "prompt_progress": _progress(update.deltas[0])}
            return
        if begin := update.begin:
            first = _choice(number, {"role": "assistant", "content": ""})
            chunk: Json = {"choices": [first]}
            if number == 0:
                chunk |= self._prompt_fields(begin)
            yield chunk
        deltas = list(self._deltas(update))
        if not deltas and update.tokens and self._lists_tokens:
            deltas = [{"content": ""}]
        for delta in deltas[:1]:
            yield {"choices": [self._listed(update, delta)]}
        for delta in deltas[1:]:
            yield {"choices": [_choice(number, delta)]}
        if end := update.end:
            self.usage = end.usage
            last = _choice(number, {})
            last["finish_reason"] = self._reason(end.reason)
            last["stop_reason"] = end.stop
            chunk = {"choices": [last]}
            if end.violations:
                chunk["warnings"] = end.warnings
            yield chunk

    @property
    def _lists_tokens(self) -> bool:
        return self._listing.logprobs is not None or self._listing.token_ids

    def _prompt_fields(self, begin: AnswerBegin) -> Json:
        fields: Json = {}
        if self._listing.token_ids:
            fields["prompt_token_ids"] = self._prompt_ids
        if self._listing.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._scores.prompt(begin.prompt_scores)
        return fields

    def _listed(self, update: Update, delta: Json) -> Json:
        """Returns the choice of an update's first delta, with its tokens and scores."""
        choice = _choice(update.number, delta)
        if self._listing.logprobs is not None:
            choice["logprobs"] = self._scores.chat(update.scores)
        if self._listing.token_ids:
            choice["token_ids"] = list(update.tokens)
        return choice

    def _deltas(self, update: Update) -> Iterator[Json]:
        """Yields OpenAI's deltas. A call's name comes with its first arguments if possible."""
        begun: CallBegin | None = None
        for delta in update.deltas:
            if begun is not None and not isinstance(delta, CallText):
                yield self._call(update.number, "", begun)
                begun = None
            match delta:
                case Text(text):
                    yield {"content": text}
                case Thought(text):
                    yield {"reasoning": text, "reasoning_content": text}
                case CallBegin(_, name):
                    self._num_calls[update.number] += 1
                    begun = delta
                    if name in self._listing.custom_tools:
                        self._inputs[update.number] = CustomInput(self._listing.is_raw_input)
                case CallText(text):
                    yield from self._call_text(update.number, text, begun)
                    begun = None
                case CallEnd():
                    yield from self._rest_of_input(update.number)
                case AnswerEnd():  # A call that is still open was cut off: its rest is not input.
                    self._inputs.pop(update.number, None)
                case PromptProgress() | AnswerBegin():
                    pass  # Such deltas are not part of a choice's delta.
        if begun is not None:
            yield self._call(update.number, "", begun)

    def _call_text(self, number: int, text: str, begun: CallBegin | None) -> Iterator[Json]:
        if number in self._inputs:
            text = self._inputs[number].feed(text)
        if text or begun or number not in self._inputs:
            yield self._call(number, text, begun)

    def _rest_of_input(self, number: int) -> Iterator[Json]:
        """Ends the call of a custom tool, if one is open."""
        if number not in self._inputs:
            return
        rest = self._inputs[number].finish()
        if rest:
            yield self._call(number, rest, None)
        del self._inputs[number]

    def _call(self, number: int, text: str, begun: CallBegin | None) -> Json:
        """Returns the delta of a call. text is the next part of its arguments or its input."""
        kind = "custom" if number in self._inputs else "function"
        called: Json = {_TEXT_OF_CALL[kind]: text}
        call: Json = {"index": self._num_calls[number] - 1, kind: called}
        if begun is not None:
            called["name"] = begun.name
            call["id"] = begun.id
            call["type"] = kind
        if self._listing.function_call:
            return {"function_call": called}
        return {"tool_calls": [call]}

    def _reason(self, reason: Reason) -> str:
        """Returns the finish reason. As with OpenAI, calls of a named tool do not change it."""
        if reason != "tool_calls":
            return reason
        if self._names_tool:
            return "stop"
        return "function_call" if self._listing.function_call else reason


class _WholeMessage(WholeChoice):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._thoughts: StringIO | None = None
        self._calls: list[tuple[Json, StringIO]] = []
        self._function_name: str | None = None
        self._function_arguments = StringIO()

    def add(self, choice: Json) -> None:
        super().add(choice)
        delta = choice["delta"]
        self.text.write(delta.get("content") or "")
        if thought := delta.get("reasoning_content"):
            self._thoughts = self._thoughts or StringIO()
            self._thoughts.write(thought)
        if function := delta.get("function_call"):
            self._function_name = function.get("name", self._function_name)
            self._function_arguments.write(function["arguments"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._calls.append((call, StringIO()))
            first, text = self._calls[-1]
            kind = first["type"]
            text.write(call[kind][_TEXT_OF_CALL[kind]])

    def choice(self) -> Json:
        content: str | None = self.text.getvalue()
        has_calls = bool(self._calls or self._function_name)
        if has_calls and not content:
            content = None
        thoughts = None if self._thoughts is None else self._thoughts.getvalue()
        message: Json = {
            "role": "assistant",
            "content": content,
            "reasoning": thoughts,
            "reasoning_content": thoughts,
            "refusal": None,
        }
        if self._function_name is not None:
            arguments = self._function_arguments.getvalue()
            message["function_call"] = {"name": self._function_name, "arguments": arguments}
        if self._calls:
            message["tool_calls"] = [_whole_call(*call) for call in self._calls]
        return {**self.fields, "message": message}


class WholeChat(WholeChunks):
    """Combines the chunks of all choices into one chat.completion."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        fields = {"prompt_logprobs": None, "prompt_token_ids": None}
        super().__init__(ChatWriter(job, tokenizer), "chat.completion", _WholeMessage, fields)


def _whole_call(first: Json, text: StringIO) -> Json:
    kind = first["type"]
    called = {_TEXT_OF_CALL[kind]: text.getvalue(), "name": first[kind]["name"]}
    return {kind: called, "id": first["id"], "type": kind}


def _progress(progress: PromptProgress) -> Json:
    """Returns the progress of a prompt, as llama.cpp's server reports it."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.done,
        "time_ms": round(progress.seconds * 1000),
    }


def _choice(number: int, delta: Json) -> Json:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
