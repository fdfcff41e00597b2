"""An agent that is ended in the middle of a call leaves nothing behind."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import httpx2
import pytest

from serve.front.text.tokens import Tokenizer
from tests.agents import shapes
from tests.agents.played import MAX_CONTEXT, Call, PlayedEngine
from tests.front.fakes import CONFIG, Events, FakeGeneration, Running

TEXT = "word " * 200
CALLS = {
    "codex": Call("exec_command", {"cmd": TEXT}),
    "claude-code": Call("Write", {"file_path": "a", "content": TEXT}),
    "qwen-code": Call("write_file", {"file_path": "a", "content": TEXT}),
}


class HeldEngine(PlayedEngine):
    """Its answers have all tokens but the last two at once, and these never."""

    def submit(self, *given: Any, **named: Any) -> FakeGeneration:
        generation = super().submit(*given, **named)
        generation._events = self._held(generation, list(generation._events))
        return generation

    def _held(self, generation: FakeGeneration, events: Events) -> Iterator[Any]:
        for number, event in enumerate(events):
            if number == len(events) - 2:
                generation._delay = 600.0
            yield event


@pytest.mark.parametrize("agent", CALLS)
def test_an_agent_that_disconnects_during_a_call_frees_its_rows(
    played_tokenizer: Tokenizer, agent: str
) -> None:
    def play(prompt: str, is_allowed: Callable[[str], bool]) -> str:
        return next(filter(is_allowed, CALLS[agent].forms()))

    engine = HeldEngine(played_tokenizer, play)
    shape = shapes.read(agent)[0]
    content = json.dumps(shape["body"]).replace('"MODEL"', f'"{CONFIG.model_name}"')
    with Running(engine, max_context=MAX_CONTEXT) as server:
        url = server.url + shape["path"]
        headers = {"content-type": "application/json", **shape["headers"]}
        with httpx2.stream("POST", url, content=content, headers=headers) as reply:
            assert reply.status_code == 200
            events = (line for line in reply.iter_lines() if line.startswith("data:"))
            assert len(list(islice(events, 40))) == 40  # Most of them of the call's arguments.
            (generation,) = engine.generations
            assert not generation.closed.is_set()
        assert generation.closed.wait(60)
