// @ts-check
/** Draws the lanes: decode solid, prefill striped, a bar for each request of a step. */
import { colour, requestColour, scheme } from "../lib/palette.js";
import { seconds } from "../lib/format.js";
import { END, KIND, RANK, SEQUENCES, START } from "../lib/timeline.js";

/** @typedef {import("../lib/types.d.ts").SpanRow} SpanRow */
/** @typedef {{from: number, to: number, width: number, ranks: number[]}} Frame */

export const LANE = 44;
const GAP = 6;
export const AXIS = 22;
const MAX_BARS = 8;
const LABEL_WIDTH = 52;

/** @param {number} num_lanes */
export const heightOf = (num_lanes) => num_lanes * LANE + AXIS;

/** @type {Map<string, CanvasPattern>} */
const patterns = new Map();
scheme.subscribe(() => patterns.clear());

/** @param {CanvasRenderingContext2D} context @param {string} fill */
function striped(context, fill) {
  let pattern = patterns.get(fill);
  if (!pattern) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
    pen.fillStyle = colour("lane");
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = fill;
    pen.lineWidth = 3.2;
    pen.beginPath();
    for (const shift of [-8, 0, 8]) {
      pen.moveTo(shift - 2, 10);
      pen.lineTo(shift + 10, -2);
    }
    pen.stroke();
    pattern = /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat"));
    patterns.set(fill, pattern);
  }
  return pattern;
}

/**
 * @param {CanvasRenderingContext2D} context @param {Frame} frame
 * @param {import("../lib/timeline.js").Timeline} timeline
 */
export function draw(context, frame, timeline) {
  const { from, to, width, ranks } = frame;
  const scale = width / (to - from);
  context.clearRect(0, 0, width, heightOf(ranks.length));
  context.fillStyle = colour("lane");
  ranks.forEach((_, lane) => context.fillRect(0, lane * LANE, width, LANE - GAP));
  drawAxis(context, frame);
  ranks.forEach((rank, lane) => {
    const top = lane * LANE;
    for (const row of timeline.between(rank, from, to)) {
      drawStep(context, row, timeline, { top, left: (row[START] - from) * scale, scale });
    }
  });
  drawRecoveries(context, frame, timeline, scale);
}

/**
 * @param {CanvasRenderingContext2D} context @param {SpanRow} row
 * @param {import("../lib/timeline.js").Timeline} timeline
 * @param {{top: number, left: number, scale: number}} place
 */
function drawStep(context, row, timeline, { top, left, scale }) {
  const width = Math.max(0.5, (row[END] - row[START]) * scale);
  const isPrefill = row[KIND] === "prefill";
  const sequences = row[SEQUENCES].length ? row[SEQUENCES].slice(0, MAX_BARS) : [-1];
  const height = (LANE - GAP) / sequences.length;
  sequences.forEach((sequence, number) => {
    const owner = timeline.owners.get(sequence);
    const fill = owner ? requestColour(owner.colour) : colour("nobody");
    context.fillStyle = isPrefill && width > 2 ? striped(context, fill) : fill;
    context.fillRect(left, top + number * height, width, Math.max(1, height - 0.5));
    if (owner && width > LABEL_WIDTH && height > 11) {
      label(context, owner.id.slice(0, 6), left, top + number * height + height / 2, isPrefill);
    }
  });
}

/**
 * @param {CanvasRenderingContext2D} context @param {string} text
 * @param {number} left @param {number} middle @param {boolean} isPlate
 */
function label(context, text, left, middle, isPlate) {
  context.font = "11px ui-monospace, monospace";
  context.textBaseline = "middle";
  if (isPlate) {
    context.fillStyle = colour("lane");
    context.fillRect(left + 2, middle - 7, context.measureText(text).width + 6, 14);
  }
  context.fillStyle = isPlate ? colour("ink") : colour("on-bar");
  context.fillText(text, left + 5, middle);
}

/**
 * @param {CanvasRenderingContext2D} context @param {Frame} frame
 * @param {import("../lib/timeline.js").Timeline} timeline @param {number} scale
 */
function drawRecoveries(context, frame, timeline, scale) {
  const height = frame.ranks.length * LANE - GAP;
  for (const { start, end } of timeline.recoveries) {
    const left = Math.max(0, (start - frame.from) * scale);
    const right = Math.min(frame.width, ((end ?? frame.to) - frame.from) * scale);
    if (right <= left) continue;
    context.globalAlpha = 0.35;
    context.fillStyle = striped(context, colour("bad"));
    context.fillRect(left, 0, right - left, height);
    context.globalAlpha = 1;
    if (right - left > 70) {
      context.font = "600 12px system-ui, sans-serif";
      label(context, "recovery", left + 4, height / 2, true);
    }
  }
}

/** @param {CanvasRenderingContext2D} context @param {Frame} frame */
function drawAxis(context, { from, to, width, ranks }) {
  const top = ranks.length * LANE;
  const step = tick(to - from, width);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  for (let back = 0; back <= to - from; back += step) {
    const x = width - (back / (to - from)) * width;
    context.fillStyle = colour("line");
    context.fillRect(Math.round(x) - (back ? 0 : 1), 0, 1, top + 3);
    const text = back ? `−${seconds(Number(back.toFixed(6)))}` : "now";
    const half = context.measureText(text).width / 2;
    context.fillStyle = colour("muted");
    context.fillText(text, Math.min(width - 2 * half, Math.max(0, x - half)), top + 15);
  }
}

/** A round distance of marks, so that labels do not meet. @param {number} span @param {number} width */
function tick(span, width) {
  const minStep = (span * 76) / width;
  const power = 10 ** Math.floor(Math.log10(minStep));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= minStep) ?? 10 * power;
}

/**
 * The step at a point of the canvas.
 * @param {Frame} frame @param {import("../lib/timeline.js").Timeline} timeline
 * @param {number} x @param {number} y
 * @returns {SpanRow | null}
 */
export function stepAt(frame, timeline, x, y) {
  const rank = frame.ranks[Math.floor(y / LANE)];
  if (rank === undefined) return null;
  const perPixel = (frame.to - frame.from) / frame.width;
  const time = frame.from + x * perPixel;
  const near = timeline.between(rank, time - 3 * perPixel, time + 3 * perPixel);
  const distance = (/** @type {SpanRow} */ row) => Math.max(row[START] - time, time - row[END], 0);
  near.sort((a, b) => distance(a) - distance(b));
  return near[0]?.[RANK] === rank ? near[0] : null;
}
