// @ts-check
/** The last ten minutes: speed, latencies, the queue, and how much is kept. */
import uPlot from "../vendor/uplot.js";
import { html, useEffect, useRef } from "../lib/dom.js";
import { NOTHING, digits, percent, seconds } from "../lib/format.js";
import { colour, scheme } from "../lib/palette.js";
import { history, now } from "../lib/store.js";

/** @typedef {{title: string, series: [string, string][], show: (value: number) => string, top?: number, minTop?: number}} Chart */

const HEIGHT = 120;
const MIN_SHOWN_SECONDS = 60;
const SHORT_SECONDS = 300;
const tokensPerSecond = (/** @type {number} */ value) => `${digits(value)}/s`;
const number = (/** @type {number} */ value) => String(Math.round(value));

/** @type {Chart[]} */
const CHARTS = [
  { title: "Tokens generated", series: [["rate", "tokens"]], show: tokensPerSecond },
  { title: "Time to first token", series: [["first", "mean"]], show: seconds },
  { title: "Between two tokens", series: [["next", "mean"]], show: seconds },
  { title: "Requests", series: [["running", "running"], ["waiting", "waiting"]], show: number, minTop: 4 },
  { title: "Keys and values in use", series: [["kv", "of capacity"]], show: percent, top: 1 },
  { title: "Prompt tokens from the cache", series: [["cached", "cached"]], show: percent, top: 1 },
];

export function View() {
  return html`<section aria-labelledby="charts-title">
    <h2 id="charts-title" class="section">Ten minutes</h2>
    <div class="charts">${CHARTS.map((chart) => html`<${Panel} key=${chart.title} chart=${chart} />`)}</div>
  </section>`;
}

/** @param {{chart: Chart}} props */
function Panel({ chart }) {
  const holder = useRef(/** @type {HTMLElement | null} */ (null));
  void now.value;
  useEffect(() => keepDrawn(/** @type {HTMLElement} */ (holder.current), chart), [scheme.value]);
  return html`<figure class="panel chart">
    <figcaption>
      <h3>${chart.title}</h3>
      ${chart.series.map(([name, title], place) => {
        const value = history.latest(name);
        return html`<p class=${`s${place}`}><span>${title}</span> <b>${value == null ? NOTHING : chart.show(value)}</b></p>`;
      })}
    </figcaption>
    <div class="canvas" ref=${holder} aria-hidden="true"></div>
  </figure>`;
}

/** Draws a chart once a second until it is stopped. @param {HTMLElement} holder @param {Chart} chart */
function keepDrawn(holder, chart) {
  const plot = new /** @type {any} */ (uPlot)(options(holder.clientWidth, chart), data(chart), holder);
  let drawn = history.version;
  const timer = setInterval(() => {
    if (document.hidden || drawn === history.version) return;
    drawn = history.version;
    plot.setData(data(chart));
  }, 1000);
  const resizing = new ResizeObserver(() => plot.setSize({ width: holder.clientWidth, height: HEIGHT }));
  resizing.observe(holder);
  return () => {
    clearInterval(timer);
    resizing.disconnect();
    plot.destroy();
  };
}

/** @param {Chart} chart */
const data = (chart) => [history.series.time, ...chart.series.map(([name]) => history.series[name])];

/** @param {number} width @param {Chart} chart */
function options(width, chart) {
  const axis = { stroke: colour("muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const grid = { stroke: colour("line"), width: 1 };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { points: { size: 6 }, drag: { x: false, y: false }, sync: { key: "brigade" } },
    scales: {
      x: { range: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ last) => [(last ?? 0) - Math.max(MIN_SHOWN_SECONDS, history.seconds()), last ?? 0] },
      y: { range: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ maxValue) => [0, chart.top ?? (Math.max(1.1 * maxValue, chart.minTop ?? 0) || 1)] },
    },
    axes: [
      { ...axis, grid: { show: false }, size: 22, space: 70, values: clock },
      { ...axis, grid, size: 58, space: 34, values: (/** @type {any} */ _, /** @type {number[]} */ marks) => marks.map(chart.show) },
    ],
    series: [{}, ...chart.series.map((_, place) => line(place))],
  };
}

/** @param {any} _ @param {number[]} marks */
function clock(_, marks) {
  /** @type {Intl.DateTimeFormatOptions} */
  const shown = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (history.seconds() < SHORT_SECONDS) shown.second = "2-digit";
  return marks.map((mark) => new Date(mark * 1000).toLocaleTimeString([], shown));
}

/** The second line is dashed: colour is not all that tells them apart. @param {number} place */
function line(place) {
  return {
    stroke: colour(place ? "second" : "accent"),
    width: 1.5,
    dash: place ? [4, 3] : undefined,
    points: { show: false },
    spanGaps: false,
  };
}
