"""Errors of the Hugging Face Hub: which of them may be temporary, and how to explain them.

huggingface_hub chooses the HTTP client (httpx or httpx2), from whose errors HfHubHTTPError derives.
"""

import json
import logging
import random
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from serve.core.errors import EngineError, ModelError


class HubError(ModelError):
    """The hub cannot be reached. The model is not at fault, and a later start may succeed."""

    exit_code = EngineError.exit_code
    code = "no_hub"


class Retry(Exception):
    """A failure that this package has detected. Another try may succeed."""

    def __init__(self, reason: str, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class NoNeighbour(Retry):
    """No neighbour gives what only a neighbour can give."""


class GatewayRefusal(Retry):
    """A neighbour got nothing from the hub. It has explained why, for the user."""


FAILURES: tuple[type[Exception], ...] = (
    Retry,
    *HfHubHTTPError.__bases__,
    EntryNotFoundError,
    HFValidationError,
)
"""All errors that a call of huggingface_hub or of its HTTP client raises, and Retry."""

# Errors that are explained by their type; subclasses come before their bases.
_REASONS = (
    (GatedRepoError, "licence", "{repo} is gated: accept its licence at {page} and set HF_TOKEN."),
    (RevisionNotFoundError, "not_on_hub", "{repo} has no such revision: see {page}."),
    (
        OfflineModeIsEnabled,
        "hub_offline",
        "{repo} is only partly in the cache, and HF_HUB_OFFLINE is set: unset it once, here or "
        "on a paired machine.",
    ),
    (
        LocalEntryNotFoundError,
        "no_hub",
        "{repo} is only partly in the cache, and {hub} cannot be reached.",
    ),
    (
        EntryNotFoundError,
        "missing_file",
        "{repo} lacks a required file: see {page}/tree/main.",
    ),
    (
        HFValidationError,
        "malformed",
        "{repo} is neither a folder here nor a name on the hub, such as OWNER/NAME.",
    ),
)
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_WAIT_SECONDS = 0.5
_MAX_WAIT_SECONDS = 30.0
_MAX_REQUESTED_WAIT_SECONDS = 300.0
_MAX_REASON_CHARACTERS = 200
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")

Result = TypeVar("Result")
_logger = logging.getLogger(__name__)


class Patience:
    """Limits the tries of one transfer since its last progress, and waits between them."""

    def __init__(
        self,
        repo: str,
        max_tries: int = 8,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._repo = repo
        self._max_tries = max_tries
        self._sleep = sleep
        self._num_tries = 0

    def renew(self) -> None:
        self._num_tries = 0

    def wait(self, error: Exception) -> None:
        """Sleeps before another try. Raises ModelError if no try is left or would help."""
        self._num_tries += 1
        if not _may_pass(error) or self._num_tries >= self._max_tries:
            raise explain(error, self._repo) from error
        seconds = self._seconds_before_retry(error)
        one_line = " ".join(str(error).split())
        reason = one_line[:_MAX_REASON_CHARACTERS] or type(error).__name__
        _logger.warning("event=hub_retry wait=%.1f reason=%s", seconds, json.dumps(reason))
        self._sleep(seconds)

    def _seconds_before_retry(self, error: Exception) -> float:
        requested = wait_before_retry(error)
        if requested is not None:
            return min(requested, _MAX_REQUESTED_WAIT_SECONDS)
        backoff: float = _FIRST_WAIT_SECONDS * 2 ** (self._num_tries - 1)
        return min(backoff * random.uniform(1, 1.25), _MAX_WAIT_SECONDS)


def patiently(repo: str, call: Callable[[], Result], max_tries: int = 8) -> Result:
    """Calls huggingface_hub until the call succeeds, max_tries times at most. Raises ModelError."""
    patience = Patience(repo, max_tries)
    while True:
        try:
            return call()
        except FAILURES as error:
            patience.wait(error)


def wait_seconds(headers: Mapping[str, str]) -> float | None:
    """Returns the wait that a server asks for: Retry-After, or the hub's RateLimit."""
    retry_after = headers.get("retry-after", "").strip()
    if retry_after.isdigit():
        return float(retry_after)
    limit = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(limit.group(1)) if limit else None


def explain(error: Exception, repo: str) -> ModelError:
    """Turns a failure into one line for the user, which says what is wrong and what to do."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    known = _by_type(error, repo)
    if known is not None:
        return known
    if isinstance(error, GatewayRefusal):
        return HubError(str(error))
    if isinstance(error, NoNeighbour):
        return HubError(f"{repo} cannot be fetched from other machines: {error}.")
    page = f"{constants.ENDPOINT}/{repo}"
    status = _status(error)
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return ModelError(
            f"{repo} is not a folder here, and is not found at {page}: check the name, or set "
            "HF_TOKEN if it is private.",
            code="not_on_hub",
        )
    if status == 403:
        return ModelError(
            f"{constants.ENDPOINT} refuses {repo} to this token: accept the licence at {page}, "
            "and set HF_TOKEN to a token that may read the repository.",
            code="licence",
        )
    reason = (
        f"{repo} is not a folder here, and cannot be fetched from {constants.ENDPOINT}: {error}"
    )
    if _may_pass(error):
        return HubError(f"{reason} (check the path and the network)")
    return ModelError(reason)


def _by_type(error: Exception, repo: str) -> ModelError | None:
    for kind, code, reason in _REASONS:
        if isinstance(error, kind):
            hub = constants.ENDPOINT
            return ModelError(reason.format(repo=repo, hub=hub, page=f"{hub}/{repo}"), code=code)
    return None


def is_unresolved(error: BaseException | None) -> bool:
    """Whether the name of the hub could not be resolved, as on a host that is offline."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def is_refusal(error: BaseException | None) -> bool:
    """Whether the hub has refused the request for good."""
    return isinstance(error, HfHubHTTPError) and _status(error) not in _BUSY


def _may_pass(error: Exception) -> bool:
    """Whether another try may succeed: the network failed, or the server was busy."""
    if isinstance(error, HfHubHTTPError):
        return not is_refusal(error)
    permanent = (OfflineModeIsEnabled, EntryNotFoundError, HFValidationError)
    return isinstance(error, FAILURES) and not isinstance(error, permanent)


def wait_before_retry(error: Exception) -> float | None:
    """Returns the wait that a server asked for, or None."""
    if isinstance(error, Retry):
        return error.wait_seconds
    response = getattr(error, "response", None)
    return None if response is None else wait_seconds(response.headers)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)
