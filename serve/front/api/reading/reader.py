"""Reads the bodies of requests: turns bytes into a job for the model, or into a finished reply.

Readers know no HTTP and no cluster. Long bodies are read in a helper process
(`serve.front.api.reading.process`), so the results can be sent as messages.
"""

import json
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec

from serve.core.errors import RequestError
from serve.core.helper_messages import ModelNames
from serve.front.api import chat, completions, embeddings, tokenize
from serve.front.api.anthropic.body import CountBody, MessagesBody
from serve.front.api.embeddings import EmbeddingBody, EmbeddingJob
from serve.front.api.messages import ChatMessage
from serve.front.api.ollama import OllamaChatBody, OllamaGenerateBody
from serve.front.api.ollama_embeddings import (
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    embed_reply,
    embeddings_reply,
)
from serve.front.api.openai import ChatBody, CompletionBody, parse
from serve.front.api.request import ChatRequest, check_num_answers
from serve.front.api.responses.body import (
    InputTokensBody,
    ResponsePlan,
    ResponsesBody,
    response_field_names,
)
from serve.front.api.responses.items import item_ids, messages_of, with_items
from serve.front.api.truncation import fitting
from serve.front.api.writers.ollama import without_answer
from serve.front.http import replies
from serve.front.http.body import json_object
from serve.front.http.replies import Json
from serve.front.output.answer import Job
from serve.front.text.tokens import Tokenizer

ResponseBody = TypeVar("ResponseBody", bound=InputTokensBody)


class ReadResponse(msgspec.Struct, frozen=True, tag=True):
    """A response to generate. messages is the conversation before the answer, without the
    instructions, as JSON."""

    plan: ResponsePlan
    messages: bytes
    job: Job


class ReadMessage(msgspec.Struct, frozen=True, tag=True):
    """A message to generate. left_out names the declared tools that the model is not offered.
    omits_thoughts says that thinking blocks come without their text."""

    job: Job
    left_out: tuple[str, ...]
    omits_thoughts: bool


class NeedsEarlier(msgspec.Struct, frozen=True, tag=True):
    """The request continues an earlier response or refers to stored items, which must be passed
    with the body."""

    previous_id: str | None
    item_ids: list[str]


class FinishedReply(msgspec.Struct, frozen=True, tag=True):
    """A reply without an answer of the model. ignored_fields are the unknown fields of the body."""

    reply: bytes
    ignored_fields: tuple[str, ...] = ()


AnyReading: TypeAlias = (
    Job | EmbeddingJob | ReadMessage | ReadResponse | NeedsEarlier | FinishedReply
)


