// @ts-check
/** The last ten minutes: speed, latencies, the queue, and how much is kept. */
import { html, useEffect, useRef } from "../lib/dom.js";
import { NOTHING, clock, digits, percent, seconds } from "../lib/format.js";
import { CACHED, FIRST, KV, NEXT, RATE, RUNNING, TIME, WAITING } from "../lib/history.js";
import { drawPlot } from "../lib/plot.js";
import { history, now, pipeline, timeline } from "../lib/store.js";

/** @typedef {import("../lib/types.d.ts").SampleRow} SampleRow */
/** @typedef {{title: string, series: [number, string][], show: (value: number) => string, top?: number, isWhole?: boolean}} Chart */

const HEIGHT = 120;
const MIN_SHOWN_SECONDS = 60;
const MAX_GAP_SECONDS = 3;
const tokensPerSecond = (/** @type {number} */ value) => `${digits(value)}/s`;

/** @type {Chart[]} */
const CHARTS = [
  { title: "Tokens generated", series: [[RATE, "tokens"]], show: tokensPerSecond },
  { title: "Time to first token", series: [[FIRST, "mean"]], show: seconds },
  { title: "Between two tokens", series: [[NEXT, "mean"]], show: seconds },
  { title: "Requests", series: [[RUNNING, "running"], [WAITING, "waiting"]], show: String, isWhole: true },
  { title: "KV cache", series: [[KV, "in use"]], show: percent, top: 1 },
  { title: "Prompt tokens from the cache", series: [[CACHED, "cached"]], show: percent, top: 1 },
];

export function View() {
  return html`<section aria-labelledby="charts-title">
    <h2 id="charts-title" class="section">Ten minutes</h2>
    <div class="charts">${CHARTS.map((chart) => html`<${Panel} key=${chart.title} chart=${chart} />`)}</div>
  </section>`;
}

/** @param {{chart: Chart}} props */
function Panel({ chart }) {
  const plot = useRef(/** @type {SVGSVGElement | null} */ (null));
  void now.value;
  useEffect(() => keepDrawn(/** @type {SVGSVGElement} */ (plot.current), chart), []);
  return html`<figure class="panel chart">
    <figcaption>
      <h3>${chart.title}</h3>
      ${chart.series.map(([place, title], number) => {
        const value = current(place);
        return html`<p class=${`s${number}`}><span>${title}</span> <b>${value == null ? NOTHING : chart.show(value)}</b></p>`;
      })}
    </figcaption>
    <svg ref=${plot} height=${HEIGHT} aria-hidden="true"></svg>
  </figure>`;
}

/** What the captions show. The number of requests is that of the head. @param {number} place */
function current(place) {
  if (place === RUNNING) return pipeline.value?.num_running;
  if (place === WAITING) return pipeline.value?.num_waiting;
  return history.latest(place);
}

/** Draws a chart whenever there is a new sample, until it is stopped. @param {SVGSVGElement} svg @param {Chart} chart */
function keepDrawn(svg, chart) {
  /** @type {SampleRow[] | null} */
  let drawn = null;
  const draw = () => {
    if (document.hidden || drawn === history.samples || !svg.clientWidth) return;
    drawn = history.samples;
    drawPlot(svg, plotOf(chart, svg.clientWidth));
  };
  const stop = now.subscribe(draw);
  const resizing = new ResizeObserver(() => {
    drawn = null;
    draw();
  });
  resizing.observe(svg);
  return () => {
    stop();
    resizing.disconnect();
  };
}

/** @param {Chart} chart @param {number} width @returns {import("../lib/plot.js").Plot} */
function plotOf(chart, width) {
  const to = history.latest(TIME) ?? timeline.time;
  const lines = chart.series.map(([place]) => history.samples.map((row) => /** @type {[number, number | null]} */ ([row[TIME], row[place]])));
  const highest = Math.max(...lines.flat().map(([, value]) => value ?? 0));
  return {
    width,
    height: HEIGHT,
    from: to - Math.max(MIN_SHOWN_SECONDS, history.seconds()),
    to,
    top: chart.top ?? (highest || 1),
    isWhole: chart.isWhole ?? false,
    maxGap: MAX_GAP_SECONDS,
    show: chart.show,
    clock,
    lines,
  };
}
