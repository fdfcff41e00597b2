"""Takes the pictures of docs/page.md: `python -m tests.page.pictures MODEL [FOLDER]`.

They show three ranks on this machine that serve a model while six clients ask it, so the model
should be a real one. The chat is with the embedded model. Few colours keep the files small.
"""

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from PIL import Image
from playwright.sync_api import Page, expect

from tests.cluster.servers import ROOT, Server, running
from tests.page.browser import browsing, opened

NUM_RANKS = 3
NUM_COLOURS = 128
WIDTH = 1280
# What is shown has to be reached first: prompts are read, and lanes are full.
SECONDS = 8
QUESTIONS = ["What is the capital of France?", "Who wrote Hamlet?"]
TOPICS = ["rivers", "bread", "the moon", "trains", "bees", "glass"]


@contextmanager
def asking(server: Server) -> Iterator[None]:
    """One client for each topic, each with a long answer after the other."""
    ended = threading.Event()

    def ask(number: int, topic: str) -> None:
        body = {
            "messages": [
                {"role": "user", "content": f"Tell me about {topic}. " * (4 * number + 1)}
            ],
            "max_tokens": 400,
            "ignore_eos": True,
        }
        headers = {"x-request-id": f"chat-{number}"}
        with httpx2.Client(timeout=600) as client:
            while not ended.is_set():
                client.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)

    threads = [
        threading.Thread(target=ask, args=each, daemon=True) for each in enumerate(TOPICS, start=1)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def take(page: Page, path: Path, last: str) -> None:
    """Saves the window down to the last of these elements."""
    while True:
        height = bottom(page, last)
        data = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
        if bottom(page, last) == height:  # It does not move if the texts above it change.
            break
    image = Image.open(io.BytesIO(data)).convert("RGB")
    # Unlike the default method, this one keeps the colours of small areas.
    image.quantize(NUM_COLOURS, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size} bytes")


def bottom(page: Page, selector: str) -> int:
    """Where the last of these elements ends, with a margin, in pixels."""
    box = page.locator(selector).last.bounding_box()
    assert box is not None
    return int(box["y"] + box["height"]) + 12


def take_chat(server: Server, page: Page, folder: Path) -> None:
    page.goto(f"{server.url}/#chat")
    for number, question in enumerate(QUESTIONS, start=1):
        page.get_by_label("Question").fill(question)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".answer[data-state=done]")).to_have_count(number)
    page.wait_for_timeout(1000)  # until Markdown is rendered
    take(page, folder / "page-chat.png", ".answer")


def take_views(server: Server, page: Page, folder: Path) -> None:
    page.goto(f"{server.url}/#requests")
    with asking(server):
        expect(page.locator("[data-request]")).to_have_count(len(TOPICS))
        page.wait_for_timeout(1000 * SECONDS)
        take(page, folder / "page-requests.png", "table")
        page.locator("nav a[href='#pipeline']").click()
        page.wait_for_timeout(1000 * SECONDS)
        page.get_by_role("button", name="Pause").click()
        page.wait_for_timeout(500)
        take(page, folder / "page-pipeline.png", ".gantt")


def main() -> None:
    model = Path(sys.argv[1])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs"
    viewport = {"width": WIDTH, "height": 900}
    with browsing() as browser, opened(browser, viewport=viewport, color_scheme="light") as tab:
        with running(NUM_RANKS) as server:
            take_chat(server, tab.page, folder)
        with running(NUM_RANKS, model=model) as server:
            take_views(server, tab.page, folder)


if __name__ == "__main__":
    main()
