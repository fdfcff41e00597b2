"""The events of a request, as the engine puts them."""

import asyncio

import pytest

from serve.core.errors import EngineError, RequestCancelledError
from serve.core.types import Event, Sampling, Sequence
from serve.front.pipeline.generation import Generation
from tests.errors import fails
from tests.front.pipeline.simulation import Pipeline, make_sequence


def test_an_error_is_raised_after_the_events_before_it() -> None:
    generation = Generation([Sequence(3, [1], 4, Sampling(), frozenset())], lambda _: None)
    seen = []

    async def run() -> None:
        generation.put(Event(3, 7))
        generation.put(EngineError("It broke."))
        generation.put(Event(3, 8))
        async for number, event in generation:
            seen.append((number, event.token))

    with fails(EngineError, "engine"):
        asyncio.run(run())
    assert seen == [(0, 7)]


def test_progress_counts_a_prompt_with_several_answers_only_once() -> None:
    """Two answers to one prompt and one to another, through the scheduler."""
    pipeline = Pipeline(2, prefill_chunk=8)
    first = make_sequence(1, 60, 4)
    copy = make_sequence(2, 60, 4)
    copy.original = first
    other = make_sequence(3, 40, 4)
    generation = Generation([first, copy, other], lambda _: None)
    for sequence in (first, copy, other):
        pipeline.add(sequence)
    seen = [generation.progress]
    for _ in range(20):
        pipeline.tick()
        seen.append(generation.progress)
    pipeline.run()
    assert {total for _, total in seen} == {100}
    done = [number for number, _ in seen]
    assert done[0] == 0
    assert done == sorted(done)
    assert len(set(done)) > 6
    assert generation.progress == (100, 100)


def test_progress_decreases_if_a_prompt_begins_again() -> None:
    pipeline = Pipeline(2, prefill_chunk=8)
    sequence = make_sequence(1, 60, 4)
    generation = Generation([sequence], lambda _: None)
    pipeline.add(sequence)
    for _ in range(6):
        pipeline.tick()
    assert generation.progress[0] > 0
    pipeline.kill()
    assert generation.progress == (0, 60)
    pipeline.run()
    assert generation.progress == (60, 60)


def test_phases_of_a_sequence_go_from_waiting_to_decoding() -> None:
    pipeline = Pipeline(2, prefill_chunk=8)
    sequence = make_sequence(1, 60, 4)
    generation = Generation([sequence], lambda _: None)
    assert generation.phase == "waiting"
    pipeline.add(sequence)
    phases = []
    while not sequence.output:
        pipeline.tick()
        phases.append(generation.phase)
    assert phases[0] == "prefill"
    assert phases[-1] == "decode"
    pipeline.kill()
    assert generation.phase == "waiting"


def test_cancelling_ends_all_sequences_of_a_request() -> None:
    dropped: list[int] = []
    sequences = [Sequence(id, [1], 4, Sampling(), frozenset()) for id in (3, 4)]
    generation = Generation(sequences, dropped.append)
    generation.put(Event(3, 7))
    generation.cancel(RequestCancelledError())
    assert dropped == [3, 4]

    async def read() -> list[int | None]:
        return [event.token async for _, event in generation]

    with pytest.raises(RequestCancelledError):
        asyncio.run(read())
