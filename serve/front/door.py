"""Who and what is let in: keys, this host's admin calls, nobody new while draining, no
request that ends in two places. Plain ASGI."""

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from serve.core.config import ServeConfig
from serve.core.errors import BrigadeError, UnavailableError
from serve.front.guard import Application, Receive, Scope, Send, answer
from serve.front.replies import StatusError

_CONNECTIONS = "connections"  # in the state that a server gives: all that are open
# vLLM's calls about what the server has, and where from.
_ADMIN = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora_adapters"}
_OPEN = {"/health", "/ready", "/metrics"}
_ALWAYS = {"/health", "/metrics"}
_PROXY_HEADERS = {b"forwarded", b"x-forwarded-for", b"x-real-ip"}


class Door:
    """Everything but probes and metrics needs a key, once there are keys. Admin calls need
    one of their own, or come from this host."""

    def __init__(self, inner: Application, config: ServeConfig) -> None:
        self._inner = inner
        self._api_keys = [_digest(key.encode()) for key in config.api_key]
        self._admin_keys = [_digest(key.encode()) for key in config.admin_key]
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

    def _tell_if_drained(self) -> None:
        if self._draining and not self._num_inside:
            self._drained.set()

    def _check_key(self, scope: Scope) -> None:
        """Raises StatusError 401 or 403."""
        path = scope["path"]
        if path in _OPEN:
            return
        is_admin = path.startswith("/admin/") or path in _ADMIN
        keys = self._admin_keys if is_admin else self._api_keys
        if keys and not any([_is_one_of(token, keys) for token in _tokens(scope)]):
            raise StatusError(
                401,
                f"A{'n admin' if is_admin else 'n API'} key is missing or wrong: send it as "
                "Authorization: Bearer KEY, or as X-Api-Key: KEY.",
                {"www-authenticate": "Bearer"},
                "invalid_api_key",
            )
        if is_admin and not keys:
            check_local(scope)

    def _check_room(self, scope: Scope) -> None:
        """Raises UnavailableError. Probes are answered all the same: whoever kills a server
        that is busy loses its answers."""
        path = scope["path"]
        if path in _ALWAYS or path.startswith("/admin/"):
            return
        if self._draining:
            raise UnavailableError("The server is draining: ask another one.")
        # What clients have left may still be under way.
        num_open = max(len(scope["state"].get(_CONNECTIONS, ())), self._num_inside + 1)
        if num_open > self._max_connections:
            raise UnavailableError("The server has too many connections: try again later.")


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


def client_of(scope: Scope, api_keys: Collection[str]) -> str:
    """Who asks, as far as nobody can make it up: the key that let the request in, or else the
    address, which all clients of a proxy share."""
    digests = {_digest(key.encode()) for key in api_keys}
    given = [_digest(token) for token in _tokens(scope)]
    known = [digest.hex() for digest in given if digest in digests]
    address = scope.get("client") or ("",)
    return known[0] if known else str(address[0])


def check_local(scope: Scope) -> None:
    """Raises StatusError 403 unless the client is a process of this host.

    A request that a proxy passed on is nobody's word. One with another Host or Origin is
    a web page's, which has pointed its own name to this host, or posts to it blindly.
    """
    client = scope.get("client")
    headers = scope["headers"]
    named = [value for name, value in headers if name in (b"host", b"origin")]
    passed_on = any(name in _PROXY_HEADERS for name, _ in headers)
    is_here = client is not None and _is_loopback(client[0])
    if not is_here or passed_on or not all(_names_this_host(value) for value in named):
        raise StatusError(
            403,
            "Admin calls are answered to clients on this host only, under http://127.0.0.1 or "
            "http://localhost: start the server with --admin-key-file for others.",
        )


def _names_this_host(address: bytes) -> bool:
    """Of a Host (`localhost:8080`) or an Origin (`http://localhost:8080`)."""
    text = address.decode("latin-1")
    try:
        host = urlsplit(text if "://" in text else f"//{text}").hostname or ""
    except ValueError:
        return False
    return host == "localhost" or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
