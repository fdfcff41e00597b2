"""The origin of a request: the Host that it names, and whether a process on this host sent it.

Without keys, only these checks keep out web pages that point their own name at this server (DNS
rebinding) and clients behind a proxy. The checks cannot recognise a plain TCP forwarder.
"""

import ipaddress
import json
import re
import socket
from collections.abc import Iterable

from serve.front.http.middleware import Scope
from serve.front.http.replies import StatusError

_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.]+(%[\w.]+)?\]|[\w.-]+)(:\d{0,5})?", re.ASCII)
_MAX_SHOWN_CHARACTERS = 100
_SAME_PAGE = {b"same-origin", b"none"}
# Headers that proxies, load balancers and tunnels add, recognised by a word in the name, by the
# whole name, or by the prefix of a product.
_FORWARDING = re.compile(
    r".*(forward|proxy|gateway|tunnel|backend|surrogate|varnish"
    r"|client-?ip|real-?ip|remote-?(ip|addr)|ssl-client|rewrite-url|coming-from|host-override).*"
    r"|(cdn-loop|via|front-end-https|x-host|x-scheme|x-request-start|x-cloud-trace-context)"
    r"|(x-original|x-envoy|x-amzn|x-amz-cf|x-azure|x-arr|x-appengine|x-vercel|x-nf|x-akamai)-.*"
    r"|(akamai|cf|fly|fastly|tailscale|incap)-.*"
    r"|(x-)?(ngrok|traefik|haproxy|nginx|sucuri|fastly)-.*",
    re.ASCII,
)


class Hosts:
    """The values of Host that need no key. DNS rebinding needs a name, so a server that listens
    beyond loopback accepts every IP address. Other servers accept only their own address and
    localhost."""

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        names = [host_of(name) or name.lower() for name in (bound, *allowed)]
        self._allows_all = "*" in names
        self._allows_addresses = not is_loopback_name(names[0])
        self._names = {"localhost", *names}
        if self._allows_addresses:
            self._names.update(aliases_of(socket.gethostname()))

    def check(self, scope: Scope) -> None:
        """Raises StatusError 403 if Host names another server. A request without Host is allowed:
        DNS rebinding needs a browser, and browsers always send one."""
        named = _values(scope, b"host")
        if self._allows_all or not named:
            return
        host = host_of(named[0].decode("latin-1"))
        if len(named) == 1 and host is not None and self._is_ours(host):
            return
        shown = json.dumps(named[0].decode("latin-1")[:_MAX_SHOWN_CHARACTERS])
        raise StatusError(
            403,
            f"{shown} in Host is not a name of this server: call it by its address, such as "
            "http://127.0.0.1, or start it with --allowed-host NAME.",
            code="host_not_allowed",
        )

    def _is_ours(self, host: str) -> bool:
        if host in self._names or is_loopback_name(host):
            return True
        return self._allows_addresses and _address(host) is not None


def aliases_of(host_name: str) -> set[str]:
    """Returns a host's name as it is given, without its domain, and in multicast DNS."""
    short = host_name.lower().partition(".")[0]
    return {host_name.lower(), short, f"{short}.local"} if short else set()


def check_local(scope: Scope) -> None:
    """Raises StatusError 403 for a request that did not come directly, over loopback."""
    client = scope.get("client")
    is_here = client is not None and _is_loopback(client[0])
    if not (is_here and _names_loopback(scope) and not _was_forwarded(scope)):
        raise StatusError(
            403,
            "Without a key, only programs on this host may make admin calls, directly at "
            "http://127.0.0.1 or http://localhost: to allow others, start the server "
            "with --admin-key-file.",
            code="invalid_api_key",
        )


def host_of(authority: str) -> str | None:
    """Returns the host of `localhost:8080`, for example, in lower case; None if malformed."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return match["host"].strip("[]").removesuffix(".") if match else None


def is_loopback_name(host: str) -> bool:
    return host == "localhost" or _is_loopback(host)


def _names_loopback(scope: Scope) -> bool:
    """Whether the only Host is a loopback name, and no other site's web page sent the request."""
    hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
    if len(hosts) != 1 or len(origins) > 1:
        return False
    host = host_of(hosts[0].decode("latin-1"))
    if host is None or not is_loopback_name(host):
        return False
    return not origins or origins[0].lower() == b"http://" + hosts[0].lower()


def _was_forwarded(scope: Scope) -> bool:
    """Whether a proxy or forwarder sent the request, or a browser for another site's page."""
    names = {name.decode("latin-1").lower().replace("_", "-") for name, _ in scope["headers"]}
    if any(_FORWARDING.fullmatch(name) for name in names):
        return True
    return not set(_values(scope, b"sec-fetch-site")) <= _SAME_PAGE


def _values(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == wanted]


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
