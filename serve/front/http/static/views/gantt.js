// @ts-check
/** The live chart of the last seconds: one lane for each stage, one colour for each request. */
import { redraw, show, tags } from "../lib/dom.js";
import { seconds } from "../lib/format.js";
import { drawLanes, heightOf, stepAt } from "../lib/lanes.js";
import { state, timeline } from "../lib/store.js";
import { END, KIND, ROWS, SEQUENCES, START, STEP, TOKENS } from "../lib/timeline.js";
import { openInPerfetto, saveTrace } from "../lib/trace.js";

/** @import { Window } from "../lib/types.d.ts" */

const { b, br, button, canvas, code, div, h2, i, li, p, section, span, ul } = tags;
const WINDOWS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20];
const DEFAULT_WINDOW = 2;
const DELAY_SECONDS = 0.35; // Nearly all reports of the stages arrive within this time.
const FRAME_SECONDS = 1 / 15;
// A short window would flicker if it moved all the time, so it moves in steps.
const STILL_BELOW = 1.5;
const STILL_SECONDS = 1;
const OVERLAP_SECONDS = 2;
const MAX_NAMES = 8;

let size = WINDOWS.indexOf(DEFAULT_WINDOW);
let pausedAt = /** @type {number | null} */ (null);
let trouble = "";
/** @type {Window} */
const shown = { from: 0, to: 1, width: 1, ranks: [] };
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const tip = document.createElement("div");
tip.className = "tip";

export function gantt() {
  const overlap = timeline.overlap(timeline.time - OVERLAP_SECONDS, timeline.time);
  const total = state.stages.length;
  const summary = overlap
    ? `Of ${total} stages, ${overlap.toFixed(1)} computed at the same time in the last two seconds.`
    : `None of ${total} stages computed in the last two seconds.`;
  return section(
    { class: "panel gantt", "aria-labelledby": "gantt-title" },
    div(
      { class: "tools" },
      h2({ id: "gantt-title" }, "Steps"),
      p({ class: "overlap", "data-overlap": overlap.toFixed(3) }, b(overlap.toFixed(1)), ` of ${total} stages at once`),
      controls(),
    ),
    div(
      { class: "lanes" },
      ul({ "aria-hidden": true }, state.stages.toReversed().map(({ rank }) => li(`rank ${rank}`))),
      div({ class: "plot" }, canvas({ role: "img", "aria-label": summary, ...CANVAS }), tip),
    ),
    p(
      { class: "legend", id: "gantt-help" },
      span(i({ class: "solid" }), "decode"),
      span(i({ class: "stripes" }), "prefill"),
      span(i({ class: "recovery" }), "recovery"),
      span("One colour for each request."),
      span({ class: "by-keyboard" }, "Space pauses, + and − zoom, arrows move."),
      trouble && span({ role: "alert" }, trouble),
    ),
  );
}

function controls() {
  const isPaused = pausedAt !== null;
  return div(
    { class: "buttons" },
    button({ type: "button", "aria-pressed": isPaused, onclick: togglePause }, isPaused ? "Resume" : "Pause"),
    span(
      { class: "zoom", role: "group", "aria-label": "Zoom" },
      button({ type: "button", "aria-label": "Zoom out", onclick: () => zoom(1) }, "−"),
      span({ class: "length" }, seconds(WINDOWS[size])),
      button({ type: "button", "aria-label": "Zoom in", onclick: () => zoom(-1) }, "+"),
    ),
    button({ type: "button", onclick: () => report(openInPerfetto()) }, "Open in Perfetto"),
    button({ type: "button", onclick: () => report(saveTrace()) }, "Save trace"),
  );
}

const CANVAS = {
  tabindex: 0,
  "aria-describedby": "gantt-help",
  created: animate,
  onpointermove: showTip,
  onpointerleave: () => (tip.hidden = true),
  onkeydown: onKey,
  onwheel: onWheel,
};

/** @param {PointerEvent} event */
function showTip({ offsetX: x, offsetY: y }) {
  const row = stepAt(shown, timeline, x, y);
  tip.hidden = !row;
  if (!row) return;
  const names = new Set(row[SEQUENCES].map((sequence) => timeline.owners.get(sequence)?.id ?? `sequence ${sequence}`));
  show(
    tip,
    b(row[KIND]), ` step ${row[STEP]}, ${seconds(row[END] - row[START])}`,
    br(), `${row[ROWS]} rows, ${row[TOKENS]} tokens`,
    [...names].slice(0, MAX_NAMES).map((name) => [br(), code(name)]),
  );
  tip.style.left = `${Math.min(x + 14, Math.max(0, shown.width - tip.offsetWidth))}px`;
  tip.style.top = `${y + 16}px`;
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

/** Zooms like a map, but leaves plain scrolling to the page. @param {WheelEvent} event */
function onWheel(event) {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(Math.sign(event.deltaY));
}

/** @param {Promise<void>} action */
async function report(action) {
  trouble = "";
  await action.catch((error) => (trouble = error.message));
  redraw();
}

// --- drawing

/** Draws until the canvas is gone. @param {HTMLCanvasElement} element */
function animate(element) {
  const pen = /** @type {CanvasRenderingContext2D} */ (element.getContext("2d"));
  let drawnAt = -Infinity;
  let drawnFor = "";
  tip.hidden = true;
  requestAnimationFrame(again);
  /** @param {number} milliseconds */
  function again(milliseconds) {
    if (!element.isConnected) return;
    requestAnimationFrame(again);
    const length = WINDOWS[size];
    const wait = calm.matches || length < STILL_BELOW ? STILL_SECONDS : FRAME_SECONDS;
    const ranks = state.stages.map(({ rank }) => rank).reverse();
    const width = element.parentElement?.clientWidth ?? 0;
    const wanted = [length, width, devicePixelRatio, pausedAt, ranks].join();
    const isDue = pausedAt === null && milliseconds - drawnAt >= 1000 * wait;
    if (!width || (!isDue && wanted === drawnFor)) return;
    drawnAt = milliseconds;
    drawnFor = wanted;
    const to = pausedAt ?? timeline.now() - DELAY_SECONDS;
    Object.assign(shown, { from: to - length, to, width, ranks });
    fit(element, pen, width, heightOf(ranks.length));
    drawLanes(pen, shown, timeline);
  }
}

/** @param {HTMLCanvasElement} element @param {CanvasRenderingContext2D} pen @param {number} width @param {number} height in CSS pixels */
function fit(element, pen, width, height) {
  const [columns, rows] = [width, height].map((length) => Math.round(length * devicePixelRatio));
  if (element.width !== columns || element.height !== rows) {
    Object.assign(element, { width: columns, height: rows });
    Object.assign(element.style, { width: `${width}px`, height: `${height}px` });
  }
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
}
