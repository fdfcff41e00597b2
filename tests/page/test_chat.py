"""The chat in a real browser, on a server with a stand-in engine: Markdown and
how answers end."""

import json

import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from playwright.sync_api import Page, expect

from tests.front.fakes import Running
from tests.page.browser import REFUSED, Tab
from tests.page.shown import ShownEngine

pytestmark = pytest.mark.long


def ask(page: Page, question: str) -> None:
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer").last).to_have_attribute("data-state", "done")


def test_chat_renders_markdown_and_copies_code(
    engine: ShownEngine, server: Running, tab: Tab
) -> None:
    engine.answer = "**bold** and\n\n```\nx = 1 < 2\n```\n"
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = tab.show(server.url, "chat")
    page.get_by_label("Question").fill("hello")
    page.get_by_role("button", name="Send").click()
    answer = page.locator(".answer")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer).to_have_attribute("data-state", "done")
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1 < 2\n"
    tab.check()


def test_copy_button_of_a_code_block_is_always_fully_visible(
    engine: ShownEngine, server: Running, tab: Tab
) -> None:
    """Blocks without a line, with one, and with one that is wider than the page."""
    engine.answer = "\n\n".join(f"```\n{line}\n```" for line in ("", "x", "wide " * 200))
    with_room = """(all) => all.map((button) => {
        const inner = button.getBoundingClientRect();
        const outer = button.parentElement.getBoundingClientRect();
        return inner.top >= outer.top && inner.bottom <= outer.bottom && inner.right <= outer.right;
    })"""
    page = tab.show(server.url, "chat")
    ask(page, "hello")
    buttons = page.locator("pre button")
    expect(buttons).to_have_count(3)
    assert buttons.evaluate_all(with_room) == [True] * 3
    tab.check()


def test_chat_shows_plain_text_until_the_answer_pauses(server: Running, tab: Tab) -> None:
    """What follows a pause is plain again."""
    page = tab.show(server.url, "chat")
    shown = page.evaluate("""async () => {
        const { elementsOf } = await import("/ui/lib/markdown.js");
        const { show } = await import("/ui/lib/dom.js");
        const holder = document.createElement("div");
        const answer = { text: "**a** b ", state: "running" };
        const html = () => {
            show(holder, elementsOf(answer));
            return holder.innerHTML;
        };
        const before = html();
        while (html() === before) await new Promise((resolve) => setTimeout(resolve, 20));
        const rendered = html();
        answer.text += "**c**";
        return [before, rendered, html()];
    }""")
    rendered = "<p><strong>a</strong> b</p>\n"
    assert shown == [
        '<span class="plain">**a** b </span>',
        rendered,
        f'{rendered}<span class="plain">**c**</span>',
    ]
    tab.check()


def test_chat_shows_plain_text_if_the_server_does_not_render_it(server: Running, tab: Tab) -> None:
    tab.page.route("**/ui/markdown", lambda route: route.fulfill(status=503, body=""))
    page = tab.show(server.url, "chat")
    ask(page, "hello")
    expect(page.locator(".answer .plain")).to_contain_text("hello world")
    tab.check(allowed=REFUSED)


def test_chat_says_how_an_answer_ended(engine: ShownEngine, tab: Tab) -> None:
    with Running(engine) as server:
        page = tab.show(server.url, "chat")
        ask(page, "hello")
        engine.delay = 60.0
        page.get_by_label("Question").fill("hello")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".pace").last).to_contain_text("stopped")
        engine.delay = 0.0
    page.get_by_label("Question").fill("hello")
    page.get_by_role("button", name="Send").click()
    answer = page.locator(".answer").last
    expect(answer).to_have_text("The server does not answer. Is it still running?")
    tab.check(allowed=REFUSED)


def test_chat_notices_that_the_stream_of_an_answer_broke(server: Running, tab: Tab) -> None:
    chunk = {"choices": [{"delta": {"content": "hello"}}]}
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body=f"data: {json.dumps(chunk)}\n\n", content_type="text/event-stream"
        ),
    )
    page = tab.show(server.url, "chat")
    page.get_by_label("Question").fill("hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".failure")).to_have_text("The server ended the answer too early.")
    tab.check()
