"""The views in a real browser, on a server with a stand-in engine: keys, starts, faults, the
bottleneck, the trace, accessibility and widths."""

import json
from typing import Any

import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.front.fakes import Running
from tests.page.browser import REFUSED, Tab, opened
from tests.page.overlap import measured
from tests.page.requests import waiting
from tests.page.shown import ShownEngine

VIEWS = ("pipeline", "requests", "adapters", "chat")


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


@pytest.mark.parametrize(
    ("num_clients", "min_overlap", "max_overlap"), [(1, 0.9, 1.1), (4, 1.8, 2.0)]
)
def test_steps_of_stages_overlap_if_they_do(
    engine: ShownEngine,
    server: Running,
    tab: Tab,
    num_clients: int,
    min_overlap: float,
    max_overlap: float,
) -> None:
    engine.num_clients = num_clients
    page = tab.show(server.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    found = measured(page)
    assert found is not None
    by_data, by_pixels = found
    assert min_overlap < by_data <= max_overlap
    # The gaps between the stripes of prefill look idle.
    assert min_overlap - 1.1 <= by_pixels <= max_overlap - 1
    tab.check()


def test_pipeline_names_the_bottleneck_and_the_request_that_waits(
    engine: ShownEngine, tab: Tab
) -> None:
    engine.busy_shares = {0: 0.3}
    engine.num_waiting = 2
    engine.delay = 60.0
    with Running(engine, max_num_sequences=4) as server, waiting(server, "first"):
        engine.generations[0].phase = "waiting"
        page = tab.show(server.url)
        finding = page.locator("[data-finding=bottleneck]")
        expect(finding).to_contain_text("Rank 1 limits the speed")
        queue = page.locator("[data-finding=queue]")
        expect(queue).to_contain_text("2 requests wait: first has waited the longest, for ")
        expect(queue).to_contain_text("All 4 places are taken")
        tab.check()


def test_steps_open_in_perfetto(server: Running, tab: Tab) -> None:
    """A stand-in for Perfetto's page answers the ping, and keeps the trace that it gets."""
    perfetto = """<script>addEventListener("message", (event) => {
        if (event.data === "PING") event.source.postMessage("PONG", event.origin);
        else window.got = new TextDecoder().decode(event.data.perfetto.buffer);
    })</script>"""
    tab.page.context.route(
        "https://ui.perfetto.dev/**",
        lambda route: route.fulfill(body=perfetto, content_type="text/html"),
    )
    page = tab.show(server.url)
    with page.expect_popup() as opening:
        page.get_by_role("button", name="Open in Perfetto").click()
    opening.value.wait_for_function("window.got")
    assert "traceEvents" in json.loads(opening.value.evaluate("window.got"))
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Save trace").click()
    assert "traceEvents" in json.loads(downloading.value.path().read_text())
    tab.check()


def test_steps_are_drawn_after_a_clock_was_set_back(server: Running, tab: Tab) -> None:
    page = tab.show(server.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    lengths = page.evaluate("""async () => {
        const { history, take, timeline } = await import("/ui/lib/store.js");
        const time = timeline.time + 3600;
        const span = (end) => [0, 1, "decode", 1, 1, end - 0.1, end, [0]];
        take({ kind: "change", time, spans: [span(time)] });
        take({ kind: "change", time: time - 3600, spans: [span(time - 3600)] });
        const times = history.series.time;
        return [timeline.lanes.get(0).length, times.filter((each) => each > time - 60).length];
    }""")
    assert lengths == [1, 0]
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


@pytest.mark.parametrize("width", [360, 1280, 2560])
def test_views_of_seven_stages_fit_narrow_and_wide_windows(
    engine: ShownEngine, server: Running, browser: Browser, width: int
) -> None:
    engine.num_ranks = 7
    with opened(browser, viewport={"width": width, "height": 800}) as tab:
        for view in VIEWS:
            page = tab.show(server.url, view)
            expect(page.locator(f"[data-view={view}]")).to_be_visible()
            page.wait_for_timeout(100)
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(overflow) <= 0, view
            cut = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).length"
            assert page.locator(".stage dd").evaluate_all(cut) == 0, view
        tab.check()
