"""The functions of the page that format numbers and compute axes. They run in the browser, because
they are the page's own modules."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from playwright.sync_api import Browser, Page

from tests.front.fakes import Running
from tests.page.browser import opened
from tests.page.conftest import Tokenizer
from tests.page.shown import ShownEngine

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def page(browser: Browser, tokenizer: Tokenizer) -> Iterator[Page]:
    with Running(ShownEngine(tokenizer)) as server, opened(browser) as tab:
        yield tab.show(server.url)


def run(page: Page, module: str, call: str) -> Any:
    """Returns the value of an expression in which `m` is a module of the page."""
    return page.evaluate(
        f"async () => {{ const m = await import('/ui/lib/{module}'); return {call}; }}"
    )


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("m.digits(5)", "5"),
        ("m.digits(0.5)", "0.5"),
        ("m.digits(63.9123)", "63.9"),
        ("m.digits(1234.5)", "1235"),
        ("m.digits(0)", "0"),
        ("m.seconds(2)", "2 s"),
        ("m.seconds(0.0512)", "51.2 ms"),
        ("m.seconds(null)", "–"),
        ("m.bytes(8.4e9)", "8.4 GB"),
        ("m.rate(null)", "–"),
        ("m.clock(new Date(2026, 1, 3, 16, 3, 7) / 1000)", "16:03:07"),
        ("m.clock(new Date(2026, 1, 3, 16, 3, 7) / 1000, false)", "16:03"),
    ],
)
def test_numbers_are_rounded_and_a_missing_number_is_shown_as_a_dash(
    page: Page, call: str, shown: str
) -> None:
    assert run(page, "format.js", call) == shown


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("m.roundStep(5, 4, true)", 2),
        ("m.roundStep(1, 4, true)", 1),
        ("m.roundStep(1, 4)", 0.5),
        ("m.roundStep(0.3, 3)", 0.1),
        ("m.roundStep(81, 3.75)", 50),
        ("m.multiples(0, 0.3, 0.1)", [0, 0.1, 0.2, 0.3]),
        ("m.multiples(61, 125, 30)", [90, 120]),
    ],
)
def test_axes_have_marks_at_round_numbers(page: Page, call: str, value: Any) -> None:
    assert run(page, "plot.js", call) == value


def test_a_line_has_gaps_for_missing_values_and_dots_for_single_values(page: Page) -> None:
    points = "[[0, 1], [1, 2], [2, null], [3, 3], [9, 4]]"
    samples = f"{points}.map(([time, rate]) => ({{ time, rate }}))"
    path = run(page, "plot.js", f"m.pathOf({samples}, 'rate', 3, (x) => x, (y) => y)")
    assert path == "M0.0 1.0h0L1.0 2.0M3.0 3.0h0M9.0 4.0h0"


# --- elements

SHOW = """async (steps) => {
    const { h, show } = await import("/ui/lib/dom.js");
    const { b, input, li, p, svg, path, ul } = h;
    const holder = document.createElement("div");
    STEPS
}"""


def shown(page: Page, steps: str) -> Any:
    """Returns the result of statements that call show(holder, …)."""
    return page.evaluate(SHOW.replace("STEPS", steps))


def test_elements_are_built_from_descriptions_without_parsing_text_as_html(page: Page) -> None:
    html = shown(
        page,
        """const props = { class: "a", hidden: true, title: null };
        show(holder, p(props, "<i>", 1, null, false, [b("c")]));
        return holder.innerHTML;""",
    )
    assert html == '<p class="a" hidden="">&lt;i&gt;1<b>c</b></p>'


def test_redrawing_keeps_an_element_and_removes_attributes_no_longer_described(page: Page) -> None:
    found = shown(
        page,
        """show(holder, p({ class: "a", "aria-busy": false, onclick: () => 0 }, "b", b("c")));
        const before = holder.firstChild;
        const html = holder.innerHTML;
        show(holder, p({ "aria-busy": true }, "d"));
        return [html, holder.innerHTML, before === holder.firstChild, before.onclick];""",
    )
    first = '<p class="a" aria-busy="false">b<b>c</b></p>'
    assert found == [first, '<p aria-busy="true">d</p>', True, None]


def test_items_with_keys_are_moved_and_not_built_again(page: Page) -> None:
    found = shown(
        page,
        """const items = (...keys) => show(holder, ul(keys.map((key) => li({ key }, key))));
        items("a", "b", "c");
        const old = [...holder.firstChild.children];
        items("c", "x", "a");
        const now = [...holder.firstChild.children];
        return [holder.textContent, now[0] === old[2], now[1] === old[1], now[2] === old[0]];""",
    )
    assert found == ["cxa", True, False, True]


def test_typed_text_stays_unless_the_description_gives_a_value(page: Page) -> None:
    found = shown(
        page,
        """const typed = (props) => { show(holder, input(props)); return holder.firstChild; };
        typed({}).value = "mine";
        const kept = typed({ class: "a" }).value;
        return [kept, typed({ value: "theirs" }).value];""",
    )
    assert found == ["mine", "theirs"]


def test_svg_elements_are_drawn(page: Page) -> None:
    names = shown(
        page,
        """show(holder, svg({ viewBox: "0 0 1 1" }, path({ d: "M0 0" })), p("a"));
        return [...holder.querySelectorAll("*")].map((each) => each.constructor.name);""",
    )
    assert names == ["SVGSVGElement", "SVGPathElement", "HTMLParagraphElement"]


def test_the_callback_created_runs_once_and_the_callback_drawn_at_each_redraw(page: Page) -> None:
    calls = shown(
        page,
        """const calls = [];
        const props = { created: () => calls.push("created"), drawn: () => calls.push("drawn") };
        for (const text of "ab") show(holder, p({ ...props }, text));
        return calls;""",
    )
    assert calls == ["created", "drawn", "drawn"]
