"""A running server gets a new adapter: `fine-tune --load-into`, and the same as a curl line."""

import json
import os
import re
import shlex
import urllib.error
import urllib.request
from pathlib import Path

from serve.core.errors import BrigadeError, ClusterError, UsageError

_PATH = "/v1/load_lora_adapter"
_SECONDS = 60.0
_SERVER = re.compile(r"https?://[^/?#@\s]+/?")
_ABSENT = "asked-before-training"  # no folder that a run makes
# The server asks for an API key if it has no admin key.
_KEYS = ("BRIGADE_ADMIN_KEY", "BRIGADE_API_KEY")


def curl_line(url: str, folder: Path, name: str) -> str:
    words = ["curl", url.rstrip("/") + _PATH, "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", json.dumps(_body(folder, name))])
    # Double quotes: the shell puts the key in, and nobody reads it here.
    key = _key()
    return line + (f' -H "Authorization: Bearer ${key}"' if key else "")


def check_server(url: str, folder: Path, name: str) -> None:
    """Raises UsageError if no server is there that would take an adapter of this name from below
    this folder."""
    if not _SERVER.fullmatch(url):
        raise UsageError(f"--load-into {url!r} is not http://HOST:PORT.")
    _call(url, "/v1/lora_adapters", None, UsageError)
    # The server looks at the name and at where the path lies before it looks for what is there.
    absent = _body(folder / _ABSENT, name)
    _call(url, _PATH, json.dumps(absent).encode(), UsageError, expected=404)


def load_into(url: str, folder: Path, name: str) -> str:
    """Has a server load the adapter, and returns its answer. Raises ClusterError; the trained
    adapter is on disk in any case."""
    try:
        return _call(url, _PATH, json.dumps(_body(folder, name)).encode(), ClusterError)
    except ClusterError as error:
        again = curl_line(url, folder, name)
        raise ClusterError(f"{error} The adapter is in {folder}; to try again:\n{again}") from error


def adapter_name(folder: Path) -> str:
    """Derives an adapter name that a server accepts from the name of the run's folder."""
    return re.sub(r"[^\w.:@-]|^\W", "-", folder.resolve().name, flags=re.ASCII).lstrip("-_") or "a"


def _key() -> str | None:
    """The variable that holds the key to send."""
    return next((name for name in _KEYS if name in os.environ), None)


def _body(folder: Path, name: str) -> dict[str, object]:
    return {"lora_name": name, "lora_path": str(folder.resolve()), "load_inplace": True}


def _call(
    url: str, path: str, data: bytes | None, kind: type[BrigadeError], expected: int | None = None
) -> str:
    """Sends a request and returns the server's answer. Raises an error of the given kind for any
    error status other than the expected one."""
    headers = {"Content-Type": "application/json"}
    key = _key()
    if key:
        headers["Authorization"] = f"Bearer {os.environ[key]}"
    request = urllib.request.Request(url.rstrip("/") + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        if error.code == expected:
            return said
        raise kind(f"--load-into {url} answers {error.code}: {_message(said)}") from error
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)  # of a URLError
        reason = getattr(cause, "strerror", None) or cause
        mend = "start `brigade serve` there, or give its URL"
        raise kind(f"--load-into {url} does not answer ({reason}): {mend}.") from error


def _message(said: str) -> str:
    try:
        return str(json.loads(said)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return said[:200]
