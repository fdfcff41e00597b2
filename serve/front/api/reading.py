"""Reads the bodies of requests: from bytes to a job for the model or a finished reply.

It knows no HTTP and no cluster. Long bodies are read in a process of their own
(`serve.front.api.reading_process`), so the result can be pickled. Only the server knows which
models exist, and it checks them afterwards.
"""

import io
import json
import pickle
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from serve.core.errors import RequestError
from serve.front.api import chat, completions, embeddings, tokenize
from serve.front.api.anthropic.body import CountBody, MessagesBody
from serve.front.api.embeddings import EmbeddingBody, EmbeddingJob
from serve.front.api.messages import ChatMessage
from serve.front.api.ollama import OllamaChatBody, OllamaGenerateBody
from serve.front.api.openai import ChatBody, CompletionBody, parse
from serve.front.api.request import ChatPrompt, ChatRequest, check_num_answers
from serve.front.api.responses.body import (
    Conversation,
    ResponsePlan,
    ResponsesBody,
    own_names,
)
from serve.front.api.responses.compaction import CompactBody, kept_messages
from serve.front.api.responses.items import listed_items
from serve.front.api.thinking import Thinking
from serve.front.api.writers.ollama import loaded
from serve.front.http import replies
from serve.front.http.body import json_object
from serve.front.http.replies import Json
from serve.front.output.answer import Job
from serve.front.pipeline.interface import Prompt
from serve.front.text.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """A response to generate. messages is the conversation before the answer, without the
    instructions, and input_items are those of the request, both as JSON. tool_grammars
    are those of custom tools. A background response does not end when its client leaves."""

    plan: ResponsePlan
    messages: bytes
    input_items: bytes
    job: Job
    tool_grammars: tuple[str, ...] = ()
    is_background: bool = False


@dataclass(frozen=True, slots=True)
class ReadCompaction:
    """A summary to generate. kept are the items that stay beside it."""

    kept: list[Json]
    job: Job


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """A message to generate. applied_edits is what was left out of the prompt, None if the request
    asked for no such thing. left_out are the names of declared tools that the model is not
    offered. omits_thoughts says that thinking blocks come without their text."""

    job: Job
    applied_edits: list[Json] | None
    left_out: tuple[str, ...]
    omits_thoughts: bool


@dataclass(frozen=True, slots=True)
class NeedsEarlier:
    """The request continues an earlier response or refers to stored items, which have to be given
    with the body."""

    previous_id: str | None
    item_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """A reply that needs no answer of the model. model is the one that the body names, if any, and
    ignored_fields are the unknown fields of the body."""

    model: str | None
    reply: bytes
    ignored_fields: tuple[str, ...] = ()


