/** The live chart of the last seconds: one lane for each stage, one colour for each request. */
import { call } from "../lib/api.js";
import { h, redraw } from "../lib/dom.js";
import { seconds } from "../lib/format.js";
import { drawLanes, heightOf, stepAt } from "../lib/lanes.js";
import { attempt, state, timeline } from "../lib/store.js";

/** @import { Child, Span, Window } from "../lib/types.d.ts" */

const WINDOWS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20];
const DEFAULT_WINDOW = 2;
const DELAY_SECONDS = 0.35; // Nearly all reports of the stages arrive within this time.
const FRAME_SECONDS = 1 / 15;
const CALM_FRAME_SECONDS = 1;
const OVERLAP_SECONDS = 2;
const TRACE_SECONDS = 60;
const MAX_NAMES = 8;

let size = WINDOWS.indexOf(DEFAULT_WINDOW);
let pausedAt = /** @type {number | null} */ (null);
let pointed = /** @type {Span | undefined} */ (undefined);
/** @type {Window} */
const shown = { from: 0, to: 1, width: 1, ranks: [] };
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function gantt() {
  const overlap = timeline.overlap(timeline.time - OVERLAP_SECONDS, timeline.time);
  const words = `of ${state.stages.length} stages at once`;
  return h.section(
    { class: "panel gantt", "aria-labelledby": "gantt-title" },
    h.div(
      { class: "tools" },
      h.h2({ id: "gantt-title" }, "Steps"),
      h.p({ class: "overlap", "data-overlap": overlap.toFixed(3) }, h.b(overlap.toFixed(1)), ` ${words}`),
      controls(),
    ),
    h.div(
      { class: "lanes" },
      h.ul({ "aria-hidden": true }, state.stages.toReversed().map(({ rank }) => h.li(`rank ${rank}`))),
      h.div(h.canvas({ role: "img", "aria-label": `Steps: ${overlap.toFixed(1)} ${words}`, ...CANVAS })),
    ),
    h.p({ class: "legend", id: "gantt-help" }, pointed ? about(pointed) : legend()),
  );
}

function controls() {
  const isPaused = pausedAt !== null;
  return h.div(
    { class: "buttons" },
    h.button({ "aria-pressed": isPaused, onclick: togglePause }, isPaused ? "Resume" : "Pause"),
    h.span(
      { class: "zoom", role: "group", "aria-label": "Zoom" },
      h.button({ "aria-label": "Zoom out", onclick: () => zoom(1) }, "−"),
      h.span({ class: "length" }, seconds(WINDOWS[size])),
      h.button({ "aria-label": "Zoom in", onclick: () => zoom(-1) }, "+"),
    ),
    h.button({ title: "for ui.perfetto.dev", onclick: () => attempt("save the trace", saveTrace) }, "Save trace"),
  );
}

const CANVAS = {
  tabindex: 0,
  "aria-describedby": "gantt-help",
  created: animate,
  onpointermove: (/** @type {PointerEvent} */ { offsetX, offsetY }) => point(stepAt(shown, timeline, offsetX, offsetY)),
  onpointerleave: () => point(undefined),
  onkeydown: onKey,
};

function legend() {
  return [
    h.span(h.i({ class: "solid" }), "decode"),
    h.span(h.i({ class: "hollow" }), "prefill"),
    h.span("One colour for each request."),
    h.span({ class: "by-keyboard" }, "Space pauses, + and − zoom, arrows move."),
  ];
}

/** @param {Span} span @returns {Child} */
function about({ kind, step, start, end, rows, tokens, sequences }) {
  const names = new Set(sequences.map((sequence) => timeline.owners.get(sequence)?.id ?? `sequence ${sequence}`));
  return [
    h.span(h.b(kind), ` step ${step}, ${seconds(end - start)}`),
    h.span(`${rows} rows, ${tokens} tokens`),
    [...names].slice(0, MAX_NAMES).map((name) => h.span(name)),
  ];
}

/** @param {Span | undefined} step */
function point(step) {
  if (step === pointed) return;
  pointed = step;
  redraw();
}

async function saveTrace() {
  const trace = await call(`admin/trace?seconds=${TRACE_SECONDS}`, { isAdmin: true });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await trace.blob());
  link.download = "brigade-trace.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// --- the controls

/** @param {number | null} time */
function pauseAt(time) {
  pausedAt = time;
  redraw();
}

const togglePause = () => pauseAt(pausedAt === null ? timeline.now() - DELAY_SECONDS : null);

/** @param {number} change */
function zoom(change) {
  size = Math.min(WINDOWS.length - 1, Math.max(0, size + change));
  redraw();
}

/** @param {number} share of the window */
function move(share) {
  pauseAt(Math.min(timeline.time, (pausedAt ?? timeline.now() - DELAY_SECONDS) + share * WINDOWS[size]));
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  const actions = /** @type {Record<string, () => void>} */ ({
    " ": togglePause,
    "+": () => zoom(-1),
    "=": () => zoom(-1),
    "-": () => zoom(1),
    ArrowLeft: () => move(-0.2),
    ArrowRight: () => move(0.2),
  });
  if (event.ctrlKey || event.metaKey || !actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

// --- drawing

/** Draws until the canvas is gone. @param {HTMLCanvasElement} element */
function animate(element) {
  const pen = /** @type {CanvasRenderingContext2D} */ (element.getContext("2d"));
  let drawnAt = -Infinity;
  let drawnFor = "";
  requestAnimationFrame(again);
  /** @param {number} milliseconds */
  function again(milliseconds) {
    if (!element.isConnected) return;
    requestAnimationFrame(again);
    const length = WINDOWS[size];
    const wait = calm.matches ? CALM_FRAME_SECONDS : FRAME_SECONDS;
    const ranks = state.stages.map(({ rank }) => rank).reverse();
    const width = element.clientWidth;
    const wanted = [length, width, devicePixelRatio, pausedAt, ranks].join();
    const isDue = pausedAt === null && milliseconds - drawnAt >= 1000 * wait;
    if (!isDue && wanted === drawnFor) return;
    drawnAt = milliseconds;
    drawnFor = wanted;
    const to = pausedAt ?? timeline.now() - DELAY_SECONDS;
    Object.assign(shown, { from: to - length, to, width, ranks });
    fit(element, width, heightOf(ranks.length));
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    drawLanes(pen, shown, timeline);
  }
}

/** @param {HTMLCanvasElement} element @param {number} width @param {number} height in CSS pixels */
function fit(element, width, height) {
  const [columns, rows] = [width, height].map((length) => Math.round(length * devicePixelRatio));
  if (element.width === columns && element.height === rows) return;
  Object.assign(element, { width: columns, height: rows });
  element.style.height = `${height}px`;
}
