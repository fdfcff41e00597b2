"""The policy of each route: who may call it, and the API whose form its errors have. A route also
matches other spellings of its path."""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from starlette import routing
from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Awaitable[Response]]


class Access(Enum):
    """Who may call: OPEN needs no key, CLIENT an API key if any is set, ADMIN an admin key."""

    OPEN = "open"
    CLIENT = "client"
    ADMIN = "admin"


class ErrorFormat(Enum):
    """The API whose errors a call returns. BOTH: Anthropic if anthropic-version is sent."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules for a call. ignores_load: it is answered even in a drain or under overload.
    is_endless: a drain does not wait for this stream."""

    access: Access
    error_format: ErrorFormat = ErrorFormat.OPENAI
    ignores_load: bool = False
    is_endless: bool = False


CLIENT = Policy(Access.CLIENT)


class Route(routing.Route):
    """A route with its endpoint's policy. It also matches its path without /v1 or with two, as
    clients' base URLs may produce it. Raises TypeError for an endpoint without a policy."""

    def __init__(self, path: str, endpoint: Endpoint, methods: Sequence[str] = ("GET",)) -> None:
        super().__init__(path, endpoint, methods=methods)
        call: Any = getattr(endpoint, "call", None)
        if call is None:
            raise TypeError(f"The endpoint of {path} has no policy: declare it with @endpoint.")
        self.policy: Policy = call.policy
        pattern = self.path_regex.pattern.removeprefix("^").removesuffix("$")
        prefix = "(/v1){0,2}" if path.startswith("/v1/") else "(/v1)?"
        # Starlette's $ would also match before a newline at the end.
        self.path_regex = re.compile(prefix + pattern.removeprefix("/v1") + r"\Z")
