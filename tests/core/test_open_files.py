"""The limit of open files. It belongs to a process, so each case has one of its own."""

import re
import resource
import subprocess
import sys

import pytest

from serve.core import open_files
from serve.core.addresses import Addresses
from serve.core.agent_messages import RunRank
from serve.core.wire import line

PROGRAM = """
import resource, sys
from serve.core.open_files import allow_files
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_files(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""

AGENT = """
import resource, sys
from launcher import agent
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.exit(agent.main())
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "allowed", "limit"),
    [
        (256, 4000, 2000, 2000, 2000),
        (256, 1000, 2000, 1000, 1000),
        (256, 256, 2000, 256, 256),
        (3000, 4000, 2000, 2000, 3000),
    ],
)
def test_limit_of_open_files_is_raised_as_far_as_the_system_allows(
    soft: int, hard: int, wanted: int, allowed: int, limit: int
) -> None:
    numbers = map(str, (soft, hard, wanted))
    command = [sys.executable, "-c", PROGRAM, *numbers]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [str(allowed), str(limit)]


def test_a_limit_that_macos_refuses_to_raise_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above kern.maxfilesperproc, macOS refuses although the hard limit is higher."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert open_files.allow_files(10**9) == 256


def test_a_rank_inherits_the_raised_limit_of_its_agent() -> None:
    """sshd of macOS starts the agent with 256."""
    words = ["-c", "import resource as r; print('limit', r.getrlimit(r.RLIMIT_NOFILE)[0])"]
    order = RunRank(0, 1, words, {}, Addresses(0, (), ()), "", "", 1.0)
    command = [sys.executable, "-c", AGENT, "token"]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(line(order) + "\n")
        agent.stdin.flush()
        output = agent.stdout.read()
    (limit,) = re.findall(r"^limit (\d+)$", output, re.MULTILINE)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(limit) == min(open_files.NUM_FILES, hard)
