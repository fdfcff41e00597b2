"""The HTTP calls of Ollama's API, as far as they concern a model that is served already."""

import asyncio
import time
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from serve import __version__
from serve.front.api.ollama import OllamaChatBody, OllamaGenerateBody, ShowBody
from serve.front.api.ollama_embeddings import (
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    encode_embed,
    encode_embeddings,
)
from serve.front.api.openai import parse
from serve.front.api.reading import kinds
from serve.front.api.reading.kinds import BodyKind
from serve.front.api.reading.reader import FinishedReply
from serve.front.api.writers.ollama import OllamaWriter, WholeOllama
from serve.front.http import middleware, replies
from serve.front.http.access import Access, ErrorFormat, Policy, Route
from serve.front.http.body import json_object
from serve.front.http.openapi import endpoint
from serve.front.http.replies import Json
from serve.front.output.answer import Job
from serve.front.pipeline.engine import Engine
from serve.front.routes.answering import Answering
from serve.front.routes.stream import Framing, Space, json_response, stream_reply, whole_reply

_POLICY = Policy(Access.CLIENT, ErrorFormat.OLLAMA)
_FRAMING = Framing(replies.json_line, ping=Space(), media_type="application/x-ndjson", comment=b" ")
FOLDERS = {"/api/": _POLICY}


class OllamaCalls:
    def __init__(self, answering: Answering, engine: Engine, max_context: int) -> None:
        self._answering = answering
        self._engine = engine
        self._max_context = max_context
        self._started = datetime.now(UTC).isoformat().replace("+00:00", "Z")

    def routes(self) -> list[Route]:
        return [
            Route("/api/chat", self.ollama_chat, methods=["POST"]),
            Route("/api/generate", self.ollama_generate, methods=["POST"]),
            Route("/api/embed", self.ollama_embed, methods=["POST"]),
            Route("/api/embeddings", self.ollama_embeddings, methods=["POST"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/tags", self.tags),
            Route("/api/ps", self.running),
            Route("/api/version", self.ollama_version),
        ]

    @endpoint(policy=_POLICY, body=OllamaChatBody)
    async def ollama_chat(self, request: Request) -> Response:
        """Answers a chat of Ollama's API, by default as lines of JSON."""
        return await self._answer(request, kinds.OLLAMA_CHAT, is_chat=True)

    @endpoint(policy=_POLICY, body=OllamaGenerateBody)
    async def ollama_generate(self, request: Request) -> Response:
        """Answers a prompt of Ollama's API, by default as lines of JSON."""
        return await self._answer(request, kinds.OLLAMA_GENERATE, is_chat=False)

    async def _answer(
        self,
        request: Request,
        kind: BodyKind[Job | FinishedReply],
        is_chat: bool,
    ) -> Response:
        read = await self._answering.read(request, kind)
        if isinstance(read, FinishedReply):
            return _finished(read)
        answer, headers = await self._answering.start_answer(request, read)
        tokenizer = self._answering.tokenizer
        if read.is_stream:
            writer = OllamaWriter(read.model, is_chat, tokenizer)
            return stream_reply(answer, writer, headers, _FRAMING)
        whole = WholeOllama(read.model, is_chat, tokenizer)
        return await whole_reply(request, answer, whole, headers)

    @endpoint(policy=_POLICY, body=OllamaEmbedBody)
    async def ollama_embed(self, request: Request) -> Response:
        """Returns a vector for each input, for clients of Ollama."""
        started = time.monotonic()
        read = await self._answering.read(request, kinds.OLLAMA_EMBED)
        if isinstance(read, FinishedReply):
            return _finished(read)
        vectors, headers = await self._answering.embed(request, read)
        seconds = time.monotonic() - started
        body = await asyncio.to_thread(encode_embed, read, vectors, seconds)
        return Response(body, headers=headers, media_type="application/json")

    @endpoint(policy=_POLICY, body=OllamaEmbeddingsBody)
    async def ollama_embeddings(self, request: Request) -> Response:
        """Returns the vector of a prompt, for older clients of Ollama."""
        read = await self._answering.read(request, kinds.OLLAMA_EMBEDDINGS)
        if isinstance(read, FinishedReply):
            return _finished(read)
        (vector,), headers = await self._answering.embed(request, read)
        body = encode_embeddings(vector)
        return Response(body, headers=headers, media_type="application/json")

    @endpoint(policy=_POLICY, body=ShowBody)
    async def show(self, request: Request) -> Response:
        """Describes the model for clients of Ollama."""
        body = parse(
            ShowBody, json_object(await middleware.read_body(request.scope, request.receive))
        )
        name = self._engine.adapters.registry.served.meant(body.model or body.name or "")
        dialect = self._answering.tokenizer.dialect
        capabilities = ["completion", *(["tools"] if dialect.calls else [])]
        capabilities += ["thinking"] if dialect.reasoning else []
        described = self._described(name)
        return json_response(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": described["details"],
                "model_info": {
                    "general.architecture": "brigade",
                    "general.basename": name,
                    "brigade.context_length": self._max_context,
                },
                "capabilities": capabilities,
                "modified_at": described["modified_at"],
            }
        )

    @endpoint(policy=_POLICY)
    async def tags(self, _: Request) -> Response:
        """Lists the model and its adapters for clients of Ollama."""
        return json_response({"models": self._all()})

    @endpoint(policy=_POLICY)
    async def running(self, _: Request) -> Response:
        """Lists the models in memory for clients of Ollama: all of them."""
        return json_response({"models": self._all()})

    @endpoint(policy=_POLICY)
    async def ollama_version(self, _: Request) -> Response:
        """Returns the version of Brigade, for clients of Ollama."""
        return json_response({"version": __version__})

    def _all(self) -> list[Json]:
        return [self._described(name) for name in self._engine.adapters.registry.names]

    def _described(self, name: str) -> Json:
        return {
            "name": name,
            "model": name,
            "modified_at": self._started,
            "size": 0,
            "digest": "",
            "details": {
                "parent_model": "",
                "format": "safetensors",
                "family": "",
                "families": [],
                "parameter_size": "",
                "quantization_level": "",
            },
        }


def _finished(read: FinishedReply) -> Response:
    return Response(read.reply, media_type="application/json")
