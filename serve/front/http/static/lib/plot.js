// @ts-check
/** Lines over time as SVG, with axes of round numbers. */
import { tags } from "./dom.js";
import { clock } from "./format.js";

const { path, svg, text } = tags;
const ROUND = [1, 2, 5, 10];
const CLOCK_STEPS = [10, 30, 60, 120, 300];
// Pixels: the room for times and for values, and how far their marks are apart at least.
const BOTTOM = 22;
const LEFT = 62;
const TOP = 8;
const CLOCK_WIDTH = 80;
const VALUE_HEIGHT = 24;

/**
 * The smallest round step with which at most maxSteps steps fit into a span.
 * @param {number} span @param {number} maxSteps @param {boolean} [isWhole]
 */
export function roundStep(span, maxSteps, isWhole = false) {
  const min = Math.max(span / maxSteps, isWhole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(min));
  return power * /** @type {number} */ (ROUND.find((each) => each * power >= min * (1 - 1e-9)));
}

/** The multiples of a step from one number to another. @param {number} from @param {number} to @param {number} step */
export function multiples(from, to, step) {
  const first = Math.ceil(from / step - 1e-9);
  const length = Math.max(0, Math.floor(to / step + 1e-9) - first + 1);
  return Array.from({ length }, (_, number) => Number(((first + number) * step).toPrecision(12)));
}

/**
 * The path of a line. A point without neighbours is a dot.
 * @param {[number, number | null][]} points @param {number} maxGap
 * @param {(time: number) => number} x @param {(value: number) => number} y
 */
export function pathOf(points, maxGap, x, y) {
  let found = "";
  let last = -Infinity;
  for (const [time, value] of points) {
    if (value !== null) {
      const place = `${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      found += time - last > maxGap ? `M${place}h0` : `L${place}`;
    }
    last = value === null ? -Infinity : time;
  }
  return found;
}

/**
 * The width and height are pixels. The times are seconds, and points further apart than maxGap are
 * not connected; a value of null is a gap. The axis of values ends with its first mark that is not
 * below top; if isWhole, its marks are whole numbers.
 * @param {{width: number, height: number, from: number, to: number, top: number, isWhole: boolean,
 *   maxGap: number, show: (value: number) => string, lines: [number, number | null][][]}} plot
 */
export function plot({ width, height, from, to, top, isWhole, maxGap, show, lines }) {
  const bottom = height - BOTTOM;
  const rise = roundStep(top, (bottom - TOP) / VALUE_HEIGHT, isWhole);
  const highest = Math.ceil(top / rise - 1e-9) * rise;
  const x = (/** @type {number} */ time) => LEFT + ((time - from) / (to - from)) * (width - LEFT);
  const y = (/** @type {number} */ value) => bottom - (value / highest) * (bottom - TOP);
  const step = CLOCK_STEPS.find((each) => x(from + each) - LEFT >= CLOCK_WIDTH) ?? to - from;
  const values = multiples(0, highest, rise);
  const times = multiples(from + step / 4, to - step / 4, step);
  return svg(
    { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": true },
    values.map((value) => path({ class: "grid", d: `M${LEFT} ${y(value)}H${width}` })),
    values.map((value) => text({ x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, show(value))),
    times.map((time) => text({ x: x(time), y: height - 5, "text-anchor": "middle" }, clock(time, step < 60))),
    lines.map((points, number) => path({ class: `line s${number}`, d: pathOf(points, maxGap, x, y) })),
  );
}
