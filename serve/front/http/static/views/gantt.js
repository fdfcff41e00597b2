// @ts-check
/** The live chart of the last seconds: one lane for each stage, one colour for each request. */
import { html, signal, useEffect, useRef, useSignal } from "../lib/dom.js";
import { seconds } from "../lib/format.js";
import { isCalm } from "../lib/palette.js";
import { now, stages, timeline } from "../lib/store.js";
import { END, KIND, ROWS, SEQUENCES, START, STEP, TOKENS } from "../lib/timeline.js";
import { openInPerfetto, saveTrace } from "../lib/trace.js";
import { draw, heightOf, stepAt } from "./gantt_draw.js";

/** @typedef {import("../lib/types.d.ts").SpanRow} SpanRow */

const WINDOWS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20];
const DEFAULT_WINDOW = 2;
const DELAY_SECONDS = 0.35; // Nearly all reports of the stages arrive within this time.
const FRAME_SECONDS = 1 / 15;
// A short window would flicker if it moved all the time, so it moves in steps.
const STILL_BELOW = 1.5;
const STILL_SECONDS = 1;

const size = signal(WINDOWS.indexOf(DEFAULT_WINDOW));
const pausedAt = signal(/** @type {number | null} */ (null));
const trouble = signal("");

export function Gantt() {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const frame = useRef({ from: 0, to: 1, width: 1, ranks: /** @type {number[]} */ ([]) });
  const tip = useSignal(/** @type {{row: SpanRow, x: number, y: number} | null} */ (null));
  useEffect(() => animate(/** @type {HTMLCanvasElement} */ (canvas.current), frame.current), []);
  /** @param {PointerEvent} event */
  const point = (event) => {
    const { offsetX: x, offsetY: y } = event;
    const row = stepAt(frame.current, timeline, x, y);
    tip.value = row && { row, x, y };
  };
  return html`<section class="panel gantt" aria-labelledby="gantt-title">
    <${Tools} />
    <div class="lanes">
      <ul aria-hidden="true">
        ${[...stages.value].reverse().map((stage) => html`<li key=${stage.rank}>rank ${stage.rank}</li>`)}
      </ul>
      <div class="plot">
        <canvas
          ref=${canvas}
          tabindex="0"
          role="img"
          aria-label=${summary()}
          aria-describedby="gantt-help"
          onPointerMove=${point}
          onPointerLeave=${() => (tip.value = null)}
          onKeyDown=${onKey}
          onWheel=${onWheel}
        ></canvas>
        ${tip.value && html`<${Tip} ...${tip.value} width=${frame.current.width} />`}
      </div>
    </div>
    <p class="legend" id="gantt-help">
      <span><i class="solid"></i>decode</span><span><i class="stripes"></i>prefill</span>
      <span><i class="recovery"></i>recovery</span>
      <span>One colour for each request.</span><span class="by-keyboard">Space pauses, + and − zoom, arrows move.</span>
      ${trouble.value && html`<span role="alert">${trouble.value}</span>`}
    </p>
  </section>`;
}

function summary() {
  void now.value;
  const overlap = timeline.overlap(timeline.time - 2, timeline.time);
  const total = stages.value.length;
  return overlap
    ? `Of ${total} stages, ${overlap.toFixed(1)} computed at the same time in the last two seconds.`
    : `None of ${total} stages computed in the last two seconds.`;
}

