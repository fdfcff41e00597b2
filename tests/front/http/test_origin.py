"""Where a request comes from, by its address and headers alone."""

from collections.abc import Callable

import pytest

from serve.front.http.middleware import Scope
from serve.front.http.origin import Hosts, aliases_of, check_local, host_of
from serve.front.http.replies import StatusError

HERE = ("127.0.0.1", 5)


def scope(client: tuple[str, int] | None, *headers: tuple[str, str]) -> Scope:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return {"client": client, "headers": raw}


def host(*values: str) -> Scope:
    return scope(HERE, *(("Host", value) for value in values))


def local(*headers: tuple[str, str]) -> Scope:
    return scope(HERE, ("Host", "localhost:8080"), *headers)


def error_of(check: Callable[[], None]) -> StatusError | None:
    try:
        check()
    except StatusError as error:
        return error
    return None


def refused(given: Scope) -> bool:
    error = error_of(lambda: check_local(given))
    return error is not None and error.http_status == 403 and "--admin-key-file" in str(error)


# --- this host


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_a_request_from_this_host_counts_as_local(address: str) -> None:
    assert not refused(scope((address, 5), ("Host", "localhost")))


@pytest.mark.parametrize(
    "name",
    ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:8080", "[::1]:8080", "[::FFFF:7f00:1]"],
)
def test_a_request_for_a_loopback_name_counts_as_local(name: str) -> None:
    assert not refused(host(name))
    assert not refused(scope(HERE, ("Host", name), ("Origin", f"http://{name}")))


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "localhost.example", "", "::"]
)
def test_a_request_from_another_address_is_not_local(address: str) -> None:
    assert refused(scope((address, 5), ("Host", "localhost")))


def test_a_request_without_a_client_address_is_not_local() -> None:
    assert refused(scope(None, ("Host", "localhost")))


@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "127.0.0.1.evil.example:8080",
        "localhost.evil.example",
        "localhost@evil.example",
        "evil.example@localhost",
        "evil.example#localhost",
        "localhost/evil",
        "localhost, evil.example",
        "localhost evil.example",
        "localhost:80:80",
        "localhost:port",
        "localhost..",
        "10.0.0.1",
        "0.0.0.0",
        "[::]",
        "[::1",
        "::1",
        "127.1",
        "2130706433",
        "\xb2localhost",
        "",
    ],
)
def test_a_request_for_another_host_name_is_not_local(name: str) -> None:
    assert refused(host(name))


def test_a_request_without_exactly_one_loopback_host_is_not_local() -> None:
    assert refused(host())
    assert refused(host("localhost", "localhost"))
    assert refused(host("localhost", "evil.example"))


@pytest.mark.parametrize(
    "name",
    [
        *("Forwarded", "Via", "X-Forwarded", "X-Forwarded-For", "X-Forwarded-Host"),
        *("X-Forwarded-Proto", "X-Forwarded-Anything", "X_Forwarded_For", "X-Real-Ip"),
        *("X-Client-Ip", "X-Cluster-Client-Ip", "True-Client-Ip", "Client-Ip"),
        *("CF-Connecting-IP", "CF-Ray", "CDN-Loop", "Fastly-Client-Ip", "Fly-Client-Ip"),
        *("X-Envoy-External-Address", "X-Original-Forwarded-For", "X-Original-Host"),
        *("X-Azure-ClientIP", "X-Amzn-Trace-Id", "X-ARR-LOG-ID", "Tailscale-User-Login"),
        *("Forwarded-For", "HTTP-X-Forwarded-For", "WL-Proxy-Client-IP", "Proxy-Client-IP"),
        *("X-Nginx-Proxy", "Incap-Client-IP", "X-Sucuri-ClientIP", "X-Request-Start", "X-Tunnel"),
        *(
            "Fastly-SSL",
            "X-Gateway-Host",
            "X-Backend-Server",
            "Front-End-Https",
            "X-Ssl-Client-S-Dn",
        ),
        *("X-ProxyUser-Ip", "Remote-Addr", "X-Varnish", "X-HTTP-Host-Override", "X-Ngrok-Id"),
    ],
)
def test_a_request_with_a_forwarding_header_is_not_local(name: str) -> None:
    for value in ("127.0.0.1", ""):
        assert refused(local((name, value)))


