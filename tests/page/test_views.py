"""The views in a real browser, on a server with a stand-in engine: keys, starts, faults, the
bottleneck, the trace, accessibility and widths."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from serve.front.routes import history
from tests.front.fakes import Running
from tests.page.browser import REFUSED, Tab, opened, opened_in, wait_until_true
from tests.page.overlap import measured
from tests.page.requests import waiting
from tests.page.shown import ShownEngine

pytestmark = pytest.mark.long

# How far each value is from the left edge of its cell.
VALUE_STARTS = """(cells) => cells.map((cell) => {
    const value = document.createRange();
    value.selectNodeContents(cell);
    return value.getBoundingClientRect().left - cell.getBoundingClientRect().left;
})"""
VIEWS = ("pipeline", "requests", "adapters", "chat")


def enter_keys(page: Page, api: str, admin: str, is_kept: bool = False) -> None:
    page.get_by_role("button", name="API keys").click()
    page.get_by_label("API key", exact=True).fill(api)
    page.get_by_label("Admin key", exact=True).fill(admin)
    page.get_by_label("Keep them").set_checked(is_kept)
    page.get_by_role("button", name="Use").click()


def stored(page: Page) -> Any:
    return page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")


def test_the_chat_asks_for_no_key_if_it_needs_no_key(engine: ShownEngine, tab: Tab) -> None:
    with Running(engine, admin_key=("boss",)) as server:
        page = tab.show(server.url, "adapters")
        expect(page.get_by_text("This view needs an admin key")).to_be_visible()
        expect(page.get_by_text("No adapter is loaded")).to_have_count(0)
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_text("This view needs an admin key")).to_have_count(0)
        page.get_by_label("Question").fill("hello")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".answer")).to_contain_text("hello world")
        tab.check(allowed=REFUSED)


def test_views_ask_for_keys_and_send_them(engine: ShownEngine, tab: Tab) -> None:
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


def test_views_show_the_progress_of_a_start(engine: ShownEngine, server: Running, tab: Tab) -> None:
    engine.cluster = {"name": "loading", "what": "the engines load", "has_worked": False}
    engine.stage_fields[1] = {"state": "fetching", "bytes_done": 3, "bytes_total": 4}
    page = tab.show(server.url)
    notice = page.locator(".notice")
    expect(notice).to_contain_text("75 %")
    expect(notice.locator("progress")).to_have_count(1)
    engine.cluster = {"name": "working", "what": "the engines get steps"}
    expect(notice).to_have_count(0)
    tab.check()


def test_views_show_a_fault_and_the_end_of_the_cluster(
    engine: ShownEngine, server: Running, tab: Tab
) -> None:
    page = tab.show(server.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    engine.cluster = {"name": "renewing", "what": "a process is replaced", "fault": "Rank 1 died."}
    engine.stage_fields[1] = {"state": "renewing"}
    expect(page.locator(".notice")).to_contain_text("Rank 1 died.")
    expect(page.get_by_role("status")).to_have_text("recovering")
    engine.cluster = {"name": "failed", "what": "it cannot go on", "fault": "Rank 1 died again."}
    expect(page.get_by_role("heading", name="The cluster has stopped")).to_be_visible()
    expect(page.locator(".reason")).to_have_text("Rank 1 died again.")
    tab.check()


def test_views_say_when_the_server_is_gone(engine: ShownEngine, tab: Tab) -> None:
    with Running(engine) as server:
        page = tab.show(server.url)
        expect(page.locator("[data-state=ready]")).to_be_visible()
    expect(page.get_by_text("Not connected")).to_be_visible()
    tab.check(allowed=REFUSED)


@pytest.mark.parametrize(
    ("num_clients", "min_overlap", "max_overlap"), [(1, 0.9, 1.1), (4, 1.8, 2.0)]
)
def test_drawn_steps_overlap_as_much_as_the_steps_of_the_engine(
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

    def is_as_it_should_be(found: tuple[float, float] | None) -> bool:
        """Not while a busy machine has drawn nothing yet, or only a part."""
        if found is None:
            return False
        by_data, by_pixels = found
        is_right = min_overlap < by_data <= max_overlap
        return is_right and min_overlap - 1.1 <= by_pixels <= max_overlap - 1

    deadline = time.monotonic() + 60
    while not is_as_it_should_be(found := measured(page)):
        assert time.monotonic() < deadline, found
    tab.check()


def test_the_view_of_the_pipeline_names_the_bottleneck_and_a_waiting_request(
    engine: ShownEngine, tab: Tab
) -> None:
    engine.busy_shares = {0: 0.3}
    engine.num_waiting = 2
    engine.delay = 60.0
    with Running(engine, max_num_seqs=4) as server, waiting(server, "f1-57"):
        engine.generations[0].phase = "waiting"
        page = tab.show(server.url)
        finding = page.locator("[data-finding=bottleneck]")
        expect(finding).to_contain_text("Rank 1 limits the speed")
        expect(finding).to_contain_text(re.compile(r"of the time, rank 0 (29|3\d) %\."))
        queue = page.locator("[data-finding=queue]")
        expect(queue).to_contain_text("2 requests wait: f1-57 has waited the longest, for ")
        expect(queue).to_contain_text("All 4 places are taken")
        tab.check()


def test_values_of_a_request_are_in_columns_on_phones(engine: ShownEngine, tab: Tab) -> None:
    engine.delay = 60.0
    tab.page.set_viewport_size({"width": 390, "height": 844})
    with Running(engine) as server, waiting(server, "f1-57"):
        page = tab.show(server.url, "requests")
        values = page.locator("td.num[data-label]")
        expect(values).to_have_count(5)
        starts = values.evaluate_all(VALUE_STARTS)
        assert len({round(start) for start in starts}) == 1, starts
        tab.check()


def test_a_stage_that_is_hardly_busy_is_not_called_a_bottleneck(
    engine: ShownEngine, tab: Tab
) -> None:
    engine.busy_shares = {0: 0.06, 1: 0.2}
    with Running(engine) as server:
        finding = tab.show(server.url).locator("[data-finding=bottleneck]")
        expect(finding).to_contain_text("Rank 1 is the busiest")
        expect(finding).not_to_contain_text("--split")
        tab.check()


def test_the_trace_is_saved_in_the_format_of_perfetto(server: Running, tab: Tab) -> None:
    page = tab.show(server.url)
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Save trace").click()
    assert "traceEvents" in json.loads(downloading.value.path().read_text())
    tab.check()


def test_the_step_under_the_pointer_is_described(server: Running, tab: Tab) -> None:
    page = tab.show(server.url)
    expect(page.locator(".legend")).to_contain_text("One colour for each request.")
    wait_until_true(page, "document.querySelector('[data-overlap]')?.dataset.overlap > 0")
    page.locator("canvas").hover(position={"x": 300, "y": 20})
    expect(page.locator(".legend")).to_contain_text(re.compile(r"(decode|prefill) step \d+, "))
    page.get_by_role("heading", name="Steps").hover()
    expect(page.locator(".legend")).to_contain_text("One colour for each request.")
    tab.check()


def test_steps_are_drawn_even_after_a_clock_was_set_back(server: Running, tab: Tab) -> None:
    page = tab.show(server.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    lengths = page.evaluate("""async () => {
        const { state, take, timeline } = await import("/ui/lib/store.js");
        const time = timeline.time + 3600;
        const span = (end) => [0, 1, "decode", 1, 1, end - 0.1, end, [0]];
        const sample = (end) => [end, 1, null, null, 1, 0, null, null];
        for (const end of [time, time - 3600]) {
            take({ kind: "change", time: end, spans: [span(end)], sample: sample(end) });
        }
        return [timeline.lanes.get(0).length, state.samples.length];
    }""")
    assert lengths == [1, 1]
    tab.check()


# --- the charts


def num_samples_at_first(page: Page) -> int:
    """The number of samples after the first frame."""
    number: int = page.evaluate("""async () => {
        const { state } = await import("/ui/lib/store.js");
        while (state.link.state !== "live") await new Promise((r) => setTimeout(r, 10));
        return state.samples.length;
    }""")
    return number


def test_charts_include_the_time_before_the_page_was_opened(
    engine: ShownEngine, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "STEP_SECONDS", 0.05)
    with Running(engine) as server:
        page = tab.show(server.url, "requests")
        expect(page.locator("[data-state=ready]")).to_be_visible()
        deadline = time.monotonic() + 60
        while num_samples_at_first(page) < 10:
            assert time.monotonic() < deadline
            page.reload()
        page.locator("nav a[href='#pipeline']").click()
        line = page.locator(".chart .line").first
        expect(line).to_have_attribute("d", re.compile("(L.*){10}"))
        tab.check()


def test_charts_without_samples_show_times_of_today_and_no_speed(
    engine: ShownEngine, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "STEP_SECONDS", 1000.0)
    with Running(engine) as server:
        page = tab.show(server.url)
        expect(page.locator(".vitals dd").first).to_have_text("–")
        expect(page.locator(".chart text", has_text=":").first).to_be_visible()
        for clock in page.locator(".chart text", has_text=":").all_text_contents():
            of_today = time.strptime(time.strftime("%Y-%m-%d ") + clock, "%Y-%m-%d %H:%M:%S")
            distance = abs(time.time() - time.mktime(of_today))
            assert min(distance, 86_400 - distance) < 300, clock
        tab.check()


def test_the_header_and_charts_show_the_same_number_of_requests(server: Running, tab: Tab) -> None:
    """Also while the newest sample is older than the state."""
    page = tab.show(server.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    shown = page.evaluate("""async () => {
        const { take, timeline } = await import("/ui/lib/store.js");
        const sample = [timeline.time, 1, null, null, 9, 8, null, null];
        take({ kind: "change", time: timeline.time, spans: [], sample });
        for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
        const texts = (selector) =>
            [...document.querySelectorAll(selector)].map((each) => each.innerText);
        return [texts(".vitals dd").slice(1), texts(".chart:nth-child(4) b")];
    }""")
    assert shown[0] == shown[1] == ["4", "0"]
    tab.check()


def test_the_axis_of_requests_has_only_whole_numbers(server: Running, tab: Tab) -> None:
    page = tab.show(server.url)
    marks = page.locator(".chart").nth(3).locator("text[text-anchor=end]")
    expect(marks).to_have_text(["0", "2", "4"])
    tab.check()


def test_steps_are_drawn_above_the_lines_of_their_axis(server: Running, tab: Tab) -> None:
    """One step fills a lane: all pixels in its middle have the same colour."""
    page = tab.show(server.url)
    num_colours = page.evaluate("""async () => {
        const { drawLanes } = await import("/ui/lib/lanes.js");
        const { Timeline } = await import("/ui/lib/timeline.js");
        const timeline = new Timeline();
        timeline.lane(0).push({ kind: "decode", start: 0, end: 10, sequences: [] });
        const canvas = Object.assign(document.createElement("canvas"), { width: 400, height: 80 });
        const context = canvas.getContext("2d");
        drawLanes(context, { from: 2, to: 8, width: 400, ranks: [0] }, timeline);
        const pixels = context.getImageData(0, 10, 400, 1).data;
        const colour = (_, x) => pixels.slice(4 * x, 4 * x + 4).join();
        return new Set(Array.from({ length: 400 }, colour)).size;
    }""")
    assert num_colours == 1
    tab.check()


# --- how it looks


def test_tabs_keep_their_places_in_every_view(server: Running, tab: Tab) -> None:
    page = tab.show(server.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    places = []
    for view in VIEWS:
        page.locator(f"nav a[href='#{view}']").click()
        expect(page.locator(f"[data-view={view}]")).to_be_visible()
        lefts = "(all) => all.map((each) => each.getBoundingClientRect().left)"
        places.append(page.locator("nav a").evaluate_all(lefts))
    assert places == [places[0]] * len(VIEWS)
    tab.check()


def test_zooming_in_shortens_the_time_that_is_shown(server: Running, tab: Tab) -> None:
    page = tab.show(server.url)
    expect(page.locator(".zoom")).to_have_text("−2 s+")
    page.get_by_role("button", name="Zoom in").click()
    expect(page.locator(".zoom")).to_have_text("−1 s+")
    tab.check()


def test_requests_and_kinds_of_steps_differ_in_colour(server: Running, tab: Tab) -> None:
    """Their hues are at least 18 degrees apart."""
    page = tab.show(server.url)
    hues = page.evaluate("""async () => {
        const { colour } = await import("/ui/lib/lanes.js");
        const { NUM_COLOURS } = await import("/ui/lib/timeline.js");
        const hue = (name) => {
            const [r, g, b] = colour(name).match(/\\d+/g).map(Number);
            return 180 / Math.PI * Math.atan2(Math.sqrt(3) * (g - b), 2 * r - g - b);
        };
        const requests = Array.from({ length: NUM_COLOURS }, (_, number) => `r${number}`);
        return [requests.map(hue), ["decode", "prefill"].map(hue)];
    }""")
    requests, kinds = hues
    others = [*requests, *kinds]
    pairs = [(a, b) for number, a in enumerate(requests) for b in others[number + 1 :]]
    assert min(abs((a - b + 180) % 360 - 180) for a, b in pairs) > 18
    tab.check()


def test_each_value_of_a_stage_has_a_label(server: Running, tab: Tab) -> None:
    page = tab.show(server.url)
    names = ["layers", "weights", "KV cache", "adapters", "memory left"]
    names += ["decode step", "transfer", "restarts", "state"]
    card = page.locator(".stage").first
    expect(card.locator("dt")).to_have_text(names)
    expect(card).to_contain_text("80 GB")
    title = "9.6 GB active, 1.5 GB cached, 12 GB wired"
    expect(card.get_by_title(title)).to_have_text("memory left")
    shares = page.locator(".busy p")
    expect(shares).to_have_count(2)
    for words in shares.all_text_contents():
        assert sum(map(int, re.findall(r"\d+", words))) == 100, words
    tab.check()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_chat_fills_the_window_without_scrolling_it(
    server: Running, tab: Tab, width: int, height: int
) -> None:
    tab.page.set_viewport_size({"width": width, "height": height})
    page = tab.show(server.url, "chat")
    expect(page.get_by_label("Question")).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("ready")
    root = "document.documentElement"
    assert page.evaluate(f"{root}.scrollHeight - {root}.clientHeight") == 0
    tab.check()


def test_hints_about_keys_are_hidden_on_phones(server: Running, browser: Browser) -> None:
    for options, is_phone in ({}, False), ({"has_touch": True, "is_mobile": True}, True):
        with opened(browser, viewport={"width": 900, "height": 800}, **options) as tab:
            page = tab.show(server.url)
            expect(page.get_by_text("Space pauses")).to_be_visible(visible=not is_phone)
            page.locator("nav a[href='#chat']").click()
            placeholder = page.get_by_label("Question").get_attribute("placeholder") or ""
            assert ("Shift+Enter" in placeholder) is not is_phone
            tab.check()


def test_the_form_to_load_adapters_is_shown_only_if_loading_is_allowed(
    engine: ShownEngine, context: BrowserContext
) -> None:
    allowed: dict[str, Any] = {"adapter_root": Path()}
    for flags, words in (({}, "--adapter-root FOLDER"), (allowed, "below --adapter-root")):
        with Running(engine, **flags) as server, opened_in(context) as tab:
            page = tab.show(server.url, "adapters")
            expect(page.locator("main")).to_contain_text(words)
            expect(page.locator("form.load")).to_have_count(1 if flags else 0)
            tab.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_pass_the_check_of_accessibility(server: Running, tab: Tab, scheme: Any) -> None:
    found = []
    tab.page.emulate_media(color_scheme=scheme)
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
def test_views_of_seven_stages_fit_into_narrow_and_wide_windows(
    engine: ShownEngine, server: Running, tab: Tab, width: int
) -> None:
    engine.num_ranks = 7
    tab.page.set_viewport_size({"width": width, "height": 800})
    for view in VIEWS:
        page = tab.show(server.url, view)
        expect(page.locator(f"[data-view={view}]")).to_be_visible()
        expect(page.locator(".stage")).to_have_count(7 if view == "pipeline" else 0)
        page.wait_for_timeout(100)
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overflow) <= 0, view
        cut = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).length"
        assert page.locator(".stage dd").evaluate_all(cut) == 0, view
    tab.check()


def test_charts_remain_when_the_server_stops_and_the_view_is_opened_again(
    engine: ShownEngine, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chart is as wide as its panel, although a notice was put above it."""
    monkeypatch.setattr(history, "STEP_SECONDS", 0.05)
    with Running(engine) as server:
        page = tab.show(server.url)
        expect(page.locator(".chart .line").first).to_have_attribute("d", re.compile("(L.*){5}"))
    expect(page.get_by_text("Not connected")).to_be_visible()
    check_widths(page)
    page.locator("nav a[href='#requests']").click()
    expect(page.locator("[data-view=requests]")).to_be_visible()
    page.locator("nav a[href='#pipeline']").click()
    expect(page.locator(".chart")).to_have_count(6)
    check_widths(page)
    tab.check(allowed=REFUSED)


def check_widths(page: Page) -> None:
    for chart in page.locator(".chart svg").all():
        width = chart.evaluate("(each) => each.clientWidth")
        expect(chart).to_have_attribute("viewBox", f"0 0 {width} 120")
