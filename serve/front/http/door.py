"""Who and what is let in: keys, the names of this server, nobody new while draining, no
request that ends in two places. Plain ASGI."""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Collection

from serve.core.config import ServeConfig
from serve.core.errors import BrigadeError, UnavailableError
from serve.front.http.guard import Application, Receive, Scope, Send, answer
from serve.front.http.origin import Hosts, check_local, host_of, is_loopback_name
from serve.front.http.replies import StatusError

_CONNECTIONS = "connections"  # in the state that a server gives: all that are open
# vLLM's calls about what the server has, and where from.
_ADMIN_FOLDER = "/admin/"
_ADMIN = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora_adapters"}
_OPEN = {"/health", "/ready", "/metrics"}
_ALWAYS = {"/health", "/metrics"}

_logger = logging.getLogger(__name__)


class Door:
    """Once there are API keys, everything but probes and metrics needs one. Admin calls need an
    admin key, or an API key if there are no admin keys; without any key they must come from
    this host. Calls that need no key must name this server in Host."""

    def __init__(self, inner: Application, config: ServeConfig) -> None:
        self._inner = inner
        self._api_keys = [_digest(key.encode()) for key in config.api_key]
        self._admin_keys = [_digest(key.encode()) for key in config.admin_key]
        self._hosts = Hosts(config.host, config.allowed_host)
        self._max_connections = config.max_connections
        self._num_inside = 0
        self._draining = False
        self._drained = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_framing(scope)
            self._check_key(scope)
            self._check_room(scope)
        except BrigadeError as error:
            await answer(scope, send, error)
            return
        self._num_inside += 1
        try:
            await self._inner(scope, receive, send)
        finally:
            self._num_inside -= 1
            self._tell_if_drained()

    def drain(self) -> None:
        """From here on nothing new is taken."""
        self._draining = True
        self._tell_if_drained()

    def give_up(self) -> None:
        """As if what is still under way were answered."""
        self._drained.set()

    async def drained(self) -> None:
        """Returns when everything that was taken before `drain` is answered, or given up."""
        await self._drained.wait()

    def key_digest(self, scope: Scope) -> str:
        """Of the API key that a request carries; empty if it carries none of those."""
        valid = (token for token in _tokens(scope) if _is_one_of(token, self._api_keys))
        return next((_digest(token).hex() for token in valid), "")

    def client_of(self, scope: Scope) -> str:
        """The client, as far as nobody can make it up: the API key that let the request in, or
        else the address, which all clients of a proxy share."""
        address = scope.get("client") or ("",)
        return self.key_digest(scope) or str(address[0])

    def _tell_if_drained(self) -> None:
        if self._draining and not self._num_inside:
            self._drained.set()

    def _check_key(self, scope: Scope) -> None:
        """Raises StatusError 401 or 403."""
        path = scope["path"]
        if path in _OPEN:
            return
        is_admin = _is_admin(path)
        keys = self._api_keys
        if is_admin and self._admin_keys:
            keys = self._admin_keys
        if keys:
            _check_tokens(scope, keys, "admin" if keys is self._admin_keys else "API")
        elif is_admin:
            check_local(scope)
        else:
            self._hosts.check(scope)

    def _check_room(self, scope: Scope) -> None:
        """Raises UnavailableError. Probes are answered all the same: whoever kills a server
        that is busy loses its answers."""
        path = scope["path"]
        if path in _ALWAYS or path.startswith(_ADMIN_FOLDER):
            return
        if self._draining:
            raise UnavailableError("The server is draining: ask another one.")
        # What clients have left may still be under way.
        num_open = max(len(scope["state"].get(_CONNECTIONS, ())), self._num_inside + 1)
        if num_open > self._max_connections:
            raise UnavailableError("The server has too many connections: try again later.")


def log_access(config: ServeConfig) -> None:
    """One line that says who may call this server: what is open without a key is told at once."""
    calls = admin = "with an API key"
    if not config.api_key:
        calls = "open without a key to whoever can connect"
        admin = (
            "open without a key to every user and program of this host: set --admin-key-file or "
            "--api-key-file"
        )
    if config.admin_key:
        admin = "with an admin key"
    is_local = is_loopback_name(host_of(config.host) or config.host)
    level = logging.INFO if config.api_key or is_local else logging.WARNING
    _logger.log(level, "event=access calls=%s admin=%s", json.dumps(calls), json.dumps(admin))


def _is_admin(path: str) -> bool:
    return path.startswith(_ADMIN_FOLDER) or path in _ADMIN


def _check_tokens(scope: Scope, keys: Collection[bytes], kind: str) -> None:
    """Raises StatusError 401 unless the request carries one of the keys."""
    # A list: all are compared, so that the time tells nothing.
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
    """Raises StatusError for another protocol, and for a body whose end is told in two ways: a
    proxy before this server may have taken the other one."""
    if scope["http_version"] not in ("1.0", "1.1"):
        raise StatusError(505, "This server speaks HTTP/1.1.", {"connection": "close"})
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise StatusError(
            400,
            "Content-Length and Transfer-Encoding exclude each other: send one of them.",
            {"connection": "close"},
        )


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing tells nothing about a key, not even its length."""
    return hashlib.sha256(key).digest()


def _is_one_of(token: bytes, keys: Collection[bytes]) -> bool:
    """All are compared, in constant time."""
    digest = _digest(token)
    return any([hmac.compare_digest(digest, key) for key in keys])


def _tokens(scope: Scope) -> list[bytes]:
    """OpenAI's bearer token and Anthropic's key: each counts if its header is there once."""
    given = [
        [value for name, value in scope["headers"] if name == wanted]
        for wanted in (b"authorization", b"x-api-key")
    ]
    bearer, key = (values[0] if len(values) == 1 else b"" for values in given)
    scheme, _, token = bearer.partition(b" ")
    return [token.strip() if scheme.lower() == b"bearer" else b"", key.strip()]
