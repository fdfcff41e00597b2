"""How many stages are active at the same time, as the page shows it."""

import time

from playwright.sync_api import Page

# The share of the columns of pixels in which all lanes are active, of those in which one is.
ACTIVE_TOGETHER = """
() => {
    const canvas = document.querySelector(".gantt canvas");
    const ratio = canvas.width / canvas.clientWidth;
    const lane = Math.round(44 * ratio);
    const copy = document.createElement("canvas");
    [copy.width, copy.height] = [canvas.width, canvas.height];
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const numLanes = Math.round((canvas.clientHeight - 22) / 44);
    const image = context.getImageData(0, 0, canvas.width, canvas.height).data;
    const rows = [...Array(numLanes).keys()].map((number) => {
        const first = 4 * canvas.width * (number * lane + Math.round(ratio));
        return image.subarray(first, first + 4 * canvas.width);
    });
    const edge = getComputedStyle(document.documentElement).getPropertyValue("--lane");
    const probe = document.createElement("i");
    probe.style.color = edge;
    document.body.append(probe);
    const lanes = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
    probe.remove();
    const isActive = (row, x) =>
        [0, 1, 2].some((part) => Math.abs(row[4 * x + part] - lanes[part]) > 60);
    let any = 0, all = 0;
    for (let x = 0; x < canvas.width; x += 1) {
        const active = rows.filter((row) => isActive(row, x)).length;
        any += active > 0;
        all += active === rows.length;
    }
    return { any, all };
}
"""


def overlap(page: Page) -> float:
    shown = page.locator("[data-overlap]").get_attribute("data-overlap")
    return float(shown or 0)


def measured(page: Page) -> tuple[float, float] | None:
    """The overlap by the chart's data, and by its pixels, of two seconds of work. None if no work
    was drawn."""
    time.sleep(2.5)
    by_data = overlap(page)
    page.get_by_role("button", name="Pause").click()
    for _ in range(3):
        page.get_by_role("button", name="Zoom in").click()
    time.sleep(0.2)
    pixels = page.evaluate(ACTIVE_TOGETHER)
    for _ in range(3):
        page.get_by_role("button", name="Zoom out").click()
    page.get_by_role("button", name="Resume").click()
    if not pixels["any"]:
        return None
    return by_data, pixels["all"] / pixels["any"]
