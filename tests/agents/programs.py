"""The agents: how each is run without a person, and what its model is to answer."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tests.agents import alone, page
from tests.agents.played import MAX_CONTEXT, Call, Script
from tests.agents.recorder import Recorder, Request
from tests.cluster.servers import ROOT

NPM = ROOT / ".npm-agents" / "node_modules" / ".bin"
AIDER = ROOT / ".venv-aider" / "bin"
SDKS = ROOT / ".venv-agents" / "bin"
SECONDS = 300.0

FILE = "hello.txt"
CONTENT = "hello\n"
ANSWER = "The file is there."
THOUGHT = "The user wants a file."
# The examples of docs/agents.md have it as well.
TASK = f"Write hello to {FILE}"

_PATCH = f"*** Begin Patch\n*** Add File: {FILE}\n+hello\n*** End Patch"
_CODE = f'text((await tools.exec_command({{cmd: "echo hello > {FILE}"}})).output)'
_WHOLE_FILE = f"{FILE}\n```\n{CONTENT}```\n"


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent: its section in docs/agents.md, and the folder of its program.

    command does the task without asking, and `script` is what the model answers, given the work
    folder. In spite of its configuration, the agent looks up hosts whose names begin with
    looked_up_prefix, unless that is empty. model is the name that the server has for the model, and
    changes are made to the section's texts.
    """

    name: str
    section: str
    bin: Path
    command: tuple[str, ...]
    script: Callable[[Path], Script]
    looked_up_prefix: str = ""
    model: str = page.MODEL
    changes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left: what the agent printed, its requests, and all that the server answered."""

    returncode: int
    output: str
    requests: list[Request]
    received: str
    reached: frozenset[str]
    folder: Path


def calls(name: str, arguments: Callable[[Path], dict[str, str]]) -> Callable[[Path], Script]:
    return lambda folder: Script(ANSWER, [Call(name, arguments(folder))])


def thinking(agent: Agent) -> Agent:
    """The agent with a model that thinks before it calls and before it answers."""

    def script(folder: Path) -> Script:
        return replace(agent.script(folder), thought=THOUGHT)

    return replace(agent, name=f"{agent.name}-thinking", script=script)


def _smolagents(_: Path) -> Script:
    """Its answer is a call, too, and results are a user's messages."""
    write = Call("write_file", {"path": FILE, "content": CONTENT})
    return Script(
        ANSWER,
        [write, Call("final_answer", {"answer": ANSWER})],
        result="<|im_start|>user\nObservation:",
    )


_CODEX = Agent(
    "codex",
    "Codex CLI",
    NPM,
    (
        *("codex", "exec", "--skip-git-repo-check"),
        *("--dangerously-bypass-approvals-and-sandbox", TASK),
    ),
    calls("exec_command", lambda folder: {"cmd": f"echo hello > {folder / FILE}"}),
)
_CLAUDE = Agent(
    "claude-code",
    "Claude Code",
    NPM,
    ("claude", "-p", TASK, "--allowedTools", "Write"),
    calls("Write", lambda folder: {"file_path": str(folder / FILE), "content": CONTENT}),
)
_QWEN = Agent(
    "qwen-code",
    "qwen-code",
    NPM,
    ("qwen", "--approval-mode", "yolo", "-p", TASK),
    calls("write_file", lambda folder: {"file_path": str(folder / FILE), "content": CONTENT}),
)
_OPENCODE = Agent(
    "opencode",
    "opencode",
    NPM,
    ("opencode", "run", TASK),
    calls("write", lambda folder: {"content": CONTENT, "filePath": str(folder / FILE)}),
    "registry.",
)
_AIDER = Agent(
    "aider",
    "aider",
    AIDER,
    ("aider", "--no-git", "--yes-always", "--message", TASK, FILE),
    lambda _: Script(_WHOLE_FILE + ANSWER),
)
_OPENAI_AGENTS = Agent(
    "openai-agents",
    "OpenAI Agents SDK",
    SDKS,
    ("python", "program.py"),
    calls("write_file", lambda _: {"path": FILE, "content": CONTENT}),
)
_SMOLAGENTS = Agent("smolagents", "smolagents", SDKS, ("python", "program.py"), _smolagents)

