"""A server that streams with known delays, or fails in known ways."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.ports import free_ports

FIRST_SECONDS = 0.1
GAP_SECONDS = 0.02
TEMPLATE_TOKENS = 4


class Clock:
    """A clock for the client, which only the server's delays advance.

    The client reads it for each event, which tells the server that the event has arrived.
    """

    def __init__(self) -> None:
        self.seconds = 100.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.seconds


class StreamingServer:
    """bodies: what was asked. running and most_running: answers at the same time.

    A prompt has a token for each word and TEMPLATE_TOKENS more; each chunk of an answer holds
    tokens_per_chunk tokens. fault: what goes wrong with every answer of more than one token.
    Delays pass on the clock of the one client, if it has one. Answers of more than
    held_tokens tokens wait until num_held of them are running.
    """

    def __init__(
        self,
        tokens_per_chunk: int = 1,
        fault: str = "",
        clock: Clock | None = None,
        num_held: int = 0,
        held_tokens: int = 8,
    ) -> None:
        self.tokens_per_chunk, self.fault = tokens_per_chunk, fault
        self.clock = clock
        self.num_held, self.held_tokens = num_held, held_tokens
        self.bodies: list[dict[str, Any]] = []
        self.arrivals: list[float] = []
        self.running = self.most_running = 0

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "made-up"}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.arrivals.append(time.monotonic())
        self.bodies.append(body)
        if self.fault == "busy" and body["max_tokens"] > 1:
            error = {"error": {"message": "the queue is full", "type": "rate_limit_error"}}
            return JSONResponse(error, 429)
        return StreamingResponse(self.answer(body), media_type="text/event-stream")

    async def answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        fault = self.fault if body["max_tokens"] > 1 else ""
        words = len(body["messages"][-1]["content"].split())
        yield ": keepalive\n\n"
        num_reads = self.num_reads()
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await self.delay(FIRST_SECONDS, num_reads)
        while body["max_tokens"] > self.held_tokens and self.most_running < self.num_held:
            await asyncio.sleep(0.001)
        for i in range(0, body["max_tokens"], self.tokens_per_chunk):
            if i:
                await self.delay(GAP_SECONDS, num_reads)
            num_reads = self.num_reads()
            yield event({"choices": [{"delta": {"content": " word"}}]})
            if fault == "error":
                yield event({"error": {"message": "a rank was lost"}})
        yield event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": words + TEMPLATE_TOKENS, "completion_tokens": body["max_tokens"]}
        yield event({"choices": [], "usage": usage})
        self.running -= 1
        if fault != "cut":
            yield "data: [DONE]\n\n"

    def num_reads(self) -> int:
        return 0 if self.clock is None else self.clock.num_reads

    async def delay(self, seconds: float, num_reads: int) -> None:
        """With a clock: num_reads is how often it was read before the latest event was sent."""
        if self.clock is None:
            await asyncio.sleep(seconds)
            return
        while self.clock.num_reads == num_reads:
            await asyncio.sleep(0.001)
        self.clock.seconds += seconds


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


@contextmanager
def streaming(**options: Any) -> Iterator[tuple[str, StreamingServer]]:
    """Its URL, and what it saw."""
    state = StreamingServer(**options)
    app = Starlette(
        routes=[
            Route("/v1/models", state.models),
            Route("/v1/chat/completions", state.chat, methods=["POST"]),
        ]
    )
    port = free_ports(1)[0]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}", state
    finally:
        server.should_exit = True
        thread.join(60)
