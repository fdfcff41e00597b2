"""The stream of events: who gets which frames, and what it costs when nobody reads."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from serve.core.errors import OverloadedError
from serve.core.messages import Span
from serve.front.pipeline.status import StageSpan
from serve.front.routes import watching
from serve.front.routes.watching import MAX_FRAMES, MAX_WATCHERS, Watchers

TIME = 4e9  # later than any clock of this test


class Observed:
    """A state that a test changes, and a count of how often it was looked at."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {"a": 1, "b": [1]}
        self.spans: list[StageSpan] = []
        self.samples: list[Any] = []
        self.num_looks = 0

    def observe(self) -> dict[str, Any]:
        self.num_looks += 1
        return dict(self.sections)

    def spans_after(self, numbers: Mapping[int, int], _: float) -> list[StageSpan]:
        found = [span for span in self.spans if span.number > numbers.get(span.rank, 0)]
        return list(reversed(found))

    def add_span(self, rank: int, num_rows: int = 1) -> None:
        number = 1 + sum(span.rank == rank for span in self.spans)
        span = Span(number, 0, num_rows, num_rows, TIME, TIME + 1)
        self.spans.append(StageSpan(rank, number, span, (7,) * num_rows))


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Observed:
    monkeypatch.setattr(watching, "PERIOD_SECONDS", 0.001)
    return Observed()


def run(observed: Observed, test: Callable[[Watchers], Coroutine[Any, Any, None]]) -> None:
    async def around() -> None:
        watchers = Watchers(observed.observe, observed.spans_after, lambda: observed.samples)
        await asyncio.wait_for(test(watchers), 60)

    asyncio.run(around())


def parsed(frame: bytes) -> dict[str, Any]:
    return json.loads(frame.removeprefix(b"data: "))


async def next_change(frames: Any, name: str) -> dict[str, Any]:
    """The next frame that has this section."""
    while name not in (frame := parsed(await anext(frames))):
        continue
    return frame


def test_a_watcher_gets_the_whole_state_and_then_only_changes(observed: Observed) -> None:
    async def test(watchers: Watchers) -> None:
        frames = watchers.frames(watchers.add())
        first = parsed(await anext(frames))
        assert first["kind"] == "state"
        assert (first["a"], first["b"]) == (1, [1])
        observed.sections["b"] = [2]
        changed = await next_change(frames, "b")
        assert changed["kind"] == "change"
        assert changed["b"] == [2]
        assert "a" not in changed

    run(observed, test)


def test_a_watcher_gets_each_span_once_and_no_span_without_rows(observed: Observed) -> None:
    async def test(watchers: Watchers) -> None:
        observed.add_span(0)
        frames = watchers.frames(watchers.add())
        assert [row[:2] for row in parsed(await anext(frames))["spans"]] == [[0, 1]]
        observed.add_span(1)
        observed.add_span(1, num_rows=0)
        observed.add_span(1)
        rows: list[list[Any]] = []
        while len(rows) < 2:
            rows += parsed(await anext(frames))["spans"]
        assert [row[:2] for row in rows] == [[1, 1], [1, 3]]
        assert rows[0][2:] == ["decode", 1, 1, TIME, TIME + 1, [7]]

    run(observed, test)


def test_a_watcher_that_comes_later_gets_the_whole_state_first(observed: Observed) -> None:
    async def test(watchers: Watchers) -> None:
        observed.add_span(0)
        frames = watchers.frames(watchers.add())
        await anext(frames)
        observed.sections["a"] = 2
        observed.add_span(0)
        await next_change(frames, "a")
        late = parsed(await anext(watchers.frames(watchers.add())))
        assert late["a"] == 2
        assert [row[1] for row in late["spans"]] == [1, 2]

    run(observed, test)


