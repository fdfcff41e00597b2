"""The web page at `/` for browsers, and the Markdown of its chat."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import Response

from serve.core.errors import NotFoundError
from serve.front.api.openai import parse
from serve.front.http import pages
from serve.front.http.access import CLIENT, Access, Policy, Route
from serve.front.http.body import Body, json_object
from serve.front.http.middleware import Application, Receive, Scope, Send, read_body
from serve.front.http.openapi import endpoint
from serve.front.routes.stream import json_response
from serve.front.text.markdown import rendered

PATH = "/ui"
# The files are the same on every server and hold no secrets, so they need no key.
_FILES = Policy(access=Access.OPEN, ignores_load=True)
# One text at a time, so that many texts do not slow down the rest of the server.
_rendering = ThreadPoolExecutor(1, "markdown")


class MarkdownBody(Body):
    """The text of an answer."""

    text: str


def routes() -> list[Route]:
    return [
        Route(PATH, index),
        Route(PATH + "/markdown", markdown, methods=["POST"]),
        Route(PATH + "/{name:path}", file),
    ]


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


@endpoint(policy=_FILES)
async def file(request: Request) -> Response:
    """Returns a script, style sheet or picture of the page."""
    return _reply(request, request.path_params["name"])


@endpoint(policy=CLIENT, body=MarkdownBody)
async def markdown(request: Request) -> Response:
    """Turns the Markdown of an answer into HTML."""
    body = parse(MarkdownBody, json_object(await read_body(request.scope, request.receive)))
    loop = asyncio.get_running_loop()
    html = await loop.run_in_executor(_rendering, rendered, body.text)
    return json_response({"html": html})


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
