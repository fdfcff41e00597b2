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
        ("m.percents([0.521, 0.085, 0.394]).join()", "52 %,9 %,39 %"),
        ("m.percents([0.125, 0.125, 0.75]).join()", "13 %,12 %,75 %"),
        ("m.percents([0, 0, 1]).join()", "0 %,0 %,100 %"),
    ],
)
def test_numbers_are_short_and_honest(page: Page, call: str, shown: str) -> None:
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
def test_axes_have_round_marks(page: Page, call: str, value: Any) -> None:
    assert run(page, "plot.js", call) == value


def test_line_has_gaps_and_dots(page: Page) -> None:
    points = "[[0, 1], [1, 2], [2, null], [3, 3], [9, 4]]"
    path = run(page, "plot.js", f"m.pathOf({points}, 3, (x) => x, (y) => y)")
    assert path == "M0.0 1.0h0L1.0 2.0M3.0 3.0h0M9.0 4.0h0"
