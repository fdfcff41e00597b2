"""An agent that is ended in the middle of a call leaves nothing behind."""

import json
from collections.abc import Callable
from itertools import islice

import httpx2
import pytest

from serve.front.text.tokens import Tokenizer
from tests.agents import shapes
from tests.agents.played import MAX_CONTEXT, Call, PlayedEngine
from tests.front.fakes import CONFIG, Running

TEXT = "word " * 200
CALLS = {
    "codex": Call("exec_command", {"cmd": TEXT}),
    "claude-code": Call("Write", {"file_path": "a", "content": TEXT}),
    "qwen-code": Call("write_file", {"file_path": "a", "content": TEXT}),
}


@pytest.mark.parametrize("agent", CALLS)
def test_an_agent_that_disconnects_during_a_call_frees_its_rows(
    played_tokenizer: Tokenizer, agent: str
) -> None:
    def play(prompt: str, is_allowed: Callable[[str], bool]) -> str:
        return next(filter(is_allowed, CALLS[agent].forms()))

    engine = PlayedEngine(played_tokenizer, play)
    engine.delay = 0.01
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
