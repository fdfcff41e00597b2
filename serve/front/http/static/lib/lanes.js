// @ts-check
/** Draws the lanes of the stages: decode solid, prefill striped, a bar for each request of a step. */
import { seconds } from "./format.js";
import { roundStep } from "./plot.js";
import { END, KIND, NUM_COLOURS, SEQUENCES, START } from "./timeline.js";

/** @import { SpanRow, Window } from "./types.d.ts" */
/** @import { Timeline } from "./timeline.js" */
/** @typedef {CanvasRenderingContext2D} Pen */

const LANE = 44;
const GAP = 6;
const AXIS = 22;
const MAX_BARS = 8;
const LABEL_WIDTH = 52;
const MARK_WIDTH = 76;

/** @type {Map<string, any>} colours and patterns by name */
const paints = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => paints.clear());

/** @template T @param {string} name @param {() => T} make @returns {T} */
function kept(name, make) {
  if (!paints.has(name)) paints.set(name, make());
  return paints.get(name);
}

/** A colour of the style sheet: a canvas does not understand light-dark(). @param {string} name */
export function colour(name) {
  return kept(name, () => {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  });
}

/** @param {Pen} pen @param {string} name of the stripes' colour */
function stripes(pen, name) {
  return kept(`${name} stripes`, () => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const inner = /** @type {Pen} */ (tile.getContext("2d"));
    inner.fillStyle = colour("lane");
    inner.fillRect(0, 0, 8, 8);
    inner.strokeStyle = colour(name);
    inner.lineWidth = 3.2;
    inner.stroke(new Path2D("M-10 10L2-2M-2 10L10-2M6 10L18-2"));
    return /** @type {CanvasPattern} */ (pen.createPattern(tile, "repeat"));
  });
}

/** @param {number} numLanes */
export const heightOf = (numLanes) => numLanes * LANE + AXIS;

/** @param {Pen} pen @param {Window} shown @param {Timeline} timeline */
export function drawLanes(pen, shown, timeline) {
  const { from, to, width, ranks } = shown;
  const scale = width / (to - from);
  pen.clearRect(0, 0, width, heightOf(ranks.length));
  pen.fillStyle = colour("lane");
  ranks.forEach((_, lane) => pen.fillRect(0, lane * LANE, width, LANE - GAP));
  drawAxis(pen, shown);
  ranks.forEach((rank, lane) => {
    for (const row of timeline.between(rank, from, to)) {
      drawStep(pen, row, timeline, lane * LANE, (row[START] - from) * scale, Math.max(0.5, (row[END] - row[START]) * scale));
    }
  });
  for (const { start, end } of timeline.recoveries) {
    const left = Math.max(0, (start - from) * scale);
    drawRecovery(pen, left, Math.min(width, ((end ?? to) - from) * scale), ranks.length * LANE - GAP);
  }
}

/** @param {Pen} pen @param {SpanRow} row @param {Timeline} timeline @param {number} top @param {number} left @param {number} width */
function drawStep(pen, row, timeline, top, left, width) {
  const isPrefill = row[KIND] === "prefill";
  const sequences = row[SEQUENCES].length ? row[SEQUENCES].slice(0, MAX_BARS) : [-1];
  const height = (LANE - GAP) / sequences.length;
  sequences.forEach((sequence, number) => {
    const owner = timeline.owners.get(sequence);
    const name = owner ? `r${owner.colour % NUM_COLOURS}` : "nobody";
    pen.fillStyle = isPrefill && width > 2 ? stripes(pen, name) : colour(name);
    pen.fillRect(left, top + number * height, width, Math.max(1, height - 0.5));
    if (owner && width > LABEL_WIDTH && height > 11) {
      pen.font = "11px ui-monospace, monospace";
      label(pen, owner.id.slice(0, 6), left, top + (number + 0.5) * height, isPrefill);
    }
  });
}

/** @param {Pen} pen @param {string} text @param {number} left @param {number} middle @param {boolean} isPlate */
function label(pen, text, left, middle, isPlate) {
  pen.textBaseline = "middle";
  if (isPlate) {
    pen.fillStyle = colour("lane");
    pen.fillRect(left + 2, middle - 7, pen.measureText(text).width + 6, 14);
  }
  pen.fillStyle = colour(isPlate ? "ink" : "on-bar");
  pen.fillText(text, left + 5, middle);
}

/** @param {Pen} pen @param {number} left @param {number} right @param {number} height */
function drawRecovery(pen, left, right, height) {
  if (right <= left) return;
  pen.globalAlpha = 0.35;
  pen.fillStyle = stripes(pen, "bad");
  pen.fillRect(left, 0, right - left, height);
  pen.globalAlpha = 1;
  pen.font = "600 12px system-ui, sans-serif";
  if (right - left > 70) label(pen, "recovery", left + 4, height / 2, true);
}

/** @param {Pen} pen @param {Window} shown */
function drawAxis(pen, { from, to, width, ranks }) {
  const top = ranks.length * LANE;
  const length = to - from;
  const step = roundStep(length, width / MARK_WIDTH);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "alphabetic";
  for (let back = 0; back <= length; back += step) {
    const x = width - (back / length) * width;
    pen.fillStyle = colour("line");
    pen.fillRect(Math.round(x) - (back ? 0 : 1), 0, 1, top + 3);
    const text = back ? `−${seconds(Number(back.toFixed(6)))}` : "now";
    const half = pen.measureText(text).width / 2;
    pen.fillStyle = colour("muted");
    pen.fillText(text, Math.min(width - 2 * half, Math.max(0, x - half)), top + 15);
  }
}

/** The step at a point of the canvas. @param {Window} shown @param {Timeline} timeline @param {number} x @param {number} y @returns {SpanRow | undefined} */
export function stepAt({ from, to, width, ranks }, timeline, x, y) {
  const rank = ranks[Math.floor(y / LANE)];
  const perPixel = (to - from) / width;
  const time = from + x * perPixel;
  const distance = (/** @type {SpanRow} */ row) => Math.max(row[START] - time, time - row[END], 0);
  const near = timeline.between(rank, time - 3 * perPixel, time + 3 * perPixel);
  return near.sort((one, other) => distance(one) - distance(other))[0];
}
