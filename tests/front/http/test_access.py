"""Nobody gets in: every route, by every trick and every setting of keys, runs no endpoint that its
policy forbids. The tests count what runs, whatever the replies say."""

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.requests import Request
from starlette.responses import Response

from serve.front.app import Front
from serve.front.http.access import CLIENT, Access, Policy, Route
from serve.front.http.openapi import by_method, endpoint
from serve.front.text.tokens import Tokenizer
from tests.front.fakes import CONFIG, MAX_CONTEXT, FakeEngine

KEYS: list[dict[str, Any]] = [
    {},
    {"api_key": ("client-key",)},
    {"admin_key": ("admin-key",)},
    {"api_key": ("client-key",), "admin_key": ("admin-key",)},
]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"]
TAILS = [
    *("", "/", "//", "/.", "/..", ".", "%", "?x=/health", "%3Fx", "#x", "%23x", ";x", "%20", "%00"),
    *("%0A", "%0D", "%0D%0A", "%0A%0A", "%0B", "%0C", "%1C", "%C2%85", "%E2%80%A8", "%E2%80%A9"),
    *("%250A", "%2F", "%252F", "/%0A", "%0A/", "%0A?x", "%0A/health"),
]
HEADS = [
    *("/", "//", "/./", "/../", "/x/../", "/health/../", "/v1/../", "/v1/./", "/%2e/", "/%2e%2e/"),
    *("/v1", "/v1/v1", "/v1/v1/v1", "/V1", "/v1%0A", "%0A", "/%0A", "/%09", "/ui/..", "/ui/../v1"),
    *("/health%0A", "/health/", "/health?", "/health#", "\\", "/%5C"),
]


def spellings(path: str) -> Iterator[str]:
    """Yields targets that could be mistaken for this path."""
    yield from (path + tail for tail in TAILS)
    yield from (head + path for head in HEADS)
    short = path.removeprefix("/v1")
    yield from (prefix + short for prefix in ("", "/v1", "/v1/v1", "/v1/v1/v1", "/v1%0A"))
    yield from (short + "%0A", "/v1" + short + "%0A", "/v1/v1" + short + "%0A")
    yield from (path.upper(), path.title(), path.swapcase())
    yield path.replace("/", "//")
    yield path.replace("/", "/./")
    yield "/" + path[1:].replace("/", "/x/../")
    yield "/" + path[1:].replace("/", "%2F")
    yield "/" + path[1:].replace("/", "%252F")
    yield "/" + path[1:].replace("/", "%5C")
    for level in ("%", "%25"):
        yield "/" + "".join(f"{level}{ord(letter):02X}" for letter in path[1:])
        yield "/" + f"{level}{ord(path[1:2] or 'x'):02X}" + path[2:]
    for middle in ("%0A", "%00", "%C2%85"):
        yield path[: len(path) // 2] + middle + path[len(path) // 2 :]


class Counting:
    """The application with endpoints that do nothing but count their runs."""

    def __init__(self, tokenizer: Tokenizer, **flags: Any) -> None:
        self.config = dataclasses.replace(CONFIG, **flags)
        self.ran: list[Policy] = []
        front = Front(self.config, FakeEngine(tokenizer), tokenizer, MAX_CONTEXT)
        self.app = front.app
        # Nothing in front of the endpoints is replaced.
        self.routes = [*front.routes, *front.files]
        for route in self.routes:
            self._count(route)

    def _count(self, route: Route) -> None:
        async def run(*_: Any) -> None:
            self.ran.append(route.policy)

        route.app = run

    async def ask(self, method: str, target: str, **headers: str) -> list[Policy]:
        """Returns the policies of the endpoints that ran for one request."""
        self.ran.clear()
        raw, _, query = target.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": unquote(raw),  # as uvicorn decodes it
            "raw_path": raw.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("127.0.0.1", 8080),
            "client": ("127.0.0.1", 5000),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "state": {},
        }
        await self.app(scope, _no_body, _drop)
        return list(self.ran)


async def _no_body() -> Any:
    raise AssertionError("a body was read before the request was admitted")


async def _drop(_: Any) -> None:
    await asyncio.sleep(0)


def may_run(policy: Policy, flags: dict[str, Any], key: str | None, is_forwarded: bool) -> bool:
    """The rules of docs/access.md, written down a second time."""
    if policy.access is Access.OPEN:
        return True
    if policy.access is Access.ADMIN and "admin_key" in flags:
        return key == "admin-key"
    if "api_key" in flags:
        return key == "client-key"
    return policy.access is Access.CLIENT or not is_forwarded


