"""Decides which requests run: checks host names, load, framing and the policy of the matched route,
and refuses new requests while the server drains."""

import asyncio
import hashlib
import hmac
import json
import logging
import unicodedata
from collections.abc import Collection, Mapping

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from serve.core.config import ServeConfig
from serve.core.errors import UnavailableError
from serve.front.http.access import CLIENT, Access, Policy, Route
from serve.front.http.middleware import POLICY, RECORD, Application, Receive, Scope, Send
from serve.front.http.origin import Hosts, check_local, host_of, is_loopback_name
from serve.front.http.record import AccessRecord
from serve.front.http.replies import StatusError

_CONNECTIONS = "connections"  # the key of the open connections in a request's state
_CONTROLS = {"Cc", "Zl", "Zp"}  # categories of Unicode: control characters, line breaks

_logger = logging.getLogger(__name__)


class Keys:
    def __init__(self, config: ServeConfig) -> None:
        self._api_keys = [_digest(key.encode()) for key in config.api_key]

    def digest(self, scope: Scope) -> str:
        """Returns the digest of the valid API key in a request; empty if it has none."""
        valid = (token for token in _tokens(scope) if _is_one_of(token, self._api_keys))
        return next((_digest(token).hex() for token in valid), "")

    def client_of(self, scope: Scope) -> str:
        """Returns the digest of the client's API key, or its address. Neither can be forged."""
        address = scope.get("client") or ("",)
        return self.digest(scope) or str(address[0])


class AccessCheck:
    """Runs the requests that the policy of their route allows.

    Once there are API keys, each call that is not open needs one. Admin calls need an admin key, or
    an API key if there are no admin keys; if the server has no keys, they must come from this host.
    Calls that need no key must name this server in `Host`."""

    def __init__(self, config: ServeConfig) -> None:
        self._api_keys = [_digest(key.encode()) for key in config.api_key]
        self._admin_keys = [_digest(key.encode()) for key in config.admin_key]
        self._hosts = Hosts(config.host, config.allowed_host)
        self._max_connections = config.constants.max_connections
        self._num_running = 0
        self._draining = False
        self._drained = asyncio.Event()

    async def run(
        self, policy: Policy, inner: Application, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Runs inner for the request. Raises BrigadeError if the policy does not allow it."""
        scope[POLICY] = policy
        _check_framing(scope)
        _check_path(scope)
        self._check_key(policy, scope)
        self._check_load(policy, scope)
        if policy.is_endless:
            await inner(scope, receive, send)
            return
        self._num_running += 1
        try:
            await inner(scope, receive, send)
        finally:
            self._num_running -= 1
            self._end_drain_if_empty()

    def drain(self) -> None:
        self._draining = True
        self._end_drain_if_empty()

    def end_drain(self) -> None:
        """Makes `drained` return, even if requests are still running."""
        self._drained.set()

    async def drained(self) -> None:
        await self._drained.wait()

    def _end_drain_if_empty(self) -> None:
        if self._draining and not self._num_running:
            self._drained.set()

    def _check_key(self, policy: Policy, scope: Scope) -> None:
        """Raises StatusError 401 or 403."""
        if policy.access is Access.OPEN:
            return
        is_admin = policy.access is Access.ADMIN
        keys = self._api_keys
        if is_admin and self._admin_keys:
            keys = self._admin_keys
        if keys:
            _check_tokens(scope, keys, "admin" if keys is self._admin_keys else "API")
        elif is_admin:
            check_local(scope)
        else:
            self._hosts.check(scope)

    def _check_load(self, policy: Policy, scope: Scope) -> None:
        """Raises UnavailableError under load or in a drain, but not for probes: a supervisor may
        kill a server that does not answer them."""
        if policy.ignores_load:
            return
        if self._draining:
            raise UnavailableError("The server is draining: send the request to another server.")
        # Requests whose clients have left may still be running.
        num_open = max(len(scope["state"].get(_CONNECTIONS, ())), self._num_running + 1)
        if num_open > self._max_connections:
            raise UnavailableError("The server has too many connections: try again later.")


class CheckedRoute(BaseRoute):
    """A route whose policy is checked before it runs, once Starlette has matched it."""

    def __init__(self, route: Route, check: AccessCheck) -> None:
        self._route = route
        self._check = check

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self._route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: AccessRecord = scope[RECORD]
        record.path = self._route.path_format
        await self._check.run(self._route.policy, self._route.handle, scope, receive, send)


class NoRoute:
    """Answers 404 to paths without a route, with the policy (and errors) of their folder."""

    def __init__(self, check: AccessCheck, policies: Mapping[str, Policy]) -> None:
        self._check = check
        self._policies = policies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        found = (each for folder, each in self._policies.items() if path.startswith(folder))
        await self._check.run(next(found, CLIENT), _refuse, scope, receive, send)


async def _refuse(*_: object) -> None:
    raise HTTPException(404)


def log_access(config: ServeConfig) -> None:
    """Logs who may call this server: a warning if other hosts need no key."""
    calls = admin = "with an API key"
    if not config.api_key:
        calls = "open without a key to anyone who can connect"
        admin = (
            "open without a key to every user and program of this host: set --admin-key-file or "
            "--api-key-file"
        )
    if config.admin_key:
        admin = "with an admin key"
    is_local = is_loopback_name(host_of(config.host) or config.host)
    level = logging.INFO if config.api_key or is_local else logging.WARNING
    _logger.log(level, "event=access calls=%s admin=%s", json.dumps(calls), json.dumps(admin))


def _check_tokens(scope: Scope, keys: Collection[bytes], kind: str) -> None:
    # Makes a list, so that all keys are compared and the time reveals nothing.
    if any([_is_one_of(token, keys) for token in _tokens(scope)]):
        return
    raise StatusError(
        401,
        f"An {kind} key is missing or wrong: send it as Authorization: Bearer KEY, or as "
        "X-Api-Key: KEY.",
        {"www-authenticate": "Bearer"},
        "invalid_api_key",
    )


def _check_framing(scope: Scope) -> None:
    """Raises StatusError for other versions of HTTP, and for a body whose length is given in two
    ways: a proxy in front of this server may have used the other length."""
    if scope["http_version"] not in ("1.0", "1.1"):
        raise StatusError(505, "This server speaks HTTP/1.1.", {"connection": "close"})
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise StatusError(
            400,
            "Content-Length and Transfer-Encoding exclude each other: send one of them.",
            {"connection": "close"},
        )


def _check_path(scope: Scope) -> None:
    """Raises StatusError for control characters and line breaks in the path."""
    if any(unicodedata.category(character) in _CONTROLS for character in scope["path"]):
        raise StatusError(
            400,
            "The path contains control characters: send it without them.",
            code="invalid_path",
        )


def _digest(key: bytes) -> bytes:
    """Returns the hash of a key. All hashes have one length, which reveals no key's length."""
    return hashlib.sha256(key).digest()


def _is_one_of(token: bytes, keys: Collection[bytes]) -> bool:
    """Whether token is one of the keys. All keys are compared, in constant time."""
    digest = _digest(token)
    return any([hmac.compare_digest(digest, key) for key in keys])


def _tokens(scope: Scope) -> list[bytes]:
    """Returns the bearer token and X-Api-Key, each empty if it is missing or given twice."""
    given = [
        [value for name, value in scope["headers"] if name == wanted]
        for wanted in (b"authorization", b"x-api-key")
    ]
    bearer, key = (values[0] if len(values) == 1 else b"" for values in given)
    scheme, _, token = bearer.partition(b" ")
    return [token.strip() if scheme.lower() == b"bearer" else b"", key.strip()]
