"""Real agents, configured as docs/agents.md says, answer a question and write a file.

`scripts/check` installs them. With BRIGADE_RECORD_SHAPES=1, what they send becomes the shapes that
test_shapes.py sends. With BRIGADE_AGENTS_MODEL, the folder of a model, two ranks serve that one.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.front.text.tokens import Tokenizer
from tests.agents import page, programs, shapes
from tests.agents.played import MAX_CONTEXT, PlayedEngine
from tests.agents.programs import AGENTS, ANSWER, CONTENT, FILE, VARIANTS, Agent, Outcome
from tests.cluster.servers import TINY_CHAT, Server, brigade_launch, serve_flags, started
from tests.front.fakes import Running
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

every_agent = pytest.mark.parametrize("agent", AGENTS, ids=[agent.name for agent in AGENTS])
every_variant = pytest.mark.parametrize(
    "agent", [*AGENTS, *VARIANTS], ids=[agent.name for agent in (*AGENTS, *VARIANTS)]
)


@pytest.fixture(autouse=True)
def _installed(agent: Agent) -> None:
    if agent.bin == programs.NPM and not shutil.which("npm"):
        pytest.skip("node and npm are not installed: agents from npm are not tested here")
    if agent.bin == programs.AIDER and sys.version_info >= (3, 13):
        pytest.skip("aider does not install on this Python")
    assert agent.bin.exists(), f"There is no {agent.bin}: run scripts/check, which makes it."


@every_variant
def test_an_agent_calls_its_tool_and_ends(
    played_tokenizer: Tokenizer, agent: Agent, tmp_path: Path
) -> None:
    script = agent.script(tmp_path / "work")
    engine = PlayedEngine(played_tokenizer, script, agent.model)
    with Running(engine, max_context=MAX_CONTEXT, served_model_name=agent.model) as server:
        outcome = programs.run(agent, server.port, tmp_path)
    check_no_error(outcome)
    assert (outcome.folder / FILE).read_text() == CONTENT
    assert ANSWER in outcome.output
    prompts = [played_tokenizer.decode(ids) for ids in engine.prompts]
    assert any(script.thought in prompt for prompt in prompts)  # Thoughts come back.
    for host in outcome.reached:
        assert agent.looked_up_prefix, host
        assert host.startswith(agent.looked_up_prefix)
    if os.environ.get("BRIGADE_RECORD_SHAPES"):
        shapes.write(agent.name, shapes.shapes_of(outcome.requests, agent.model))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two ranks with a context that the agents' prompts fit into."""
    folder = tmp_path_factory.mktemp("model")
    port = free_ports(1)[0]
    flags = serve_flags(port, long_context(folder), "--served-model-name", page.MODEL)
    with started(brigade_launch(2, flags), port) as server:
        server.wait_until_ready()
        yield server


# Small models read little, and slowly: they get the ends of the texts, and no tools.
ENDS_ONLY = """\
{%- set short = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- set short.messages = short.messages + [dict(message, content=content[-100:])] -%}
{%- endfor -%}
{%- set messages = short.messages -%}
{%- set tools = none -%}
"""


def long_context(folder: Path) -> Path:
    """A copy of the model, or of the embedded one, with a longer context and a shorter prompt."""
    model = Path(os.environ.get("BRIGADE_AGENTS_MODEL") or TINY_CHAT)
    for file in model.glob("*.*"):
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    template = tokenizer.pop("chat_template", None) or (model / "chat_template.jinja").read_text()
    changed = {
        "config.json": json.dumps(config | {"max_position_embeddings": MAX_CONTEXT}),
        "tokenizer_config.json": json.dumps(tokenizer | {"model_max_length": MAX_CONTEXT}),
        "chat_template.jinja": ENDS_ONLY + template,
    }
    for name, text in changed.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text)
    return folder


@every_agent
def test_an_agent_gets_answers_without_errors_from_two_real_ranks(
    real: Server, agent: Agent, tmp_path: Path
) -> None:
    """What a tiny model says does not matter: it has to arrive, and nothing may fail."""
    check_no_error(programs.run(agent, real.port, tmp_path))
    assert "Traceback" not in real.text


def check_no_error(outcome: Outcome) -> None:
    """The agent was content, it streamed, and the server never answered with an error."""
    print(outcome.output)
    assert outcome.returncode == 0
    statuses = [line for line in outcome.received.splitlines() if line.startswith("HTTP/1.1 ")]
    assert set(statuses) == {"HTTP/1.1 200 OK"}
    assert "text/event-stream" in outcome.received
    for error in ('"type":"error"', '"response.failed"', 'data: {"error"'):
        assert error not in outcome.received
