"""A real browser for the page, which fails a test that finds an error in its console."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    expect,
    sync_playwright,
)

CHROMIUM = shutil.which("chromium")
NO_BROWSER = "chromium is not installed (Debian: apt-get install chromium)"
TIMEOUT_MILLISECONDS = 60_000
REFUSED = "Failed to load resource"  # how the browser reports a status such as 401
# A page that hears of its own violations of the policy.
WATCH_POLICY = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) =>
    window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""


def wait_until_true(page: Page, expression: str) -> None:
    """Asks again and again. Playwright's wait_for_function can ask only once here: later, it evals
    the expression within the page, whose policy forbids that."""
    deadline = time.monotonic() + TIMEOUT_MILLISECONDS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"it did not come true: {expression}"
        page.wait_for_timeout(20)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Chromium without a window."""
    expect.set_options(timeout=TIMEOUT_MILLISECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A tab with nothing stored, and what it complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    shown: set[str] = field(default_factory=set)  # the servers

    def hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def show(self, url: str, view: str = "") -> Page:
        self.shown.add(url)
        self.page.goto(f"{url}/#{view}" if view else url)
        return self.page

    def forget(self) -> None:
        """Forgets what was complained about."""
        self.complaints.clear()
        self.page.evaluate("window.violations = []")

    def check(self, allowed: str = "") -> None:
        """Raises AssertionError for errors in the console, but for those that are allowed, and for
        violations of the content security policy."""
        complaints = [text for text in self.complaints if not allowed or allowed not in text]
        assert not complaints, complaints
        violations = self.page.evaluate("window.violations")
        assert not violations, violations


@contextmanager
def window(browser: Browser, **options: Any) -> Iterator[BrowserContext]:
    """A window whose tabs share what they store. To open one takes longer than most tests."""
    context = browser.new_context(**options)
    try:
        context.set_default_timeout(TIMEOUT_MILLISECONDS)
        context.add_init_script(WATCH_POLICY)
        yield context
    finally:
        context.close()


@contextmanager
def opened_in(context: BrowserContext) -> Iterator[Tab]:
    """A tab of a window. When it is closed, what it has stored is deleted."""
    tab = Tab(context.new_page())
    tab.page.on("pageerror", lambda error: tab.complaints.append(f"error: {error}"))
    tab.page.on("console", tab.hear)
    try:
        yield tab
    finally:
        context.clear_permissions()
        session = context.new_cdp_session(tab.page)
        for url in tab.shown:
            session.send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})
        tab.page.close()


@contextmanager
def opened(browser: Browser, **options: Any) -> Iterator[Tab]:
    """A tab of a window of its own."""
    with window(browser, **options) as context, opened_in(context) as tab:
        yield tab
