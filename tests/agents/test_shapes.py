"""What agents were seen to send is accepted. The agents themselves are not needed here.

`tests/agents/test_agents.py` records the shapes when BRIGADE_RECORD_SHAPES=1 is set. Those of
interactive sessions (titles, compaction, token counts) were recorded by hand, in a terminal.
"""

import json
from typing import Any

import httpx2
import pytest

from tests.agents import shapes
from tests.agents.conftest import TITLE
from tests.front.fakes import CONFIG, Running

AGENTS = sorted(path.stem for path in shapes.FOLDER.glob("*.json"))


CASES = [
    pytest.param(shape, id=f"{agent}-{number}")
    for agent in AGENTS
    for number, shape in enumerate(shapes.read(agent), 1)
]


@pytest.mark.parametrize("shape", CASES)
def test_a_request_recorded_from_an_agent_is_answered(
    front: Running, shape: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    content = json.dumps(shape["body"]).replace('"MODEL"', f'"{CONFIG.model_name}"')
    headers = {"content-type": "application/json", **shape["headers"]}
    reply = httpx2.post(front.url + shape["path"], content=content, headers=headers)
    assert reply.status_code == 200, reply.text
    assert "event=tools_unchecked" not in caplog.text  # A grammar holds for all of its tools.
    if shape["body"].get("stream"):
        assert reply.headers["content-type"].startswith("text/event-stream")
        check_stream(shape["path"], events(reply.text))
    elif shape["path"].startswith("/v1/messages/count_tokens"):
        assert reply.json()["input_tokens"] > 0
    else:
        assert "Done." in reply.text


def events(text: str) -> list[Any]:
    """The data of server-sent events, in their order."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def check_stream(path: str, stream: list[Any]) -> None:
    """It has the text, no error, and the last event of its API."""
    if path.startswith("/v1/responses"):
        assert stream[-1]["type"] == "response.completed"
        assert stream[-1]["response"]["output"][-1]["content"][0]["text"] in ("Done.", TITLE)
    elif path.startswith("/v1/messages"):
        assert stream[-1]["type"] == "message_stop"
        deltas = [event["delta"] for event in stream if event["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == "Done."
    else:
        choices = [choice for event in stream for choice in event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert (text, choices[-1]["finish_reason"]) in (("Done.", "stop"), ("", "tool_calls"))