@pytest.mark.parametrize(
    "name", ["X-Request-Id", "User-Agent", "Accept", "Content-Type", "Viable", "Traceparent"]
)
def test_a_request_with_unrelated_headers_still_counts_as_local(name: str) -> None:
    assert not refused(local((name, "x")))


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "none, cross-site"])
def test_a_request_from_a_page_of_another_site_is_not_local(site: str) -> None:
    assert refused(local(("Sec-Fetch-Site", site)))
    assert refused(local(("Sec-Fetch-Site", "none"), ("Sec-Fetch-Site", site)))


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_requests_from_the_servers_own_page_and_a_typed_address_count_as_local(site: str) -> None:
    assert not refused(local(("Sec-Fetch-Site", site), ("Origin", "http://localhost:8080")))


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "", "http://evil.example", "http://localhost.evil.example"),
        *("http://localhost:3000", "http://localhost", "https://localhost:8080"),
        *("http://127.0.0.1:8080", "chrome-extension://abc", "localhost:8080"),
    ],
)
def test_a_request_from_another_origin_is_not_local(origin: str) -> None:
    assert refused(local(("Origin", origin)))
    assert refused(local(("Origin", "http://localhost:8080"), ("Origin", origin)))


# --- names


def allows(hosts: Hosts, name: str) -> bool:
    error = error_of(lambda: hosts.check(host(name)))
    assert error is None or (error.http_status, error.code) == (403, "host_not_allowed")
    assert error is None or "--allowed-host" in str(error)
    return error is None


LOOPBACK = ["localhost", "LocalHost.:1", "127.0.0.1:8080", "127.0.0.2", "[::1]:8080"]
ADDRESSES = ["192.168.1.5", "10.0.0.1:8080", "0.0.0.0:8080", "[fe80::1%en0]:8080", "[2001:db8::1]"]
WRONG = ["evil.example", "127.0.0.1.nip.io", "a@localhost", "localhost evil", "", "[::1", "a b"]


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "localhost"])
def test_only_loopback_names_are_accepted_on_a_loopback_address(bound: str) -> None:
    hosts = Hosts(bound, [])
    assert all(allows(hosts, name) for name in LOOPBACK)
    assert not any(allows(hosts, name) for name in [*ADDRESSES, *WRONG])


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "192.168.1.5", "mac1.lan"])
def test_addresses_and_the_machines_own_names_are_accepted_outside_of_loopback(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Mac1.lan")
    hosts = Hosts(bound, [])
    own = ["mac1", "MAC1.local:8080", "mac1.lan."]
    assert all(allows(hosts, name) for name in [*LOOPBACK, *ADDRESSES, *own])
    assert not any(allows(hosts, name) for name in [*WRONG, "mac2.lan", "mac1.example"])


def test_an_empty_host_name_has_no_aliases() -> None:
    assert aliases_of("") == set()
    assert aliases_of("Mac1") == {"mac1", "mac1.local"}


def test_allowed_host_names_are_accepted() -> None:
    hosts = Hosts("127.0.0.1", ["LLM.example.", "10.1.2.3", "fd00::1"])
    allowed = ["llm.example", "LLM.EXAMPLE:443", "10.1.2.3:80", "[fd00::1]:8080"]
    assert all(allows(hosts, name) for name in [*LOOPBACK, *allowed])
    assert not any(allows(hosts, name) for name in [*WRONG, "a.llm.example", "10.1.2.4"])


def test_all_host_names_can_be_allowed() -> None:
    assert all(allows(Hosts("127.0.0.1", ["*"]), name) for name in [*LOOPBACK, *WRONG])


def test_a_request_without_a_host_is_accepted() -> None:
    Hosts("127.0.0.1", []).check(host())


def test_a_request_with_two_hosts_is_refused() -> None:
    with pytest.raises(StatusError):
        Hosts("127.0.0.1", []).check(host("localhost", "localhost"))


def test_the_error_about_a_very_long_host_is_short() -> None:
    with pytest.raises(StatusError) as raised:
        Hosts("127.0.0.1", []).check(host("x" * 9000 + '"'))
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("authority", ["a:123456", "a:-1", "[x]", "a/b", "a?", "é", "a:b"])
def test_malformed_host_names_are_rejected(authority: str) -> None:
    assert host_of(authority) is None