@dataclass(frozen=True, slots=True)
class Reader:
    """Each method reads one kind of body (`serve.front.api.reading.kinds`) and raises RequestError.
    Reading is slow. names are the models that a body may name. If finds_boundaries, the prompts of
    chats get their boundaries."""

    tokenizer: Tokenizer
    max_context: int
    max_answers: int
    names: ModelNames
    finds_boundaries: bool = False

    def chat(self, data: bytes) -> Job:
        body = parse(ChatBody, self._object(data))
        return self._prepare(body.request(self.tokenizer))

    def completion(self, data: bytes) -> Job:
        body = parse(CompletionBody, self._object(data))
        num_answers = len(body.prompt) * body.num_choices
        check_num_answers(num_answers, self.max_answers)
        return completions.prepare(body, self.tokenizer, self.max_context)

    def embedding(self, data: bytes) -> EmbeddingJob:
        body = parse(EmbeddingBody, self._object(data))
        return embeddings.prepare(body, self.tokenizer, self.max_context)

    def message(self, data: bytes) -> ReadMessage:
        body = parse(MessagesBody, self._object(data))
        job = self._prepare(body.request(self.tokenizer))
        return ReadMessage(job, body.offer.left_out, body.omits_thoughts)

    def response(self, data: bytes, earlier: bytes | None = None) -> ReadResponse | NeedsEarlier:
        """Reads a response. `earlier` is the result of `Store.earlier` for it. Without this result,
        a response that continues another one or refers to stored items is not read."""
        read = self._conversation(ResponsesBody, data, earlier)
        if isinstance(read, NeedsEarlier):
            return read
        body, before = read
        with response_field_names():
            messages = [*before, *messages_of(body.input, body.offer)]
            job = self._prepare(body.request(messages, self.tokenizer))
        return ReadResponse(
            plan=body.plan(job.enforced_inputs),
            messages=replies.encode(messages),
            job=job,
        )

    def input_tokens(
        self, data: bytes, earlier: bytes | None = None
    ) -> FinishedReply | NeedsEarlier:
        """Returns the reply with the number of tokens in the prompt of a response. `earlier` is as
        for `response`."""
        read = self._conversation(InputTokensBody, data, earlier)
        if isinstance(read, NeedsEarlier):
            return read
        body, before = read
        with response_field_names():
            messages = [*before, *messages_of(body.input, body.offer)]
            variables = body.thinking.variables(self.tokenizer)
            prompt = body.prompt(messages).with_defaults(variables)
            if body.truncation == "auto":
                num_answer = body.max_output_tokens or 1
                prompt = fitting(prompt, self.tokenizer, self.max_context - num_answer)
            num_tokens = tokenize.count(prompt, self.tokenizer, self.max_context)
        reply: Json = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return FinishedReply(replies.encode(reply))

    def _conversation(
        self, kind: type[ResponseBody], data: bytes, earlier: bytes | None
    ) -> tuple[ResponseBody, list[ChatMessage]] | NeedsEarlier:
        """Returns a body with the stored items that it refers to, and the messages before it."""
        fields = self._object(data, "input")
        ids = item_ids(fields.get("input"))
        if earlier is not None:
            stored = json.loads(earlier)
            fields["input"] = (
                with_items(fields["input"], stored["items"]) if ids else fields["input"]
            )
            return parse(kind, fields), stored["messages"]
        previous = fields.get("previous_response_id")
        if ids:
            return NeedsEarlier(previous if isinstance(previous, str) else None, ids)
        body = parse(kind, fields)
        if previous is not None:
            return NeedsEarlier(body.previous_response_id, [])
        return body, []

    def ollama_chat(self, data: bytes) -> Job | FinishedReply:
        body = parse(OllamaChatBody, self._object(data))
        return self._ollama(body, is_chat=True)

    def ollama_generate(self, data: bytes) -> Job | FinishedReply:
        body = parse(OllamaGenerateBody, self._object(data))
        return self._ollama(body, is_chat=False)

    def _ollama(
        self, body: OllamaChatBody | OllamaGenerateBody, is_chat: bool
    ) -> Job | FinishedReply:
        if body.loads_only:
            reply = without_answer(body.model, is_chat, body.unloads)
            return FinishedReply(replies.encode(reply))
        job = body.job(self.tokenizer, self.max_context, self.finds_boundaries)
        return msgspec.structs.replace(job, ignored_fields=body.ignored_fields)

    def ollama_embed(self, data: bytes) -> EmbeddingJob | FinishedReply:
        body = parse(OllamaEmbedBody, self._object(data))
        if body.loads_only:
            return FinishedReply(replies.encode(embed_reply(body.model)))
        return body.job(self.tokenizer, self.max_context)

    def ollama_embeddings(self, data: bytes) -> EmbeddingJob | FinishedReply:
        body = parse(OllamaEmbeddingsBody, self._object(data))
        if body.loads_only:
            return FinishedReply(replies.encode(embeddings_reply()))
        return body.job(self.tokenizer, self.max_context)

    def count(self, data: bytes) -> FinishedReply:
        """Returns the reply to Anthropic's count_tokens: how many tokens the prompt has."""
        body = parse(CountBody, self._object(data))
        variables = body.wanted_thinking.variables(self.tokenizer)
        prompt = body.prompt().with_defaults(variables)
        num_tokens = tokenize.count(prompt, self.tokenizer, self.max_context)
        return FinishedReply(replies.encode({"input_tokens": num_tokens}))

    def tokenize(self, data: bytes) -> FinishedReply:
        fields = self._object(data)
        body, reply = tokenize.tokenize(fields, self.tokenizer, self.max_context)
        return FinishedReply(replies.encode(reply), body.ignored_fields)

    def detokenize(self, data: bytes) -> FinishedReply:
        body, reply = tokenize.detokenize(self._object(data), self.tokenizer, self.max_context)
        return FinishedReply(replies.encode(reply), body.ignored_fields)

    def _prepare(self, request: ChatRequest) -> Job:
        check_num_answers(len(request.samplings), self.max_answers)
        return chat.prepare(request, self.tokenizer, self.max_context, self.finds_boundaries)

    def _object(self, data: bytes, param: str = "messages") -> Json:
        """Parses a body, and replaces the requested model by the served one. Each entry of param
        makes at least one token, so more entries than fit into the context raise RequestError."""
        body = json_object(data)
        model = body.get("model")
        if model is None or isinstance(model, str):
            body["model"] = self.names.meant(model or "")
        given = body.get(param)
        if isinstance(given, list) and len(given) > self.max_context:
            raise RequestError(
                f"{param}: has {len(given)} entries, but this model's maximum context "
                f"length is {self.max_context} tokens: send fewer.",
                param=param,
                code="context_length_exceeded",
            )
        return body
