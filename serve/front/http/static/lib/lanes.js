/** Draws the lanes of the stages: decode solid, prefill hollow, a bar for each request of a step. */
import { seconds } from "./format.js";
import { roundStep } from "./plot.js";

/** @import { Span, Window } from "./types.d.ts" */
/** @import { Timeline } from "./timeline.js" */
/** @typedef {CanvasRenderingContext2D} Pen */

const LANE = 44;
const GAP = 6;
const AXIS = 22;
const MAX_BARS = 8;
const EDGE = 2;
const LABEL_WIDTH = 52;
const MARK_WIDTH = 76;

/** @type {Map<string, string>} */
const colours = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colours.clear());

/** A colour of the style sheet: a canvas does not understand light-dark(). @param {string} name */
export function colour(name) {
  const known = colours.get(name);
  if (known) return known;
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  colours.set(name, found);
  return found;
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
    for (const step of timeline.between(rank, from, to)) {
      drawStep(pen, step, timeline, lane * LANE, (step.start - from) * scale, Math.max(0.5, (step.end - step.start) * scale));
    }
  });
}

/** @param {Pen} pen @param {Span} step @param {Timeline} timeline @param {number} top @param {number} left @param {number} width */
function drawStep(pen, step, timeline, top, left, width) {
  const isHollow = step.kind === "prefill" && width > 3 * EDGE;
  const sequences = step.sequences.length ? step.sequences.slice(0, MAX_BARS) : [-1];
  const height = (LANE - GAP) / sequences.length;
  sequences.forEach((sequence, number) => {
    const owner = timeline.owners.get(sequence);
    const y = top + number * height;
    pen.fillStyle = colour(timeline.colour(sequence));
    pen.fillRect(left, y, width, Math.max(1, height - 0.5));
    if (isHollow) pen.clearRect(left + EDGE, y + EDGE, width - 2 * EDGE, height - 2 * EDGE - 0.5);
    if (owner && width > LABEL_WIDTH && height > 11) {
      pen.font = "11px ui-monospace, monospace";
      pen.fillStyle = colour(isHollow ? "ink" : "on-bar");
      pen.fillText(owner.id.slice(0, 6), left + 5, y + height / 2 + 4);
    }
  });
}

/** @param {Pen} pen @param {Window} shown */
function drawAxis(pen, { from, to, width, ranks }) {
  const top = ranks.length * LANE;
  const length = to - from;
  const step = roundStep(length, width / MARK_WIDTH);
  pen.font = "11px system-ui, sans-serif";
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

/** The step at a point of the canvas. @param {Window} shown @param {Timeline} timeline @param {number} x @param {number} y */
export function stepAt({ from, to, width, ranks }, timeline, x, y) {
  const pixel = (to - from) / width;
  const time = from + x * pixel;
  return timeline.between(ranks[Math.floor(y / LANE)], time - pixel, time + pixel)[0];
}
