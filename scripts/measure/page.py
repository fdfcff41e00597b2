"""The web page: what a watcher costs decoding, how late a step is drawn, the time to the first
paint, and the processor time of the browser."""

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import httpx2
import psutil
from playwright.async_api import Browser, Page, async_playwright

from scripts.measure import servers
from scripts.measure.settings import TIMEOUT, Row, Settings
from scripts.measure.sums import p50
from serve.bench.records import quantile

NUM_CLIENTS = 8
ANSWER_TOKENS = 4000  # Longer than a run: no client ends one answer and begins another.
SETTLE_SECONDS = 3.0
NUM_LOADS = 10
WINDOW_SECONDS = 10  # of the chart; no other part of the page asks for a window of this length
# Notes how long after its end each step of a stage is first drawn completely. The browser and the
# stages share one clock.
NOTE_DELAYS = """
async (length) => {
    const { timeline } = await import("/ui/lib/store.js");
    const END = 6, between = timeline.between, begin = Date.now() / 1000;
    const drawn = new Map();
    window.delays = [];
    timeline.between = (rank, from, to) => {
        const rows = between.call(timeline, rank, from, to);
        if (Math.abs(to - from - length) > 1e-6) return rows;
        const last = drawn.get(rank) ?? begin;
        const now = Date.now() / 1000;
        for (const row of rows) {
            if (row[END] <= last || row[END] > to) continue;
            window.delays.push(now - row[END]);
            drawn.set(rank, Math.max(row[END], drawn.get(rank) ?? 0));
        }
        return rows;
    };
}
"""
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def page(settings: Settings) -> Row:
    """Measures eight clients on two ranks: in turn without a watcher of the page's events and with
    one, and then with a browser."""
    data: dict[str, Any] = {}
    with servers.running(servers.BRIGADE_2, settings.model) as url:
        asyncio.run(_measure(url, settings, data))
    alone, watched, shown = (data["rates"][kind] for kind in ("alone", "watched", "shown"))
    ratios = [one / other for one, other in zip(watched, alone, strict=True)]
    rows = [
        ["decode tok/s, 8 clients, nobody watches", f"{p50(alone):.1f}", ""],
        ["with one watcher ÷ without, p50 of pairs", f"{p50(ratios):.3f}", "≥ 0.98"],
        ["with a browser on the same machine ÷ without", f"{p50(shown) / p50(alone):.3f}", ""],
        ["from a step's end to its pixels, p95, ms", f"{data['delay_p95'] * 1000:.0f}", "≤ 500"],
        ["first paint, p50 of 10 loads, ms", f"{p50(data['first_paint_ms']):.0f}", "≤ 300"],
        ["processor time of the browser, % of a core", f"{data['cpu'] * 100:.0f}", "≤ 20"],
    ]
    table = ["the page", "measured", "wanted"], rows
    return Row({"page": data}, {"the web page": table})


async def _measure(url: str, settings: Settings, data: dict[str, Any]) -> None:
    seconds = 2 * settings.pass_seconds
    rates: dict[str, list[float]] = {"alone": [], "watched": [], "shown": []}
    delays: list[float] = []
    cpu: list[float] = []
    async with async_playwright() as playwright:
        path = shutil.which("chromium")
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        data["first_paint_ms"] = [await _first_paint(browser, url) for _ in range(NUM_LOADS)]
        async with _asking(url):
            # A B B A: answers grow, and the machine may change its speed.
            for round_ in range(2 * settings.rounds):
                kinds = ["alone", "watched"] if round_ % 2 else ["watched", "alone"]
                for kind in kinds:
                    watching: AbstractAsyncContextManager[None] = nullcontext()
                    if kind == "watched":
                        watching = _watched(url)
                    async with watching:
                        await asyncio.sleep(SETTLE_SECONDS)
                        rates[kind].append(await _rate(url, seconds))
            async with _shown(browser, url) as shown:
                await asyncio.sleep(SETTLE_SECONDS)
                before = _cpu_seconds()
                rates["shown"].append(await _rate(url, seconds))
                cpu.append((_cpu_seconds() - before) / seconds)
                delays += await shown.evaluate("window.delays")
        await browser.close()
    data["rates"] = rates
    data["cpu"] = p50(cpu)
    data["delay_p50"] = p50(delays)
    data["delay_p95"] = quantile(delays, 0.95)
    data["num_delays"] = len(delays)


@asynccontextmanager
async def _asking(url: str) -> AsyncIterator[None]:
    """Runs clients that read long answers."""

    async def read(client: httpx2.AsyncClient, number: int) -> None:
        chat = [{"role": "user", "content": f"question {number}"}]
        body = {
            "messages": chat,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_raw():
                continue

    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        tasks = [asyncio.create_task(read(client, number)) for number in range(NUM_CLIENTS)]
        await asyncio.sleep(SETTLE_SECONDS)
        yield
        ended = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if ended:
        raise SystemExit(f"scripts/bench: {len(ended)} answers ended before the measurement")


@asynccontextmanager
async def _watched(url: str) -> AsyncIterator[None]:
    """Runs a watcher that reads all events."""

    async def read() -> None:
        async with (
            httpx2.AsyncClient(base_url=url, timeout=TIMEOUT) as client,
            client.stream("GET", "/admin/events") as response,
        ):
            response.raise_for_status()
            async for _ in response.aiter_raw():
                continue

    task = asyncio.create_task(read())
    yield
    if task.done():
        task.result()
        raise SystemExit("scripts/bench: the stream of events ended")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _shown(browser: Browser, url: str) -> AsyncIterator[Page]:
    """Opens a page that shows the pipeline, and notes the delays of steps."""
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    await page.goto(url)
    await page.wait_for_selector("[data-state=ready]")
    for _ in range(2):  # from two seconds to ten
        await page.get_by_role("button", name="Zoom out").click()
    await page.evaluate(NOTE_DELAYS, WINDOW_SECONDS)
    yield page
    await page.close()


async def _first_paint(browser: Browser, url: str) -> float:
    """Milliseconds from the navigation to the first paint, with an empty cache."""
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(url)
    await page.wait_for_selector("[data-state=ready]")
    milliseconds = float(await page.evaluate(FIRST_PAINT))
    await context.close()
    return milliseconds


async def _rate(url: str, seconds: float) -> float:
    """Returns tokens per second, by the server's own counter."""
    begin, num_before = time.perf_counter(), await _num_generated(url)
    await asyncio.sleep(seconds)
    end, num_after = time.perf_counter(), await _num_generated(url)
    return (num_after - num_before) / (end - begin)


async def _num_generated(url: str) -> float:
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        text = (await client.get("/metrics")).text
    found = re.search(r"^brigade_generation_tokens_total (\S+)", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def _cpu_seconds() -> float:
    """Returns the processor time of all processes of the browser."""
    family = psutil.Process().children(recursive=True)
    times = [each.cpu_times() for each in family if "chrom" in each.name()]
    return float(sum(each.user + each.system for each in times))
