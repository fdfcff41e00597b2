"""The views in a real browser, on a server whose engine is made up: keys, faults, and what a model
or a client may write."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from serve.front.text.tokens import Tokenizer
from tests.front.fakes import Running, byte_level, save
from tests.page.browser import Tab, opened
from tests.page.overlap import measured
from tests.page.shown import ShownEngine

VIEWS = ("pipeline", "requests", "adapters", "chat")
MARKUP = "<img src=x onerror=window.hurt=1><script>window.hurt=1</script>"
REFUSED = "Failed to load resource"  # how the browser reports a status such as 401


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = save(byte_level(), tmp_path_factory.mktemp("model"))
    return Tokenizer(folder)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ShownEngine:
    return ShownEngine(tokenizer)


@pytest.fixture
def server(engine: ShownEngine) -> Iterator[Running]:
    with Running(engine) as running:
        yield running


def enter_keys(page: Page, api: str, admin: str, is_kept: bool = False) -> None:
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("API key", exact=True).fill(api)
    page.get_by_label("Admin key", exact=True).fill(admin)
    page.get_by_label("Keep them").set_checked(is_kept)
    page.get_by_role("button", name="Use").click()


def stored(page: Page) -> Any:
    return page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")


def test_views_ask_for_keys_and_use_them(engine: ShownEngine, tab: Tab) -> None:
    with Running(engine, api_key=("user",), admin_key=("boss",)) as server:
        page = tab.show(server.url)
        expect(page.get_by_text("This view needs an admin key")).to_be_visible()
        enter_keys(page, "", "wrong")
        expect(page.get_by_text("This view needs an admin key")).to_be_visible()
        enter_keys(page, "user", "boss")
        expect(page.locator(".stage")).to_have_count(2)
        page.get_by_role("link", name="Chat").click()
        page.get_by_label("Question").fill("hello")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".answer")).to_contain_text("hello world")
        assert "boss" not in stored(page)
        assert "boss" not in page.url
        page.reload()
        page.get_by_role("link", name="Pipeline").click()
        expect(page.get_by_text("This view needs an admin key")).to_be_visible()
        enter_keys(page, "user", "boss", is_kept=True)
        page.reload()
        expect(page.locator(".stage")).to_have_count(2)
        tab.check(allowed=REFUSED)


def test_views_show_how_a_start_goes_on(engine: ShownEngine, server: Running, tab: Tab) -> None:
    engine.cluster = {"name": "loading", "what": "the engines load", "has_worked": False}
    engine.stage_fields[1] = {"state": "fetching", "bytes_done": 3, "bytes_total": 4}
    page = tab.show(server.url)
    notice = page.locator("[data-notice=starting]")
    expect(notice).to_contain_text("75 %")
    expect(notice.locator("progress")).to_have_count(1)
    engine.cluster = {"name": "working", "what": "the engines get steps"}
    expect(notice).to_have_count(0)
    tab.check()


def test_views_show_a_fault_and_the_end(engine: ShownEngine, server: Running, tab: Tab) -> None:
    page = tab.show(server.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    engine.cluster = {"name": "renewing", "what": "a process is replaced", "fault": "Rank 1 died."}
    engine.stage_fields[1] = {"state": "renewing"}
    expect(page.locator("[data-notice=recovering]")).to_contain_text("Rank 1 died.")
    expect(page.locator("[aria-live=polite]")).to_contain_text("Recovering")
    engine.cluster = {"name": "failed", "what": "it cannot go on", "fault": "Rank 1 died again."}
    expect(page.get_by_role("heading", name="The cluster has stopped")).to_be_visible()
    expect(page.locator(".reason")).to_have_text("Rank 1 died again.")
    tab.check()


def test_views_say_that_the_server_is_gone(engine: ShownEngine, tab: Tab) -> None:
    with Running(engine) as server:
        page = tab.show(server.url)
        expect(page.locator("[data-state=ready]")).to_be_visible()
    expect(page.get_by_text("Not connected")).to_be_visible()
    tab.check(allowed=REFUSED)


@pytest.mark.parametrize(("num_clients", "least", "most"), [(1, 0.9, 1.1), (4, 1.8, 2.0)])
def test_steps_of_stages_overlap_if_they_do(
    engine: ShownEngine, server: Running, tab: Tab, num_clients: int, least: float, most: float
) -> None:
    engine.num_clients = num_clients
    page = tab.show(server.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    by_data, by_pixels = measured(page)
    assert least < by_data <= most
    # The gaps between the stripes of prefill look idle.
    assert least - 1.1 <= by_pixels <= most - 1
    tab.check()


def test_chat_runs_nothing_that_was_written(engine: ShownEngine, server: Running, tab: Tab) -> None:
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
    assert page.locator(".question img, .title img").count() == 0
    assert page.evaluate("window.hurt") is None
    assert not [url for url in requested if not url.startswith((server.url, "data:"))]
    tab.check()


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_have_no_serious_barriers(server: Running, browser: Browser, scheme: Any) -> None:
    found = []
    with opened(browser, color_scheme=scheme) as tab:
        page = tab.show(server.url)
        for view in VIEWS:
            page.locator(f"nav a[href='#{view}']").click()
            expect(page.locator(f"[data-view={view}]")).to_be_visible()
            page.wait_for_timeout(200)
            tab.check()  # Before axe, which fetches and styles things itself.
            for violation in Axe().run(page).response["violations"]:
                if violation["impact"] in ("serious", "critical"):
                    place = violation["nodes"][0]["html"]
                    found.append(f"{view}: {violation['id']} {place}")
            tab.forget()
    assert not found, "\n".join(found)


@pytest.mark.parametrize("width", [360, 2560])
def test_views_fit_narrow_and_wide_windows(server: Running, browser: Browser, width: int) -> None:
    with opened(browser, viewport={"width": width, "height": 800}) as tab:
        for view in VIEWS:
            page = tab.show(server.url, view)
            expect(page.locator(f"[data-view={view}]")).to_be_visible()
            page.wait_for_timeout(100)
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(overflow) <= 0, view
        tab.check()
