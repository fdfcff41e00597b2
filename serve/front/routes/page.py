"""The web page at `/` for browsers."""

from starlette.requests import Request
from starlette.responses import Response

from serve.core.errors import NotFoundError
from serve.front.http import pages
from serve.front.http.access import Access, Policy, Route
from serve.front.http.guard import Application, Receive, Scope, Send
from serve.front.http.openapi import endpoint

PATH = "/ui"
# The files are the same on every server and hold no secrets, so they need no key.
_FILES = Policy(access=Access.OPEN, ignores_load=True)


def routes() -> list[Route]:
    return [Route(PATH, index), Route(PATH + "/{name:path}", file)]


def with_page(app: Application) -> Application:
    """Shows browsers the page in place of the JSON at `/`."""

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        if pages.is_for_browser(scope["method"], scope["path"], dict(scope["headers"])):
            scope["path"] = PATH
        await app(scope, receive, send)

    return choose


@endpoint(policy=_FILES)
async def index(request: Request) -> Response:
    """Returns the HTML of the page."""
    return _reply(request, pages.INDEX)


@endpoint(404, policy=_FILES)
async def file(request: Request) -> Response:
    """Returns a script, style sheet or picture of the page."""
    return _reply(request, request.path_params["name"])


def _reply(request: Request, name: str) -> Response:
    found = pages.page_file(name)
    if found is None:
        raise NotFoundError(f"The page has no file {name[:100]!r}.")
    headers = {**pages.HEADERS, "etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    data = found.data
    if "gzip" in request.headers.get("accept-encoding", ""):
        data = found.compressed
        headers["content-encoding"] = "gzip"
    return Response(data, headers={**headers, "content-type": found.content_type})
