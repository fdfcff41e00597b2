"""docs/agents.md has a section for each agent, with the version that is tested."""

import json

import pytest

from tests.agents import page
from tests.agents.programs import AGENTS, TASK, Agent
from tests.cluster.servers import ROOT

FOLDER = ROOT / "tests" / "agents"
PACKAGES = {
    "codex": "@openai/codex",
    "claude-code": "@anthropic-ai/claude-code",
    "qwen-code": "@qwen-code/qwen-code",
    "opencode": "opencode-ai",
    "aider": "aider-chat",
    "openai-agents-chat": "openai-agents",
}


def versions() -> dict[str, str]:
    """Package -> the version that scripts/check installs."""
    found = json.loads((FOLDER / "npm" / "package.json").read_text())["dependencies"]
    for name in ("sdks.txt", "aider.txt"):
        lines = (FOLDER / name).read_text().splitlines()
        found |= dict(line.split(" ;")[0].split("==") for line in lines if "==" in line)
    return dict(found)


@pytest.mark.parametrize("agent", AGENTS, ids=[agent.name for agent in AGENTS])
def test_page_about_agents_gives_the_tested_version_and_command(agent: Agent) -> None:
    section = page.section(agent.section)
    assert section.version == versions()[PACKAGES.get(agent.name, agent.name)]
    written = section.shell + section.program + "".join(section.files.values())
    assert page.URL in written
    assert page.MODEL in written
    if section.program:
        assert TASK in section.program
    else:
        assert section.shell.splitlines()[-1] == agent.command[0]


def test_page_about_agents_starts_the_server_under_the_name_that_agents_ask_for() -> None:
    introduction = page.PAGE.read_text().split("\n## ")[0]
    assert f"--served-model-name {page.MODEL}" in introduction