AGENTS = [_CODEX, _CLAUDE, _QWEN, _OPENCODE, _AIDER, _OPENAI_AGENTS, _SMOLAGENTS]

# What the same agents send to other models, or with other settings.
VARIANTS = [
    *map(thinking, (_CODEX, _CLAUDE, _QWEN, _OPENCODE)),
    # These names are known to Codex: it has other tools for them, some of which take free text.
    replace(
        _CODEX,
        name="codex-gpt-5.5",
        model="gpt-5.5",
        script=calls("apply_patch", lambda _: {"input": _PATCH}),
    ),
    replace(
        _CODEX,
        name="codex-gpt-6-sol",
        model="gpt-6-sol",
        script=calls("exec", lambda _: {"input": _CODE}),
    ),
    # It thinks with a budget of tokens.
    replace(_CLAUDE, name="claude-code-sonnet-4-5", model="claude-sonnet-4-5"),
    replace(
        _CLAUDE,
        name="claude-code-no-thinking",
        changes={"export ANTHROPIC_MODEL": "export MAX_THINKING_TOKENS=0 ANTHROPIC_MODEL"},
    ),
    replace(
        _OPENAI_AGENTS,
        name="openai-agents-chat",
        changes={
            "set_tracing_disabled(": 'set_default_openai_api("chat_completions")\n'
            "set_tracing_disabled(",
            "import Agent,": "import set_default_openai_api, Agent,",
        },
    ),
]


def run(agent: Agent, port: int, folder: Path) -> Outcome:
    """Runs the agent in a home and a work folder of its own below folder, against the server at
    port."""
    home, work, seen = folder / "home", folder / "work", folder / "seen"
    work.mkdir(parents=True)
    with Recorder(port, folder) as recorder:
        script = _prepare(agent, home, work, f"http://127.0.0.1:{recorder.port}")
        command = ["bash", "-euc", script]
        if has_namespaces():
            words = (str(recorder.port), recorder.path, str(seen), *command)
            command = [*alone.NAMESPACE, sys.executable, alone.__file__, *words]
        returncode, output = _run(command, work, _environment(agent, home))
        reached = frozenset(seen.read_text().split()) if seen.exists() else frozenset()
        return Outcome(returncode, output, recorder.requests, recorder.received, reached, work)


@cache
def has_namespaces() -> bool:
    """Whether a process may have a network of its own: on Linux, mostly."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run([*alone.NAMESPACE, "true"], capture_output=True).returncode == 0


def _prepare(agent: Agent, home: Path, work: Path, url: str) -> str:
    """Writes the files of the agent's section, and returns the shell script that runs it."""

    def adapted(text: str) -> str:
        # The model of the tests writes more tokens for the same text than others do.
        text = text.replace(page.URL, url).replace(page.CONTEXT, str(MAX_CONTEXT))
        for before, after in changes.items():
            text = text.replace(before, after)
        return text

    changes = {page.MODEL: agent.model, **agent.changes}
    section = page.section(agent.section)
    for path, text in section.files.items():
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(adapted(text))
    home.mkdir(exist_ok=True)
    if section.program:
        (work / "program.py").write_text(adapted(section.program))
        return f"exec {shlex.join(agent.command)}"
    *exports, name = adapted(section.shell).splitlines()
    assert name == agent.command[0]
    return "\n".join([*exports, f"exec {shlex.join(agent.command)}"])


def _environment(agent: Agent, home: Path) -> dict[str, str]:
    """Nothing of this machine's settings. A proxy that is not there keeps an agent from others
    where it has no network of its own."""
    environment = {
        "PATH": f"{agent.bin}:{os.environ['PATH']}",
        "HOME": str(home),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
    }
    if not has_namespaces():
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
        environment |= {**proxies, "NO_PROXY": "127.0.0.1"}
    return environment


def _run(command: list[str], work: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit status and what was printed. Everything that it started is gone then."""
    process = subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\n(not done after {SECONDS:g} s)"
    return process.returncode, output