class Reader:
    """Each method reads one kind of body and raises RequestError. Reading is slow. Several
    threads may read at once."""

    def __init__(self, tokenizer: Tokenizer, max_context: int, max_answers: int) -> None:
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.max_answers = max_answers

    def chat(self, data: bytes) -> Job:
        return self._prepare(parse(ChatBody, self._object(data)).request(self.tokenizer))

    def completion(self, data: bytes) -> Job:
        body = parse(CompletionBody, json_object(data))
        check_num_answers(len(body.prompt) * body.num_choices, self.max_answers)
        return completions.prepare(body, self.tokenizer, self.max_context)

    def embedding(self, data: bytes) -> EmbeddingJob:
        body = parse(EmbeddingBody, json_object(data))
        return embeddings.prepare(body, self.tokenizer, self.max_context)

    def message(self, data: bytes) -> ReadMessage:
        body = parse(MessagesBody, self._object(data))
        edited = body.edited(lambda prompt: self._num_tokens(prompt, body.wanted_thinking))
        job = self._prepare(body.request(self.tokenizer, edited))
        left_out = edited.offer.left_out
        return ReadMessage(job, edited.applied_edits, left_out, body.omits_thoughts)

    def response(self, data: bytes, earlier: bytes | None = None) -> ReadResponse | NeedsEarlier:
        """earlier holds what the store has of what this response continues and refers to, as
        JSON."""
        body = parse(ResponsesBody, self._object(data, "input"))
        if _needs_earlier(body) and earlier is None:
            return NeedsEarlier(body.previous_response_id, body.item_ids)
        with own_names():
            messages = self._conversation(body, earlier)
            job = self._prepare(body.request(messages, self.tokenizer))
        return ReadResponse(
            plan=ResponsePlan.of(body),
            messages=replies.encode(messages),
            input_items=replies.encode(listed_items(json_object(data)["input"])),
            job=job,
            tool_grammars=body.tool_grammars,
            is_background=bool(body.background),
        )

    def compact(self, data: bytes, earlier: bytes | None = None) -> ReadCompaction | NeedsEarlier:
        """earlier is as for `response`."""
        body = parse(CompactBody, self._object(data, "input"))
        if _needs_earlier(body) and earlier is None:
            return NeedsEarlier(body.previous_response_id, body.item_ids)
        with own_names():
            messages = self._conversation(body, earlier)
            job = self._prepare(body.request(messages, self.tokenizer))
        return ReadCompaction(kept_messages(messages), job)

    def _conversation(self, body: Conversation, earlier: bytes | None) -> list[ChatMessage]:
        """The messages that a body continues, and its own."""
        given = json.loads(earlier) if earlier is not None else {"messages": [], "items": {}}
        return [*given["messages"], *body.messages(given["items"])]

    def ollama_chat(self, data: bytes) -> Job | FinishedReply:
        return self._ollama(parse(OllamaChatBody, self._object(data)), is_chat=True)

    def ollama_generate(self, data: bytes) -> Job | FinishedReply:
        return self._ollama(parse(OllamaGenerateBody, json_object(data)), is_chat=False)

    def _ollama(
        self, body: OllamaChatBody | OllamaGenerateBody, is_chat: bool
    ) -> Job | FinishedReply:
        if body.loads_only:
            return FinishedReply(body.model, replies.encode(loaded(body.model, is_chat)))
        return replace(
            body.job(self.tokenizer, self.max_context), ignored_fields=body.ignored_fields
        )

    def count(self, data: bytes) -> FinishedReply:
        """The reply to Anthropic's count_tokens: how many tokens the prompt has."""
        body = parse(CountBody, self._object(data))
        edited = body.edited(lambda prompt: self._num_tokens(prompt, body.wanted_thinking))
        num_tokens = self._num_tokens(edited.prompt, body.wanted_thinking)
        reply: Json = {"input_tokens": num_tokens}
        if body.context_management is not None:
            before = edited.num_tokens_before
            original = num_tokens if before is None else before
            reply["context_management"] = {"original_input_tokens": original}
        return FinishedReply(body.model, replies.encode(reply))

    def tokenize(self, data: bytes) -> FinishedReply:
        fields = self._object(data)
        body, reply = tokenize.tokenize(fields, self.tokenizer, self.max_context)
        return FinishedReply(body.model, replies.encode(reply), body.ignored_fields)

    def detokenize(self, data: bytes) -> FinishedReply:
        body, reply = tokenize.detokenize(json_object(data), self.tokenizer, self.max_context)
        return FinishedReply(body.model, replies.encode(reply), body.ignored_fields)

    def _num_tokens(self, prompt: ChatPrompt, thinking: Thinking) -> int:
        """How many tokens a prompt has, with the variables that thinking sets."""
        rendered = prompt.with_defaults(thinking.variables(self.tokenizer))
        return tokenize.count(rendered, self.tokenizer, self.max_context)

    def _prepare(self, request: ChatRequest) -> Job:
        check_num_answers(len(request.samplings), self.max_answers)
        return chat.prepare(request, self.tokenizer, self.max_context)

    def _object(self, data: bytes, param: str = "messages") -> Json:
        """Parses a body. Each entry of param makes at least one token, so more entries than the
        context has tokens raise RequestError."""
        body = json_object(data)
        given = body.get(param)
        if isinstance(given, list) and len(given) > self.max_context:
            raise RequestError(
                f"{param}: has {len(given)} entries, but this model's maximum context "
                f"length is {self.max_context} tokens: send fewer.",
                param=param,
                code="context_length_exceeded",
            )
        return body


def _needs_earlier(body: Conversation) -> bool:
    return body.previous_response_id is not None or bool(body.item_ids)


# --- between processes


class _Pickler(pickle.Pickler):
    """Pickles a result without the tokenizer and its dialect: both processes have their own."""

    def __init__(self, file: io.BytesIO, tokenizer: Tokenizer) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tokenizer = tokenizer

    def persistent_id(self, value: Any) -> str | None:
        if value is self._tokenizer:
            return "tokenizer"
        if value is self._tokenizer.dialect:
            return "dialect"
        return None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Prompt:
            return NotImplemented
        given = [getattr(value, field.name) for field in fields(value)[1:]]
        return _prompt, (array("q", value.ids), *given)


def _prompt(ids: "array[int]", *given: Any) -> Prompt:
    """Makes a prompt of an array: while one is unpickled Python's lock is held, and an array takes
    much less time than a list."""
    return Prompt(ids.tolist(), *given)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tokenizer: Tokenizer) -> None:
        super().__init__(file)
        self._tokenizer = tokenizer

    def persistent_load(self, name: Any) -> Any:
        return self._tokenizer if name == "tokenizer" else self._tokenizer.dialect


def dump(value: Any, tokenizer: Tokenizer) -> bytes:
    """Pickles a result for `load`, in another process with the same tokenizer."""
    file = io.BytesIO()
    _Pickler(file, tokenizer).dump(value)
    return file.getvalue()


def load(data: bytes, tokenizer: Tokenizer) -> Any:
    return _Unpickler(io.BytesIO(data), tokenizer).load()


def answered(work: Callable[[], Any]) -> Any:
    """The result of work, or the RequestError that it raises."""
    try:
        return work()
    except RequestError as error:
        return error
