/** The last ten minutes: speed, latencies, the queue, and how much is kept. */
import { h, redraw } from "../lib/dom.js";
import { NOTHING, clock, digits, percent, seconds } from "../lib/format.js";
import { multiples, pathOf, roundStep } from "../lib/plot.js";
import { latest, state, timeline } from "../lib/store.js";

/** @import { Measure } from "../lib/types.d.ts" */
/** @typedef {{title: string, series: [Measure, string][], show: (value: number) => string, top?: number, isWhole?: boolean}} Chart */

const HEIGHT = 120;
const MIN_SHOWN_SECONDS = 60;
const MAX_GAP_SECONDS = 3;
const CLOCK_STEPS = [10, 30, 60, 120, 300];
// Pixels: the room for times and for values, and the least distance between their marks.
const BOTTOM = 22;
const LEFT = 62;
const TOP = 8;
const CLOCK_WIDTH = 80;
const VALUE_HEIGHT = 24;

/** @type {Chart[]} */
const CHARTS = [
  { title: "Tokens generated", series: [["rate", "tokens"]], show: (value) => `${digits(value)}/s` },
  { title: "Time to first token", series: [["first", "mean"]], show: seconds },
  { title: "Between two tokens", series: [["next", "mean"]], show: seconds },
  { title: "Requests", series: [["running", "running"], ["waiting", "waiting"]], show: String, isWhole: true },
  { title: "KV cache", series: [["kv", "in use"]], show: percent, top: 1 },
  { title: "Prompt tokens from the cache", series: [["cached", "cached"]], show: percent, top: 1 },
];
let width = 0; // of each chart, in pixels
addEventListener("resize", redraw);

export function charts() {
  return h.section(
    { "aria-labelledby": "charts-title" },
    h.h2({ id: "charts-title", class: "section" }, "Ten minutes"),
    h.div({ class: "charts" }, CHARTS.map(panel)),
  );
}

/** Draws again if the charts have another width. @param {Element} element */
function measure({ clientWidth, isConnected }) {
  if (!isConnected || clientWidth === width) return;
  width = clientWidth;
  redraw();
}

/** @param {Chart} chart */
function panel(chart) {
  const { title, series, show } = chart;
  const values = series.map(([measure, name], line) => {
    const value = current(measure);
    return h.p({ class: `s${line}` }, h.span(name), " ", h.b(value == null ? NOTHING : show(value)));
  });
  return h.figure({ class: "panel chart" }, h.figcaption(h.h3(title), values), h.div({ created: redraw, drawn: measure }, plotOf(chart)));
}

/** What the captions show. The numbers of requests are those of the head. @param {Measure} name */
function current(name) {
  if (name === "running") return state.pipeline?.num_running;
  if (name === "waiting") return state.pipeline?.num_waiting;
  return latest(name);
}

/** Lines over time. The axis of values ends with its first mark that is not below the largest value. @param {Chart} chart */
function plotOf({ series, show, top, isWhole }) {
  const { samples } = state;
  const to = latest("time") ?? timeline.time;
  const from = Math.min(to - MIN_SHOWN_SECONDS, samples[0]?.time ?? to);
  const values = samples.flatMap((sample) => series.map(([measure]) => sample[measure] ?? 0));
  const largest = top ?? (Math.max(0, ...values) || 1);
  const bottom = HEIGHT - BOTTOM;
  const rise = roundStep(largest, (bottom - TOP) / VALUE_HEIGHT, isWhole);
  const highest = Math.ceil(largest / rise - 1e-9) * rise;
  const x = (/** @type {number} */ time) => LEFT + ((time - from) / (to - from)) * (width - LEFT);
  const y = (/** @type {number} */ value) => bottom - (value / highest) * (bottom - TOP);
  const step = CLOCK_STEPS.find((each) => x(from + each) - LEFT >= CLOCK_WIDTH) ?? to - from;
  const marks = multiples(0, highest, rise);
  return h.svg(
    { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-hidden": true },
    marks.map((value) => h.path({ class: "grid", d: `M${LEFT} ${y(value)}H${width}` })),
    marks.map((value) => h.text({ x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, show(value))),
    multiples(from + step / 4, to - step / 4, step).map((time) =>
      h.text({ x: x(time), y: HEIGHT - 5, "text-anchor": "middle" }, clock(time, step < 60)),
    ),
    series.map(([measure], number) => h.path({ class: `line s${number}`, d: pathOf(samples, measure, MAX_GAP_SECONDS, x, y) })),
  );
}
