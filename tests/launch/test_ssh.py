"""Command lines of ssh, and what its words mean to a person."""

import shutil
import subprocess
import sys

import pytest

from launcher.command import check_variable, forwarded
from launcher.ssh import meaning, ssh_command
from serve.core.errors import UsageError

PYTHON = "/opt/brigade/bin/python"


def test_ssh_gets_the_users_flags_first_and_the_host_before_the_command() -> None:
    words = ssh_command(["ssh", "-F", "f"], "studio", [PYTHON, "-m", "launcher.agent", "t"])
    assert words[:3] == ["ssh", "-F", "f"]
    assert words[-2:] == ["studio", f"exec {PYTHON} -m launcher.agent t"]
    assert "BatchMode=yes" in words
    assert "ControlPath=none" in words


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish"])
def test_every_login_shell_passes_the_arguments_on_unchanged(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    program = "import sys; print(sys.argv[1:])"
    odd = ["a b", "$HOME", "`id`", "it's", '"', "*", "é"]
    remote = ssh_command(["ssh"], "h", [sys.executable, "-c", program, *odd])[-1]
    run = subprocess.run([shell, "-c", remote], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(odd)


@pytest.mark.parametrize(
    ("said", "reason", "fix"),
    [
        ("me@studio: Permission denied (publickey,password).", "password", "ssh-copy-id studio"),
        ("Host key verification failed.", "not known", "run `ssh studio` once"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "host key has changed",
            "ssh-keygen -R studio",
        ),
        (
            "ssh: Could not resolve hostname studio: Name or service not known",
            "cannot be resolved",
            "~/.ssh/config",
        ),
        ("ssh: connect to host studio port 22: Connection refused", "no ssh", "Remote Login"),
        ("ssh: connect to host studio port 22: Operation timed out", "reached", "is it on"),
        ("ssh: connect to host studio port 22: No route to host", "reached", "Local Network"),
        (f"{PYTHON}: No module named launcher", f"{PYTHON} there has no", "--python"),
        (f"bash: line 1: {PYTHON}: No such file or directory", "does not exist there", "--python"),
        (f"zsh:1: no such file or directory: {PYTHON}\n", "does not exist there", "--python"),
        (f"sh: 1: exec: {PYTHON}: not found", "does not exist there", "--python"),
        (f"bash: {PYTHON}: Permission denied", "does not exist there", "--python"),
        ("Welcome!\nkex: what", "ssh reported 'kex: what'", "try `ssh studio`"),
        ("", "it hung up", "try `ssh studio`"),
    ],
)
def test_messages_of_ssh_are_explained_with_a_reason_and_a_fix(
    said: str, reason: str, fix: str
) -> None:
    what, what_to_do = meaning(said, ["ssh"], "studio", PYTHON)
    assert reason in what
    assert fix in what_to_do
    assert "\n" not in what + what_to_do


@pytest.mark.parametrize(
    "said", ["Permission denied (publickey).", "Host key verification failed.", ""]
)
def test_the_fix_names_the_ssh_command_that_was_used(said: str) -> None:
    _, what_to_do = meaning(said, ["ssh", "-F", "my config"], "studio", PYTHON)
    assert "`ssh -F 'my config' studio`" in what_to_do


def test_paths_and_variables_of_the_ring_are_not_sent_to_other_hosts() -> None:
    kept = {"HF_TOKEN": "t", "MLX_X": "1", "BRIGADE_API_KEY": "k", "LC_ALL": "C", "TZ": "UTC"}
    left = {
        **{"PATH": "/bin", "HOME": "/root", "HF_HOME": "/cache", "LD_PRELOAD": "x.so"},
        **{"PYTHONPATH": "/here", "SSH_AUTH_SOCK": "/s", "AWS_SECRET_ACCESS_KEY": "s"},
        **{"MLX_RANK": "3", "MLX_HOSTFILE": "h", "BRIGADE_SECRET": "s", "BRIGADE_LEASH": "4"},
    }
    assert forwarded({**kept, **left}) == kept


def test_variables_are_split_at_the_first_equals_sign() -> None:
    assert check_variable("A_1=b=c", "--env") == ("A_1", "b=c")
    assert check_variable("A=", "--env") == ("A", "")


@pytest.mark.parametrize("word", ["", "A", "=b", "a-b=1", "é=1", "A\0=1", "A=\0", "MLX_RANK=1"])
def test_a_word_that_assigns_no_variable_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--env"):
        check_variable(word, "--env")
