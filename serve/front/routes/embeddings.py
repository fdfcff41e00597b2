"""The HTTP call of OpenAI's embeddings."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from serve.front.api.embeddings import EmbeddingBody, encode
from serve.front.api.reading import kinds
from serve.front.http.access import CLIENT, Route
from serve.front.http.openapi import endpoint
from serve.front.routes.answering import Answering


class EmbeddingCalls:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [Route("/v1/embeddings", self.embeddings, methods=["POST"])]

    @endpoint(policy=CLIENT, body=EmbeddingBody)
    async def embeddings(self, request: Request) -> Response:
        """Returns a vector for each input, which represents its meaning."""
        job = await self._answering.read(request, kinds.EMBEDDING)
        vectors, headers = await self._answering.embed(request, job)
        body = await asyncio.to_thread(encode, job, vectors)
        return Response(body, headers=headers, media_type="application/json")
