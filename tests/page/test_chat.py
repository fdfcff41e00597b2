"""The chat in a real browser, on a server with a stand-in engine: Markdown, calls of tools,
log-probabilities and exports."""

import json
import re
import subprocess
from typing import Any

import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from playwright.sync_api import Page, Request, expect

from tests.front.fakes import Running
from tests.page.browser import REFUSED, Tab
from tests.page.shown import ShownEngine

pytestmark = pytest.mark.long

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


def ask(page: Page, question: str) -> None:
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer").last).to_have_attribute("data-state", "done")


def test_chat_shows_markdown_and_copies_code(
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
    page.get_by_role("button", name="Copy as curl").click()
    expect(page.get_by_role("button", name="Copied").first).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    assert command.startswith(f"curl -N {server.url}/v1/chat/completions")
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


def test_chat_leaves_text_plain_that_the_server_does_not_render(server: Running, tab: Tab) -> None:
    tab.page.route("**/ui/markdown", lambda route: route.fulfill(status=503, body=""))
    page = tab.show(server.url, "chat")
    ask(page, "hello")
    expect(page.locator(".answer .plain")).to_contain_text("hello world")
    tab.check(allowed=REFUSED)


def test_chat_says_how_an_answer_ended(engine: ShownEngine, tab: Tab) -> None:
    with Running(engine) as server:
        page = tab.show(server.url, "chat")
        status = page.locator("[aria-live=polite]")
        ask(page, "hello")
        expect(status).to_have_text("The answer is complete.")
        engine.delay = 60.0
        page.get_by_label("Question").fill("hello")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click()
        expect(status).to_have_text("The answer was stopped.")
        engine.delay = 0.0
    page.get_by_label("Question").fill("hello")
    page.get_by_role("button", name="Send").click()
    answer = page.locator(".answer").last
    expect(answer).to_have_text("The server does not answer. Is it still running?")
    expect(status).to_have_text(re.compile("^The answer failed: The server does not answer"))
    tab.check(allowed=REFUSED)


def test_chat_sees_that_an_answer_broke_off(server: Running, tab: Tab) -> None:
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


def test_chat_sends_the_results_of_calls(engine: ShownEngine, tab: Tab) -> None:
    bodies: list[Any] = []

    def note(request: Request) -> None:
        if request.url.endswith("/chat/completions"):
            bodies.append(request.post_data_json)

    tab.page.on("request", note)
    engine.answer = '<tool_call>{"name": "weather", "arguments": {"x": "Bonn"}}</tool_call>'
    # The description of the tool takes some hundred tokens.
    with Running(engine, max_context=4096) as server:
        page = tab.show(server.url, "chat")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Tools, as JSON").fill(json.dumps([TOOL]))
        page.get_by_role("button", name="Settings").click()
        ask(page, "How is the weather in Bonn?")
        expect(page.locator(".call code")).to_have_text("weather")
        expect(page.locator(".call pre")).to_contain_text('"x": "Bonn"')
        page.get_by_label("Result of weather").fill("It rains.")
        engine.answer = "hello"
        page.get_by_role("button", name="Send results").click()
        expect(page.locator(".answer")).to_have_count(2)
        expect(page.locator(".answer").last).to_contain_text("hello")
        expect(page.locator(".call pre").last).to_have_text("It rains.")
        question, call, result = bodies[-1]["messages"]
        assert question["role"] == "user"
        assert call["tool_calls"][0]["function"]["name"] == "weather"
        assert result == {
            "role": "tool",
            "tool_call_id": call["tool_calls"][0]["id"],
            "content": "It rains.",
        }
        page.reload()
        expect(page.locator(".call pre").last).to_have_text("It rains.")
        tab.check()


def test_chat_shows_log_probabilities_on_hover(server: Running, tab: Tab) -> None:
    page = tab.show(server.url, "chat")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Log-probabilities").check()
    page.get_by_role("button", name="Settings").click()
    ask(page, "hello")
    tokens = page.locator(".scored span")
    shown = tokens.first.get_attribute("title") or ""
    chosen, *others = shown.splitlines()
    assert chosen.startswith('"h')
    assert len(others) == 4
    assert all(" %" in line for line in (chosen, *others))
    assert "".join(tokens.all_text_contents()).startswith("hello world")
    tab.check()


def test_chat_is_exported_as_json_and_as_a_command(server: Running, tab: Tab) -> None:
    """The command is run, and gets an answer from the server."""
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = tab.show(server.url, "chat")
    ask(page, "It's a 'quoted' $HOME `question`")
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Export JSON").click()
    exported = json.loads(downloading.value.path().read_text())
    assert exported["turns"][0]["question"] == "It's a 'quoted' $HOME `question`"
    assert exported["turns"][0]["answers"][0]["text"].startswith("hello world")
    page.get_by_role("button", name="Copy as curl").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert run.stdout.endswith("data: [DONE]\n\n"), run.stderr
    tab.check()