@pytest.mark.anyio
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(KEYS[0], id="none"),
        pytest.param(KEYS[1], id="api", marks=pytest.mark.slow),
        pytest.param(KEYS[2], id="admin", marks=pytest.mark.slow),
        pytest.param(KEYS[3], id="both"),
    ],
)
async def test_no_trick_bypasses_the_access_policy(
    tokenizer: Tokenizer, flags: dict[str, Any]
) -> None:
    counting = Counting(tokenizer, **flags)
    num_calls = num_runs = 0
    forbidden: list[tuple[Any, ...]] = []
    paths = [route.path_format.format(id="a", name="tiny") for route in counting.routes]
    targets = sorted({target for path in paths for target in spellings(path)})
    for is_forwarded in (False, True):
        others = {"x-forwarded-for": "203.0.113.9"} if is_forwarded else {}
        for key in (None, "wrong", *(name for names in flags.values() for name in names)):
            headers = {"host": "localhost", **others}
            if key:
                headers["authorization"] = f"Bearer {key}"
            for target in targets:
                # The methods matter where a route matches; one is enough to find that out.
                for method in METHODS if target in paths or target[:-3] in paths else ("POST",):
                    ran = await counting.ask(method, target, **headers)
                    num_calls += 1
                    num_runs += len(ran)
                    for policy in ran:
                        if not may_run(policy, flags, key, is_forwarded):
                            forbidden.append((method, target, key, is_forwarded, policy.access))
    print(f"{num_calls} calls, {num_runs} runs, {len(forbidden)} forbidden")
    assert not forbidden, f"{len(forbidden)} of {num_calls}: {forbidden[:20]}"
    assert num_calls > 20_000
    assert num_runs > 500, "the right calls run"


@pytest.mark.anyio
async def test_control_characters_are_refused_in_every_path(tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer)
    for control in ("%00", "%0A", "%0D", "%7F", "%C2%85", "%E2%80%A8", "%E2%80%A9"):
        for path in (
            "/health",
            "/v1/models",
            "/v1/models/tiny",
            "/v1/responses/a",
            "/nothing",
            "/",
        ):
            for target in (path + control, path[:2] + control + path[2:]):
                assert await counting.ask("GET", target, host="localhost") == []


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
async def test_a_page_of_another_origin_cannot_run_an_admin_call(
    tokenizer: Tokenizer, method: str
) -> None:
    """Also where pages may call: CORS is in front of the check."""
    counting = Counting(tokenizer, allowed_origins=("*",))
    headers = {"host": "localhost", "origin": "https://evil.example"}
    headers["access-control-request-method"] = "POST"
    for route in counting.routes:
        path = route.path_format.format(id="a", name="tiny")
        for policy in await counting.ask(method, path, **headers):
            assert policy.access is not Access.ADMIN


# --- routes


async def bare(_: Request) -> Response:
    return Response()


@endpoint(policy=CLIENT)
async def declared(_: Request) -> Response:
    return Response()


@endpoint(policy=Policy(Access.ADMIN))
async def for_admins(_: Request) -> Response:
    return Response()


def test_every_route_must_have_an_access_policy() -> None:
    with pytest.raises(TypeError, match="/v1/x has no policy"):
        Route("/v1/x", bare)
    with pytest.raises(TypeError, match="policy"):
        endpoint()  # type: ignore[call-arg]
    assert Route("/v1/x", declared).policy == CLIENT


def test_all_methods_of_a_path_must_have_the_same_access_policy() -> None:
    with pytest.raises(TypeError, match="GET, DELETE of one path"):
        by_method(GET=declared, DELETE=for_admins)


@pytest.mark.parametrize(
    ("path", "matching", "others"),
    [
        (
            "/v1/models",
            ["/models", "/v1/models", "/v1/v1/models"],
            [
                "/v1/v1/v1/models",
                "/v1/models/",
                "/v1/models\n",
                "/v2/models",
                "/v1models",
                "models",
            ],
        ),
        ("/health", ["/health", "/v1/health"], ["/v1/v1/health", "/health\n", "/healthy"]),
        ("/", ["/", "/v1/"], ["", "/v1", "/\n", "//"]),
        ("/v1/x/{id}", ["/x/a", "/v1/x/a", "/v1/v1/x/a"], ["/x/", "/x/a/b", "/x/a/"]),
        ("/a.b", ["/a.b", "/v1/a.b"], ["/axb"]),
    ],
)
def test_a_route_also_matches_if_v1_is_left_out_or_doubled(
    path: str, matching: list[str], others: list[str]
) -> None:
    route = Route(path, declared)
    assert [each for each in matching if not route.path_regex.match(each)] == []
    assert [each for each in others if route.path_regex.match(each)] == []
