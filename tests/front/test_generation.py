"""The events of a request, as the engine puts them."""

import asyncio

import pytest

from serve.core.errors import EngineError
from serve.core.types import Event, Sampling, Sequence
from serve.front.pipeline.generation import Generation


def test_an_error_comes_after_the_events_before_it() -> None:
    generation = Generation([Sequence(3, [1], 4, Sampling(), frozenset())], lambda _: None)
    told = []

    async def run() -> None:
        generation.put(Event(3, 7))
        generation.put(EngineError("It broke."))
        generation.put(Event(3, 8))
        async for number, event in generation:
            told.append((number, event.token))

    with pytest.raises(EngineError, match="broke"):
        asyncio.run(run())
    assert told == [(0, 7)]
