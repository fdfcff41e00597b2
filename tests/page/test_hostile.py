"""The page with hostile input of clients, models and operators: markup in every text, many
requests, many pages, and long names."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from playwright.sync_api import Page, expect

from serve.front.routes.events import MAX_SHOWN_REQUESTS
from serve.front.routes.watching import MAX_WATCHERS
from tests.front.fakes import Running
from tests.page.browser import REFUSED, Tab, wait_until_true
from tests.page.requests import waiting
from tests.page.shown import ShownEngine

pytestmark = pytest.mark.long

MARKUP = "<img src=x onerror=window.hurt=1><script>window.hurt=1</script>"


def check_unhurt(page: Page, place: str) -> None:
    """Raises AssertionError if markup became an element or ran."""
    for forbidden in ("img", "script", "iframe", "[onerror]"):
        assert page.locator(f"{place} {forbidden}").count() == 0, forbidden
    assert page.evaluate("window.hurt") is None


def test_the_chat_runs_no_script_in_questions_and_answers(
    engine: ShownEngine, server: Running, tab: Tab
) -> None:
    """Markup in a question and in an answer, and addresses that would run or fetch something."""
    attacks = [
        MARKUP,
        "[a](javascript:window.hurt=1)",
        "![a](https://evil.example/a.png)",
        '<a href="https://a.example" onclick="window.hurt=1" style="color:red">a</a>',
        "`<svg/onload=window.hurt=1>`",
        '<iframe srcdoc="<script>parent.hurt=1</script>"></iframe>',
        "<style>*{display:none}</style>",
    ]
    engine.answer = "\n\n".join(attacks)
    requested: list[str] = []
    tab.page.on("request", lambda request: requested.append(request.url))
    page = tab.show(server.url, "chat")
    page.get_by_label("Question").fill(MARKUP)
    page.get_by_role("button", name="Send").click()
    answer = page.locator(".answer")
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer).to_contain_text("window.hurt=1")
    written = page.locator(".answer .markdown")
    for forbidden in ("img", "script", "svg", "iframe", "style", "[onclick]", "[style]"):
        assert written.locator(forbidden).count() == 0, forbidden
    assert written.locator("[href^=javascript]").count() == 0
    assert page.locator(".question img").count() == 0
    assert page.evaluate("window.hurt") is None
    assert not [url for url in requested if not url.startswith((server.url, "data:"))]
    tab.check()


def test_the_chat_accepts_only_allowed_elements_of_rendered_html(server: Running, tab: Tab) -> None:
    """This test plays a server that renders HTML as it stands."""
    html = f"""<h1 onclick="window.hurt=1" id="app" style="color: red">{MARKUP}title</h1>
        <a href="javascript:window.hurt=1">run</a> <a href="https://a.example/b">go</a>
        <svg><script>window.hurt=1</script></svg><style>*{{display:none}}</style>
        <form action="https://a.example"><button>send</button></form>
        <math><mtext><table><mglyph><style>{MARKUP}</style></mglyph></table></mtext></math>
        <iframe srcdoc="<script>parent.hurt=1</script>"></iframe>
        <template>{MARKUP}</template><ol start="3"><li>third</li></ol>"""
    tab.page.route("**/ui/markdown", lambda route: route.fulfill(json={"html": html}))
    page = tab.show(server.url, "chat")
    page.get_by_label("Question").fill("hello")
    page.get_by_role("button", name="Send").click()
    text = page.locator(".answer .markdown")
    expect(text.locator("h1")).to_contain_text("title")
    check_unhurt(page, ".markdown")
    for forbidden in ("svg", "style", "form", "button", "math", "template", "[style]", "[id]"):
        assert text.locator(forbidden).count() == 0, forbidden
    kept = "(all) => all.map((each) => [each.href, each.target, each.rel])"
    assert text.locator("a").evaluate_all(kept) == [
        ["", "", ""],
        ["https://a.example/b", "_blank", "noopener noreferrer nofollow"],
    ]
    assert text.locator("ol").get_attribute("start") == "3"
    tab.forget()  # The browser reports what the policy would have refused.


def test_names_of_adapters_run_no_script(engine: ShownEngine, tab: Tab) -> None:
    """The server refuses such names. This test gives one to the page directly."""
    with Running(engine, adapter_root=Path()) as server:
        check_adapters(tab.show(server.url, "adapters"))
        tab.check(allowed=REFUSED)


def check_adapters(page: Page) -> None:
    page.get_by_label("Name", exact=True).fill(MARKUP)
    page.get_by_label("Folder").fill(MARKUP)
    page.get_by_role("button", name="Load on all ranks").click()
    expect(page.get_by_role("alert")).to_contain_text("window.hurt")
    adapter = {"name": MARKUP, "source": MARKUP, "bytes": [1], "rank": 8, "version": 1}
    page.evaluate(
        """async (adapter) => {
            const { take, timeline } = await import("/ui/lib/store.js");
            take({ kind: "change", time: timeline.time, spans: [], adapters: [adapter] });
        }""",
        adapter,
    )
    expect(page.locator("[data-adapter] h2 span").first).to_have_text(MARKUP)
    expect(page.locator(".source")).to_have_text(MARKUP)
    check_unhurt(page, "main")


def test_the_oldest_of_very_many_requests_are_shown(engine: ShownEngine, tab: Tab) -> None:
    engine.delay = 60.0
    ids = [f"many-{number}" for number in range(MAX_SHOWN_REQUESTS + 3)]
    with Running(engine, max_queue=1000) as server, waiting(server, *ids):
        page = tab.show(server.url, "requests")
        expect(page.locator("tbody tr")).to_have_count(MAX_SHOWN_REQUESTS)
        expect(page.get_by_text("3 newer requests are not shown.")).to_be_visible()
        tab.check()


def test_the_page_says_if_too_many_pages_watch_the_server(server: Running, tab: Tab) -> None:
    with httpx2.Client(base_url=server.url) as client, ExitStack() as streams:
        for _ in range(MAX_WATCHERS):
            stream = streams.enter_context(client.stream("GET", "/admin/events"))
            stream.raise_for_status()
        page = tab.show(server.url)
        expect(page.get_by_text("Too many pages watch this server")).to_be_visible()
    expect(page.locator("[data-state=ready]")).to_be_visible()
    tab.check(allowed=REFUSED)


@pytest.mark.parametrize("width", [360, 1280])
def test_long_names_do_not_widen_the_page(engine: ShownEngine, tab: Tab, width: int) -> None:
    long = "n" * 10_000
    engine.stage_fields = {0: {"host": long}, 1: {"state": long}}
    engine.cluster = {"name": "working", "what": "", "fault": long, "fault_seconds_ago": 3600}
    with Running(engine, served_model_name=long) as server:
        tab.page.set_viewport_size({"width": width, "height": 800})
        page = tab.show(server.url)
        expect(page.locator("[data-past-fault]")).to_be_visible()
        for view in ("pipeline", "adapters", "chat"):
            page.locator(f"nav a[href='#{view}']").click()
            expect(page.locator(f"[data-view={view}]")).to_be_visible()
            page.wait_for_timeout(200)
            widths: Any = page.evaluate("""
                [document.documentElement.scrollWidth, document.documentElement.clientWidth]
            """)
            assert widths[0] <= widths[1], view
        tab.check()


def test_the_check_of_a_tab_finds_violations_and_errors(server: Running, tab: Tab) -> None:
    """The check that ends every test of the page can fail."""
    page = tab.show(server.url)
    page.evaluate("console.error('made up')")
    with pytest.raises(AssertionError, match="made up"):
        tab.check()
    tab.forget()
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'),"
        " { textContent: 'window.hurt = 1' }))"
    )
    wait_until_true(page, "window.violations.length")
    tab.complaints.clear()
    with pytest.raises(AssertionError, match="script-src"):
        tab.check()
    assert page.evaluate("window.hurt") is None
