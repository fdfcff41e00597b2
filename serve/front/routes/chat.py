"""The HTTP calls of OpenAI's chat and completions, and vLLM's about tokens."""

from starlette.requests import Request
from starlette.responses import Response

from serve.front.api.openai import ChatBody, CompletionBody, DetokenizeBody, Tokenizable
from serve.front.api.reading import kinds
from serve.front.api.writers.chat import ChatWriter, WholeChat
from serve.front.api.writers.completions import CompletionWriter, WholeCompletion
from serve.front.http.access import CLIENT, Route
from serve.front.http.openapi import endpoint
from serve.front.routes.answering import Answering
from serve.front.routes.stream import OPENAI, stream_reply, whole_reply


class ChatCalls:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    @endpoint(policy=CLIENT, body=ChatBody)
    async def chat(self, request: Request) -> Response:
        """Answers /v1/chat/completions, whole or as a stream."""
        job = await self._answering.read(request, kinds.CHAT)
        answer, headers = await self._answering.start_answer(request, job)
        tokenizer = self._answering.tokenizer
        if job.is_stream:
            return stream_reply(answer, ChatWriter(job, tokenizer), headers, OPENAI)
        return await whole_reply(request, answer, WholeChat(job, tokenizer), headers)

    @endpoint(policy=CLIENT, body=CompletionBody)
    async def completions(self, request: Request) -> Response:
        """Answers /v1/completions: continues one prompt or several."""
        job = await self._answering.read(request, kinds.COMPLETION)
        answer, headers = await self._answering.start_answer(request, job)
        tokenizer = self._answering.tokenizer
        if job.is_stream:
            return stream_reply(answer, CompletionWriter(job, tokenizer), headers, OPENAI)
        return await whole_reply(request, answer, WholeCompletion(job, tokenizer), headers)

    @endpoint(policy=CLIENT, body=Tokenizable)
    async def tokenize(self, request: Request) -> Response:
        """Returns the token ids of a text or of messages."""
        return await self._answering.reply(request, kinds.TOKENIZE)

    @endpoint(policy=CLIENT, body=DetokenizeBody)
    async def detokenize(self, request: Request) -> Response:
        """Returns the text of token ids."""
        return await self._answering.reply(request, kinds.DETOKENIZE)
