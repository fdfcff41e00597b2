"""Ollama's chat and generate: their bodies, which become those of OpenAI's chat and completions."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from serve.core.errors import RequestError
from serve.front.api import chat, completions
from serve.front.api.openai import ChatBody, CompletionBody, Lenient, parse
from serve.front.api.request import DEFAULT_MODEL
from serve.front.api.sampling import MAX_LOGPROBS
from serve.front.http.body import Body
from serve.front.output.answer import Job
from serve.front.text.tokens import Tokenizer

_Json = dict[str, Any]

# A shortened prompt leaves at most a fourth of the context to the answer.
_ANSWER_PART = 4
_NO_TIME = re.compile(r"0+(\.0*)?([nuµm]?s|m|h)?")


class Options(Body):
    """Options that are checked as a chat's fields. Others, such as num_ctx, are ignored."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})

    num_predict: Annotated[int, Field(ge=-2)] | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repeat_penalty: Any = None


class _OllamaBody(Lenient):
    """The base of Ollama's bodies. keep_alive and `shift` have no effect: the model stays loaded,
    and an answer ends where the context does."""

    model: str = DEFAULT_MODEL
    stream: bool | None = None
    options: Options | None = None
    format: str | _Json | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def unloads(self) -> bool:
        """Whether keep_alive asks to unload the model at once."""
        if isinstance(self.keep_alive, str):
            return _NO_TIME.fullmatch(self.keep_alive) is not None
        return bool(self.keep_alive == 0)

    @property
    def num_listed(self) -> int | None:
        """How many of the likeliest tokens are listed with each token; None for no scores."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def num_kept(self, max_context: int) -> int:
        """Returns the length of a prompt that is shortened to leave room for the answer."""
        num_answer = max(1, max_context // _ANSWER_PART)
        limit = self.options.num_predict if self.options else None
        if limit is not None and limit > 0:
            num_answer = min(num_answer, limit)
        return max_context - num_answer

    def shortened_if_needed(self, prepare: Callable[[int | None], Job], max_context: int) -> Job:
        """Returns the job that `prepare` makes, with fewer prompt tokens if they do not fit into
        the context. Raises RequestError."""
        try:
            return prepare(None)
        except RequestError as error:
            if error.code != "context_length_exceeded" or self.truncate is False:
                raise
        return prepare(self.num_kept(max_context))

    def shared_fields(self) -> _Json:
        """Returns the fields of OpenAI's bodies that do not depend on the prompt."""
        options = self.options or Options()
        fields = options.model_dump(exclude={"num_predict"})
        fields["repetition_penalty"] = fields.pop("repeat_penalty")
        limit = options.num_predict
        if limit is None or limit < 0:
            limit = -1
        return {
            **fields,
            "model": self.model,
            "max_tokens": limit,
            "response_format": self._response_format(),
            "stream": self.stream is not False,
        }

    def chat_fields(self, messages: list[_Json]) -> _Json:
        effort = self.think if isinstance(self.think, str) else None
        is_wanted = self.think if isinstance(self.think, bool) else None
        return {
            **self.shared_fields(),
            "messages": messages,
            "logprobs": self.num_listed is not None,
            "top_logprobs": self.num_listed,
            "reasoning_effort": effort,
            "enable_thinking": is_wanted,
        }

    def _response_format(self) -> _Json | None:
        if isinstance(self.format, dict):
            return {
                "type": "json_schema",
                "json_schema": {"name": "format", "schema": self.format},
            }
        if self.format == "json":
            return {"type": "json_object"}
        if self.format:
            raise RequestError('format must be "json" or a schema.', param="format")
        return None

    def _chat_job(
        self, fields: _Json, tokenizer: Tokenizer, max_context: int, finds_boundaries: bool
    ) -> Job:
        """Returns the job of a chat with these fields of OpenAI's API. Raises RequestError."""
        request = parse(ChatBody, fields).request(tokenizer)

        def prepare(keep: int | None) -> Job:
            kept = replace(request, keep=keep, drops_oldest=keep is not None)
            return chat.prepare(kept, tokenizer, max_context, finds_boundaries)

        return self.shortened_if_needed(prepare, max_context)


class OllamaChatBody(_OllamaBody):
    messages: Annotated[list[_Json], Field(fail_fast=True)] | None = None
    tools: Annotated[list[_Json], Field(fail_fast=True)] | None = None

    @property
    def loads_only(self) -> bool:
        """Whether the request only asks to load the model."""
        return not self.messages

    def job(self, tokenizer: Tokenizer, max_context: int, finds_boundaries: bool) -> Job:
        """Renders and encodes the messages, as `chat.prepare` does. Raises RequestError."""
        messages = [_message(message) for message in self.messages or ()]
        fields = self.chat_fields(messages)
        if self.tools:
            fields["tools"] = [{"type": "function", **tool} for tool in self.tools]
        return self._chat_job(fields, tokenizer, max_context, finds_boundaries)


class OllamaGenerateBody(_OllamaBody):
    """The body of generate. `raw` leaves out the chat template. context is a history's old form."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: Literal[""] | None = None
    context: Annotated[list[Any], Field(max_length=0)] | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def loads_only(self) -> bool:
        """Whether the request only asks to load the model."""
        return not self.prompt

    def job(self, tokenizer: Tokenizer, max_context: int, finds_boundaries: bool) -> Job:
        """Encodes the prompt, as `chat.prepare` does. Raises RequestError."""
        if self.raw:
            return self._raw_job(tokenizer, max_context)
        messages = [{"role": "user", "content": self.prompt or ""}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        fields = self.chat_fields(messages)
        return self._chat_job(fields, tokenizer, max_context, finds_boundaries)

    def _raw_job(self, tokenizer: Tokenizer, max_context: int) -> Job:
        fields = {
            **self.shared_fields(),
            "prompt": self.prompt or "",
            "logprobs": self.num_listed,
        }

        def prepare(keep: int | None) -> Job:
            body = parse(CompletionBody, {**fields, "truncate_prompt_tokens": keep})
            return completions.prepare(body, tokenizer, max_context)

        return self.shortened_if_needed(prepare, max_context)


class ShowBody(Lenient):
    """The body of show. name is the older name of the field model."""

    model: str | None = None
    name: str | None = None


def _message(message: _Json) -> _Json:
    """Converts a message to OpenAI's form."""
    if message.get("images"):
        raise RequestError("images: this model reads text only.", param="messages")
    read = dict(message)
    if message.get("thinking") is not None:
        read["reasoning"] = message["thinking"]
    if message.get("tool_name") is not None:
        read["name"] = message["tool_name"]
    return read