function Tools() {
  void now.value;
  const overlap = timeline.overlap(timeline.time - 2, timeline.time);
  const isPaused = pausedAt.value !== null;
  return html`<div class="tools">
    <h2 id="gantt-title">Steps</h2>
    <p class="overlap" data-overlap=${overlap.toFixed(3)}>
      <b>${overlap.toFixed(1)}</b> of ${stages.value.length} stages at once
    </p>
    <div class="buttons">
      <button type="button" aria-pressed=${isPaused} onClick=${togglePause}>${isPaused ? "Resume" : "Pause"}</button>
      <span class="zoom" role="group" aria-label="Zoom">
        <button type="button" aria-label="Zoom out" onClick=${() => zoom(1)}>−</button>
        <span class="length">${seconds(WINDOWS[size.value])}</span>
        <button type="button" aria-label="Zoom in" onClick=${() => zoom(-1)}>+</button>
      </span>
      <button type="button" onClick=${() => report(openInPerfetto())}>Open in Perfetto</button>
      <button type="button" onClick=${() => report(saveTrace())}>Save trace</button>
    </div>
  </div>`;
}

/** @param {{row: SpanRow, x: number, y: number, width: number}} props */
function Tip({ row, x, y, width }) {
  const element = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    const own = /** @type {HTMLElement} */ (element.current);
    own.style.left = `${Math.min(x + 14, Math.max(0, width - own.offsetWidth))}px`;
    own.style.top = `${y + 16}px`;
  });
  const names = row[SEQUENCES].map((sequence) => timeline.owners.get(sequence)?.id ?? `sequence ${sequence}`);
  return html`<div class="tip" ref=${element}>
    <b>${row[KIND]}</b> step ${row[STEP]}, ${seconds(row[END] - row[START])}
    <br />${row[ROWS]} rows, ${row[TOKENS]} tokens
    ${[...new Set(names)].slice(0, 8).map((name) => html`<br /><code>${name}</code>`)}
  </div>`;
}

// --- the controls

function togglePause() {
  pausedAt.value = pausedAt.value === null ? timeline.now() - DELAY_SECONDS : null;
}

/** @param {number} change */
function zoom(change) {
  size.value = Math.min(WINDOWS.length - 1, Math.max(0, size.value + change));
}

/** @param {number} share of the window */
function move(share) {
  const to = pausedAt.value ?? timeline.now() - DELAY_SECONDS;
  pausedAt.value = Math.min(timeline.time, to + share * WINDOWS[size.value]);
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
function report(action) {
  trouble.value = "";
  action.catch((error) => {
    trouble.value = error.message;
  });
}

// --- drawing

/**
 * Draws until it is stopped.
 * @param {HTMLCanvasElement} canvas
 * @param {{from: number, to: number, width: number, ranks: number[]}} frame is kept up to date
 */
function animate(canvas, frame) {
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  let drawnAt = -1;
  let drawnFor = "";
  let handle = requestAnimationFrame(again);
  /** @param {number} milliseconds */
  function again(milliseconds) {
    handle = requestAnimationFrame(again);
    const length = WINDOWS[size.value];
    const isStill = isCalm() || length < STILL_BELOW;
    const wait = isStill ? STILL_SECONDS : FRAME_SECONDS;
    const ranks = stages.value.map((stage) => stage.rank).reverse();
    const width = canvas.parentElement?.clientWidth ?? 0;
    const asked = [length, width, devicePixelRatio, pausedAt.value, ranks].join();
    const isDue = pausedAt.value === null && milliseconds / 1000 - drawnAt >= wait;
    if (!width || (!isDue && asked === drawnFor)) return;
    drawnAt = milliseconds / 1000;
    drawnFor = asked;
    const to = pausedAt.value ?? timeline.now() - DELAY_SECONDS;
    Object.assign(frame, { from: to - length, to, width, ranks });
    fit(canvas, context, width, heightOf(ranks.length));
    draw(context, frame, timeline);
  }
  return () => cancelAnimationFrame(handle);
}

/**
 * @param {HTMLCanvasElement} canvas @param {CanvasRenderingContext2D} context
 * @param {number} width @param {number} height in CSS pixels
 */
function fit(canvas, context, width, height) {
  const ratio = devicePixelRatio;
  const [columns, rows] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== columns || canvas.height !== rows) {
    canvas.width = columns;
    canvas.height = rows;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
}

