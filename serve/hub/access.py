"""What went wrong at the hub: worth another try, or one line for a person.

Which HTTP client huggingface_hub uses is its own affair (httpx, httpx2): errors of
whichever it is are the bases of HfHubHTTPError.
"""

import logging
import random
import re
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
    """It is no fault of the model that the hub cannot be reached: later it may be."""

    exit_code = EngineError.exit_code


class Retry(Exception):
    """A failure of ours that another try may mend."""

    def __init__(self, reason: str, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


FAILURES: tuple[type[Exception], ...] = (
    Retry,
    *HfHubHTTPError.__bases__,
    EntryNotFoundError,
    HFValidationError,
)
"""Everything that a call of huggingface_hub or of its HTTP client raises, and Retry."""

_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 300.0
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")

Result = TypeVar("Result")
_logger = logging.getLogger(__name__)


class Patience:
    """How often something is tried again, and after how long. Progress renews it."""

    def __init__(
        self, repo: str, most_tries: int = 8, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._repo, self._most_tries, self._sleep = repo, most_tries, sleep
        self._num_tries = 0

    def renew(self) -> None:
        self._num_tries = 0

    def wait(self, error: Exception) -> None:
        """Sleeps before another try. Raises ModelError if there must be none."""
        self._num_tries += 1
        if not _may_pass(error) or self._num_tries >= self._most_tries:
            raise explain(error, self._repo) from error
        told = error.wait_seconds if isinstance(error, Retry) else _told_to_wait(error)
        wait = _FIRST_WAIT_SECONDS * 2 ** (self._num_tries - 1) * random.uniform(1, 1.25)
        wait = min(wait, 30.0) if told is None else min(told, _LONGEST_WAIT_SECONDS)
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        _logger.warning("event=hub_retry wait=%.1f reason=%r", wait, reason)
        self._sleep(wait)


def patiently(repo: str, call: Callable[[], Result], most_tries: int = 8) -> Result:
    """The result of a call of huggingface_hub. Raises ModelError."""
    patience = Patience(repo, most_tries)
    while True:
        try:
            return call()
        except FAILURES as error:
            patience.wait(error)


def wait_seconds(headers: Mapping[str, str]) -> float | None:
    """How long a server asks to be left alone: Retry-After, or the hub's RateLimit."""
    told = headers.get("retry-after", "").strip()
    if told.isdigit():
        return float(told)
    limit = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(limit.group(1)) if limit else None


def explain(error: Exception, repo: str) -> ModelError:
    """One line: what is wrong and what to do."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    page = f"{constants.ENDPOINT}/{repo}"
    for kind, message in (
        (GatedRepoError, f"{repo} is gated: accept its licence at {page} and set HF_TOKEN."),
        (RevisionNotFoundError, f"{repo} has no such revision: see {page}."),
        (EntryNotFoundError, f"{repo} lacks a file that it should have: {error}"),
        (HFValidationError, f"{repo} is no name of a model on the hub: {error}"),
        (OfflineModeIsEnabled, f"{repo} is here in part only, and HF_HUB_OFFLINE is set."),
    ):
        if isinstance(error, kind):
            return ModelError(message)
    status = _status(error)
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return ModelError(
            f"{repo} is no folder here, and not found at {page}: check the name, or set "
            "HF_TOKEN if it is private."
        )
    if status == 403:
        return ModelError(
            f"{constants.ENDPOINT} refuses {repo} to this token: accept the licence at {page} "
            "and set an HF_TOKEN that may read it."
        )
    wrong = HubError if _may_pass(error) else ModelError
    return wrong(
        f"{repo} is no folder here, and cannot be fetched from {constants.ENDPOINT}: {error}"
    )


def is_refusal(error: BaseException | None) -> bool:
    """Whether the hub has answered, and its answer is no."""
    return isinstance(error, HfHubHTTPError) and _status(error) not in _BUSY


def _may_pass(error: Exception) -> bool:
    """Whether it may be gone at another try: the network, or a server that is busy."""
    if isinstance(error, HfHubHTTPError):
        return not is_refusal(error)
    permanent = (OfflineModeIsEnabled, EntryNotFoundError, HFValidationError)
    return isinstance(error, FAILURES) and not isinstance(error, permanent)


def _told_to_wait(error: Exception) -> float | None:
    response = getattr(error, "response", None)
    return None if response is None else wait_seconds(response.headers)


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
