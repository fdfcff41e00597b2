/** Axes of round numbers, and the paths of lines. */

/** @import { Measure, Sample } from "./types.d.ts" */

const ROUND = [1, 2, 5, 10];

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
 * The path of a line. A point without neighbours is a dot; points further apart than maxGap seconds
 * are not connected.
 * @param {Sample[]} samples @param {Measure} measure @param {number} maxGap
 * @param {(time: number) => number} x @param {(value: number) => number} y
 */
export function pathOf(samples, measure, maxGap, x, y) {
  let found = "";
  let last = -Infinity;
  for (const { time, [measure]: value } of samples) {
    if (value !== null) {
      const place = `${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      found += time - last > maxGap ? `M${place}h0` : `L${place}`;
    }
    last = value === null ? -Infinity : time;
  }
  return found;
}
