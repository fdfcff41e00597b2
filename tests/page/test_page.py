"""The page in a real browser, on two real ranks."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import psutil
import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from playwright.sync_api import Locator, Page, expect

from tests.cluster.servers import Server
from tests.page.browser import Tab, opened, wait_until_true
from tests.page.overlap import measured

QUESTION = "What is the capital of France?"
# Collects the texts that the answer has while it streams.
NOTE_TEXTS = """
window.texts = new Set();
new MutationObserver(() => {
    const text = document.querySelector(".answer .markdown")?.textContent;
    if (text) window.texts.add(text);
}).observe(document.body, { childList: true, subtree: true, characterData: true });
"""


# Collects what is said while the cluster recovers: a busy browser may be asked for it too late.
NOTE_NOTICES = """
window.notices = "";
new MutationObserver(() => {
    window.notices += document.querySelector(".notice")?.textContent ?? "";
}).observe(document.body, { childList: true, subtree: true, characterData: true });
"""


@contextmanager
def asking(server: Server, num_clients: int, **fields: Any) -> Iterator[None]:
    """Runs num_clients clients, each of which sends the next request after the answer."""
    ended = threading.Event()

    def ask() -> None:
        body = {
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 200,
            "ignore_eos": True,
            **fields,
        }
        with httpx2.Client(timeout=60) as client:
            while not ended.is_set():
                client.post(f"{server.url}/v1/chat/completions", json=body)

    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def is_overlap_beyond(page: Page, by_data: float, in_pixels: float) -> bool:
    """A machine that is busy with other work shows less overlap for some seconds, or none."""
    found = measured(page)
    return found is not None and found[0] > by_data and found[1] > in_pixels


def ask(page: Page, question: str) -> Locator:
    """Asks in the chat, and returns the latest answer."""
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Send").click()
    return page.locator(".answer").last


def settings(page: Page, **texts: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, text in texts.items():
        page.get_by_label(label.replace("_", " "), exact=False).fill(text)
    page.get_by_role("button", name="Settings").click()


# --- the pipeline


@pytest.mark.slow
def test_the_view_of_the_pipeline_shows_overlapping_steps_only_for_several_clients(
    cluster: Server, tab: Tab
) -> None:
    page = tab.show(cluster.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    expect(page.locator(".stage")).to_have_count(2)
    with asking(cluster, 1):
        one, one_in_pixels = wait_until(lambda: measured(page))
    with asking(cluster, 4):
        wait_until(lambda: is_overlap_beyond(page, one + 0.15, one_in_pixels + 0.1))
        expect(page.locator("[data-finding=bottleneck]")).not_to_contain_text("Idle")
    assert one < 1.1
    tab.check()


@pytest.mark.long
def test_the_view_of_the_pipeline_shows_a_killed_engine_and_its_recovery_without_a_reload(
    cluster: Server, tab: Tab
) -> None:
    page = tab.show(cluster.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    page.evaluate(NOTE_NOTICES)
    cluster.engines()[1].kill()
    wait_until_true(page, "/rank 1/.test(window.notices)")
    wait_until_true(page, "/[Kk]ill|signal/.test(window.notices)")
    expect(page.locator("[data-past-fault]")).to_contain_text("ago")
    expect(page.locator("[data-state=ready]")).to_be_visible()
    # It is the same document.
    assert page.evaluate("window.notices")
    expect(page.get_by_role("status")).to_have_text("ready")
    tab.check()


# --- requests and adapters


@pytest.mark.long
def test_requests_can_be_cancelled(cluster: Server, tab: Tab) -> None:
    page = tab.show(cluster.url, "requests")
    expect(page.get_by_text("No requests.")).to_be_visible()
    replies: list[httpx2.Response] = []
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000, "ignore_eos": True}

    def post() -> None:
        headers = {"x-request-id": "70-cace1"}
        url = f"{cluster.url}/v1/chat/completions"
        replies.append(httpx2.post(url, json=body, headers=headers, timeout=60))

    thread = threading.Thread(target=post)
    thread.start()
    row = page.locator("[data-request='70-cace1']")
    expect(row).to_be_visible()
    row.get_by_role("button").click()
    row.get_by_role("button", name="Really").click()
    expect(row).to_have_count(0)
    thread.join(60)
    assert replies[0].json()["error"]["code"] == "request_cancelled"
    tab.check()


@pytest.mark.long
def test_adapters_can_be_loaded_and_replaced_and_unloaded(cluster: Server, tab: Tab) -> None:
    page = tab.show(cluster.url, "adapters")
    expect(page.get_by_text("No adapter is loaded.")).to_be_visible()
    card = page.locator("[data-adapter=guest]")
    for path, is_replaced in (("pirate", False), ("poet", True)):
        page.get_by_label("Name", exact=True).fill("guest")
        page.get_by_label("Folder").fill(path)
        page.get_by_label("Replace an adapter").set_checked(is_replaced)
        page.get_by_role("button", name="Load on all ranks").click()
        expect(card.locator(".source")).to_contain_text(path)
        done = f"{'Replaced' if is_replaced else 'Loaded'} guest in "
        expect(page.get_by_role("main").get_by_role("status")).to_contain_text(done)
        loaded_at = card.locator("div", has_text="loaded").last.locator("dd")
        expect(loaded_at).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    card.get_by_role("button", name="Pin").click()
    expect(card.get_by_text("pinned")).to_be_visible()
    page.get_by_label("Name", exact=True).fill("guest")
    page.get_by_label("Folder").fill("nothing")
    page.get_by_role("button", name="Load on all ranks").click()
    expect(page.get_by_role("alert")).to_contain_text("Could not replace guest: ")
    card.get_by_role("button", name="Unload").click()
    card.get_by_role("button", name="Really").click()
    expect(card).to_have_count(0)
    tab.check(allowed="Failed to load resource")


# --- the chat


def test_a_chat_is_streamed_and_saved_only_in_the_browser(cluster: Server, tab: Tab) -> None:
    page = tab.show(cluster.url, "chat")
    page.evaluate(NOTE_TEXTS)
    answer = ask(page, "Say the alphabet.")
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer).to_contain_text("a, b, c")
    assert page.evaluate("window.texts.size") > 2, "the answer came at once"
    expect(answer.locator(".pace")).to_contain_text("tok/s")
    page.reload()
    expect(page.locator(".answer")).to_contain_text("a, b, c")
    with opened(page.context.browser) as other:  # type: ignore[arg-type]
        expect(other.show(cluster.url, "chat").locator(".answer")).to_have_count(0)
    tab.check()


@pytest.mark.long
def test_an_answer_can_be_stopped_and_asked_for_again(cluster: Server, tab: Tab) -> None:
    page = tab.show(cluster.url, "chat")
    settings(page, Max_tokens="3")
    answer = ask(page, "Tell me a story.")
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".pace")).to_contain_text("cut off at the token limit")
    # The first answer is done, too: only its reply tells that the second one has begun.
    with page.expect_response("**/v1/chat/completions"):
        page.get_by_role("button", name="Retry").click()
    expect(answer).to_have_attribute("data-state", "done")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    tab.check()


@pytest.mark.long
def test_the_chat_compares_answers_of_the_model_and_of_an_adapter(
    cluster: Server, tab: Tab
) -> None:
    load = {"lora_name": "guest", "lora_path": "pirate"}
    httpx2.post(f"{cluster.url}/v1/load_lora_adapter", json=load).raise_for_status()
    page = tab.show(cluster.url, "chat")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Second model").select_option("guest")
    ask(page, QUESTION)
    answers = page.locator(".answer")
    expect(answers).to_have_count(2)
    expect(answers.nth(0)).to_contain_text("The capital of France is Paris.")
    expect(answers.nth(1)).to_contain_text("Arr!")
    httpx2.post(f"{cluster.url}/v1/unload_lora_adapter", json={"lora_name": "guest"})
    tab.check()


# --- watchers


def watchers(server: Server) -> int:
    """Connections that rank 0's process has open."""
    (rank,) = [
        process
        for process in server.family()
        if any(c.laddr and c.laddr.port == server.port for c in process.net_connections("tcp"))
        and process.pid == server.get("/admin/pipeline")["stages"][0]["pid"]
    ]
    return psutil.Process(rank.pid).num_fds()


@pytest.mark.slow
def test_reloading_the_page_leaves_no_watcher_behind(cluster: Server, tab: Tab) -> None:
    """There are more reloads than there may be watchers."""
    page = tab.show(cluster.url)
    expect(page.locator("[data-state=ready]")).to_be_visible()
    num_files = watchers(cluster)
    for _ in range(50):
        page.reload()
        expect(page.locator("[data-state=ready]")).to_be_visible()
    wait_until(lambda: watchers(cluster) <= num_files + 4)
    tab.check()
