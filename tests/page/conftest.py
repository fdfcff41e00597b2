"""One browser, one window and one cluster for the tests of the page. All end with the module,
because Playwright's loop must not be there when other tests start loops of their own."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from serve.front.text.tokens import Tokenizer
from tests.cluster.servers import ROOT, Server, running
from tests.front.fakes import Running, byte_level, save
from tests.page.shown import ShownEngine

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

    from tests.page.browser import Tab

ADAPTERS = ROOT / "examples" / "adapters"


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    # Imported here, because this file is also read where Playwright is not installed.
    from tests.page.browser import CHROMIUM, NO_BROWSER, browsing

    if CHROMIUM is None:
        pytest.skip(NO_BROWSER)
    with browsing() as started:
        yield started


@pytest.fixture(scope="module")
def cluster(browser: "Browser", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two ranks, which may load the embedded adapters."""
    root: Path = tmp_path_factory.mktemp("adapters")
    for name in ("pirate", "poet"):
        shutil.copytree(ADAPTERS / name, root / name)
    with running(2, "--adapter-root", str(root)) as server:
        yield server


@pytest.fixture(scope="module")
def context(browser: "Browser") -> "Iterator[BrowserContext]":
    from tests.page.browser import window

    with window(browser) as made:
        made.new_page()  # The window stays open between tests.
        yield made


@pytest.fixture
def tab(context: "BrowserContext") -> "Iterator[Tab]":
    from tests.page.browser import opened_in

    with opened_in(context) as made:
        yield made


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
