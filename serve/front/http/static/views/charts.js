// @ts-check
/** The last ten minutes: speed, latencies, the queue, and how much is kept. */
import { redraw, tags } from "../lib/dom.js";
import { NOTHING, digits, percent, seconds } from "../lib/format.js";
import { CACHED, FIRST, KV, NEXT, RATE, RUNNING, TIME, WAITING } from "../lib/history.js";
import { plot } from "../lib/plot.js";
import { history, state, timeline } from "../lib/store.js";

/** @import { Child } from "../lib/types.d.ts" */
/** @typedef {{title: string, series: [number, string][], show: (value: number) => string, top?: number, isWhole?: boolean}} Chart */

const { b, div, figcaption, figure, h2, h3, p, section, span } = tags;
const HEIGHT = 120;
const MIN_SHOWN_SECONDS = 60;
const MAX_GAP_SECONDS = 3;

/** @type {Chart[]} */
const CHARTS = [
  { title: "Tokens generated", series: [[RATE, "tokens"]], show: (value) => `${digits(value)}/s` },
  { title: "Time to first token", series: [[FIRST, "mean"]], show: seconds },
  { title: "Between two tokens", series: [[NEXT, "mean"]], show: seconds },
  { title: "Requests", series: [[RUNNING, "running"], [WAITING, "waiting"]], show: String, isWhole: true },
  { title: "KV cache", series: [[KV, "in use"]], show: percent, top: 1 },
  { title: "Prompt tokens from the cache", series: [[CACHED, "cached"]], show: percent, top: 1 },
];
let width = 0; // of each chart, in pixels
let drawn = { width: -1, samples: history.samples, plots: /** @type {Child[]} */ ([]) };
const resizing = new ResizeObserver(([{ contentRect }]) => {
  width = contentRect.width;
  redraw();
});

export function charts() {
  const { samples } = history;
  if (drawn.width !== width || drawn.samples !== samples) drawn = { width, samples, plots: CHARTS.map(plotOf) };
  return section(
    { "aria-labelledby": "charts-title" },
    h2({ id: "charts-title", class: "section" }, "Ten minutes"),
    div({ class: "charts" }, CHARTS.map(panel)),
  );
}

/** @param {Chart} chart @param {number} number */
function panel({ title, series, show }, number) {
  const created = (/** @type {Element} */ element) => resizing.observe(element);
  const values = series.map(([place, name], line) => {
    const value = current(place);
    return p({ class: `s${line}` }, span(name), " ", b(value == null ? NOTHING : show(value)));
  });
  return figure({ class: "panel chart" }, figcaption(h3(title), values), div(number ? {} : { created }, drawn.plots[number]));
}

/** What the captions show. The number of requests is that of the head. @param {number} place */
function current(place) {
  if (place === RUNNING) return state.pipeline?.num_running;
  if (place === WAITING) return state.pipeline?.num_waiting;
  return history.latest(place);
}

/** @param {Chart} chart */
function plotOf({ series, show, top, isWhole = false }) {
  const to = history.latest(TIME) ?? timeline.time;
  const lines = series.map(([place]) => history.samples.map((row) => /** @type {[number, number | null]} */ ([row[TIME], row[place]])));
  const highest = Math.max(...lines.flat().map(([, value]) => value ?? 0));
  return plot({
    width,
    height: HEIGHT,
    from: to - Math.max(MIN_SHOWN_SECONDS, history.seconds()),
    to,
    top: top ?? (highest || 1),
    isWhole,
    maxGap: MAX_GAP_SECONDS,
    show,
    lines,
  });
}
