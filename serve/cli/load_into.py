"""Loads a new adapter into a running server: `fine-tune --load-into`, and the equivalent curl
command."""

import json
import os
import re
import shlex
from pathlib import Path

from serve.client import Client, NoAnswerError
from serve.core.errors import BrigadeError, ClusterError, UsageError

_PATH = "/v1/load_lora_adapter"
_SECONDS = 60.0
_SERVER = re.compile(r"https?://[^/?#@\s]+/?")
_ABSENT = "asked-before-training"  # the name of a folder that no run makes
# The server asks for an API key if it has no admin key.
_KEYS = ("BRIGADE_ADMIN_KEY", "BRIGADE_API_KEY")


def curl_line(url: str, folder: Path, name: str) -> str:
    words = ["curl", url.rstrip("/") + _PATH, "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", json.dumps(_body(folder, name))])
    # The variable is in double quotes: the shell inserts the key, which is not shown here.
    key = _key()
    return line + (f' -H "Authorization: Bearer ${key}"' if key else "")


def check_server(url: str, folder: Path, name: str) -> None:
    """Raises UsageError unless the server at url would load an adapter called name from folder."""
    if not _SERVER.fullmatch(url):
        raise UsageError(f"--load-into {url!r} is not http://HOST:PORT.", code="malformed")
    _call(url, "/v1/lora_adapters", None, UsageError)
    # The server checks the name and the path before it looks for the files.
    absent = _body(folder / _ABSENT, name)
    _call(url, _PATH, absent, UsageError, expected=404)


def load_into(url: str, folder: Path, name: str) -> str:
    """Makes a server load the adapter, and returns its answer. Raises ClusterError."""
    try:
        return _call(url, _PATH, _body(folder, name), ClusterError)
    except ClusterError as error:
        again = curl_line(url, folder, name)
        raise ClusterError(f"{error} The adapter is in {folder}; to try again:\n{again}") from error


def adapter_name(folder: Path) -> str:
    """Derives an adapter name that a server accepts from the name of the run's folder."""
    return re.sub(r"[^\w.:@-]|^\W", "-", folder.resolve().name, flags=re.ASCII).lstrip("-_") or "a"


def _key() -> str | None:
    """Returns the name of the environment variable that contains the key to send."""
    return next((name for name in _KEYS if name in os.environ), None)


def _body(folder: Path, name: str) -> dict[str, object]:
    return {
        "lora_name": name,
        "lora_path": str(folder.resolve()),
        "load_inplace": True,
    }


def _call(
    url: str,
    path: str,
    body: dict[str, object] | None,
    kind: type[BrigadeError],
    expected: int | None = None,
) -> str:
    """Returns a server's answer. Raises kind for every error status except expected."""
    variable = _key()
    client = Client(url, os.environ[variable] if variable else None)
    try:
        status, said = client.call(path, body, _SECONDS)
    except NoAnswerError as error:
        mend = "start `brigade serve` there, or give its URL"
        raise kind(f"--load-into {url} does not answer ({error}): {mend}.") from error
    if status >= 300 and status != expected:
        reason = _message(said).replace(f"/{_ABSENT}", "")  # The user knows only its parent.
        raise kind(f"--load-into {url} answered {status}: {reason}")
    return said


def _message(said: str) -> str:
    try:
        return str(json.loads(said)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return said[:200]
