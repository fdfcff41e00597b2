"""Who may make a call, and which API's errors it returns. Each route declares its own policy."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class Access(Enum):
    """OPEN needs no key, CLIENT an API key if there are any, ADMIN an admin key."""

    OPEN = "open"
    CLIENT = "client"
    ADMIN = "admin"


class Dialect(Enum):
    """The API whose error objects a call returns."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules for a call. With ignores_load it is answered even while the server is draining or
    has too many connections. is_endless marks a stream without an end: a drain does not wait for
    it."""

    access: Access = Access.CLIENT
    dialect: Dialect = Dialect.OPENAI
    ignores_load: bool = False
    is_endless: bool = False


class Route(Protocol):
    path: str
    path_regex: re.Pattern[str]
    methods: set[str] | None
    endpoint: Callable[..., Any]


class Policies:
    """The policy of each path, whether it exists or not. folders are prefixes that end with a
    slash; their policies apply to unknown paths below them."""

    def __init__(self, routes: Iterable[Route], folders: Mapping[str, Policy]) -> None:
        self._by_path: dict[str, Policy] = {}
        self._by_pattern: list[tuple[re.Pattern[str], Policy]] = []
        self._folders = folders
        for route in routes:
            policy: Policy = route.endpoint.call.policy  # type: ignore[attr-defined]
            if "{" in route.path:
                self._by_pattern.append((route.path_regex, policy))
            else:
                self._by_path[route.path] = policy

    def address(self, path: str) -> str:
        """Returns the path of the call that a client means. Some clients leave out /v1, and others
        append it to a base URL that ends with /v1 already."""
        others = (path.removeprefix("/v1"), f"/v1{path}")
        return next((each for each in (path, *others) if self._exists(each)), path)

    def _exists(self, path: str) -> bool:
        return path in self._by_path or any(pattern.match(path) for pattern, _ in self._by_pattern)

    def policy(self, path: str) -> Policy:
        if path in self._by_path:
            return self._by_path[path]
        for pattern, policy in self._by_pattern:
            if pattern.match(path):
                return policy
        for folder, policy in self._folders.items():
            if path.startswith(folder):
                return policy
        return Policy()
