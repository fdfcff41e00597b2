"""Clients of others, in an environment of their own (`scripts/check` makes it): what they need
must not hold back Brigade's versions, and they must not see its code."""

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.servers import ROOT, Server, running

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SUITES = Path(__file__).parent / "suites"
SECONDS = 400

PYTEST = ["pytest", "-c", str(SUITES / "pytest.ini"), "--rootdir", str(SUITES)]

Run = Callable[[Server, Sequence[str]], str]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(2) as running_server:
        yield running_server


def environment(server: Server) -> dict[str, str]:
    return {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
        "PYTHONPATH": str(SUITES),
        "DO_NOT_TRACK": "1",
    }


@pytest.fixture(scope="session")
def client_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs `python -m …` of the clients' environment against a server; its output."""
    if not PYTHON.exists():
        pytest.fail("There is no .venv-clients: run scripts/check, which makes it.")

    folder = tmp_path_factory.mktemp("clients")

    def run(server: Server, arguments: Sequence[str]) -> str:
        done = subprocess.run(
            [str(PYTHON), "-m", *arguments],
            cwd=folder,
            env=environment(server),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        print(done.stdout)
        assert done.returncode == 0
        return done.stdout

    return run