def test_a_watcher_gets_the_history_only_with_the_whole_state(observed: Observed) -> None:
    async def test(watchers: Watchers) -> None:
        observed.samples = [[1.0, 5.0]]
        frames = watchers.frames(watchers.add())
        assert parsed(await anext(frames))["history"] == [[1.0, 5.0]]
        assert "history" not in parsed(await anext(frames))
        observed.samples.append([2.0, 6.0])
        late = parsed(await anext(watchers.frames(watchers.add())))
        assert late["history"] == [[1.0, 5.0], [2.0, 6.0]]

    run(observed, test)


def test_the_state_is_observed_only_while_somebody_watches(observed: Observed) -> None:
    async def test(watchers: Watchers) -> None:
        await asyncio.sleep(0.02)
        assert not observed.num_looks
        watcher = watchers.add()
        frames = watchers.frames(watcher)
        for _ in range(3):
            await anext(frames)
        watchers.remove(watcher)
        await asyncio.sleep(0)
        num_looks = observed.num_looks
        await asyncio.sleep(0.02)
        assert observed.num_looks == num_looks

    run(observed, test)


def test_all_watchers_share_one_observation_of_the_state(observed: Observed) -> None:
    async def test(watchers: Watchers) -> None:
        readers = [watchers.frames(watchers.add()) for _ in range(8)]
        for frames in readers:
            await anext(frames)
        assert observed.num_looks == 1
        assert len({await anext(frames) for frames in readers}) == 1

    run(observed, test)


def test_a_slow_watcher_loses_frames_and_then_gets_the_whole_state(
    observed: Observed,
) -> None:
    async def test(watchers: Watchers) -> None:
        slow = watchers.add()
        slow_frames = watchers.frames(slow)
        frames = watchers.frames(watchers.add())
        await anext(slow_frames)
        for number in range(3 * MAX_FRAMES):
            observed.sections["a"] = 10 + number
            await next_change(frames, "a")
            assert slow.frames.qsize() <= MAX_FRAMES
        while not slow.is_behind:
            await anext(frames)
        caught_up = parsed(await anext(slow_frames))
        assert caught_up["kind"] == "state"
        assert caught_up["a"] == 9 + 3 * MAX_FRAMES
        observed.sections["a"] = "next"
        assert (await next_change(slow_frames, "a"))["kind"] == "change"

    run(observed, test)


def test_the_number_of_watchers_is_limited(observed: Observed) -> None:
    async def test(watchers: Watchers) -> None:
        some = [watchers.add() for _ in range(MAX_WATCHERS)]
        with pytest.raises(OverloadedError) as refused:
            watchers.add()
        assert refused.value.code == "too_many_watchers"
        watchers.remove(some[0])
        watchers.add()

    run(observed, test)


def test_streams_of_watchers_end_with_the_server(observed: Observed) -> None:
    async def test(watchers: Watchers) -> None:
        frames = watchers.frames(watchers.add())
        await anext(frames)
        watchers.close()
        assert [frame async for frame in frames] == []
        late = watchers.frames(watchers.add())
        assert [frame async for frame in late] == []

    run(observed, test)


def test_streams_of_watchers_end_if_observing_the_state_fails(observed: Observed) -> None:
    async def test(watchers: Watchers) -> None:
        frames = watchers.frames(watchers.add())
        await anext(frames)
        observed.sections = {"a": object()}
        left = [frame async for frame in frames]
        assert len(left) <= MAX_FRAMES
        observed.sections = {"a": 2}
        again = watchers.frames(watchers.add())
        assert parsed(await anext(again))["a"] == 2
        observed.sections["a"] = 3
        assert (await next_change(again, "a"))["a"] == 3

    run(observed, test)


def test_a_watcher_whose_first_observation_fails_is_not_counted(observed: Observed) -> None:
    def fail() -> dict[str, Any]:
        raise ZeroDivisionError

    async def test(_: Watchers) -> None:
        watchers = Watchers(fail, observed.spans_after, list)
        with pytest.raises(ZeroDivisionError):
            watchers.add()
        assert len(watchers) == 0

    run(observed, test)
