// @ts-check
/** Draws lines over time as SVG, with axes of round numbers. */

const NAMESPACE = "http://www.w3.org/2000/svg";
const ROUND = [1, 2, 5];
const CLOCK_STEPS = [10, 30, 60, 120, 300];
const BOTTOM = 22; // for the times
const LEFT = 62; // for the values
const TOP = 8;
const CLOCK_WIDTH = 80;
const VALUE_HEIGHT = 24;

/**
 * The width and height are pixels; the times of points are seconds, and a value of null is a gap.
 * @typedef {object} Plot
 * @property {number} width
 * @property {number} height
 * @property {number} from the time at the left edge
 * @property {number} to the time at the right edge
 * @property {number} top the axis ends with the first mark that is at least so large
 * @property {boolean} isWhole whether only whole numbers make sense as marks
 * @property {number} maxGap points further apart than these seconds are not connected
 * @property {(value: number) => string} show
 * @property {(time: number, hasSeconds: boolean) => string} clock
 * @property {[time: number, value: number | null][][]} lines
 */

/**
 * The smallest round step with which at most maxSteps steps fit into a span.
 * @param {number} span @param {number} maxSteps @param {boolean} [isWhole]
 */
export function roundStep(span, maxSteps, isWhole = false) {
  const min = Math.max(span / maxSteps, isWhole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(min));
  const found = ROUND.find((each) => each * power >= min * (1 - 1e-9));
  return (found ?? 10) * power;
}

/** The multiples of a step from one number to another. @param {number} from @param {number} to @param {number} step */
export function multiples(from, to, step) {
  const first = Math.ceil(from / step - 1e-9);
  const last = Math.floor(to / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, number) => Number(((first + number) * step).toPrecision(12)));
}

/**
 * The path of a line. A point without neighbours is a dot.
 * @param {[number, number | null][]} points @param {number} maxGap
 * @param {(time: number) => number} x @param {(value: number) => number} y
 */
export function pathOf(points, maxGap, x, y) {
  let path = "";
  let last = -Infinity;
  for (const [time, value] of points) {
    if (value === null) {
      last = -Infinity;
      continue;
    }
    const place = `${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    path += time - last > maxGap ? `M${place}h0` : `L${place}`;
    last = time;
  }
  return path;
}

/** Replaces what an element of SVG shows. @param {SVGSVGElement} svg @param {Plot} plot */
export function drawPlot(svg, plot) {
  const { width, height, from, to } = plot;
  const bottom = height - BOTTOM;
  const rise = roundStep(plot.top, (bottom - TOP) / VALUE_HEIGHT, plot.isWhole);
  const top = Math.ceil(plot.top / rise - 1e-9) * rise;
  const x = (/** @type {number} */ time) => LEFT + ((time - from) / (to - from)) * (width - LEFT);
  const y = (/** @type {number} */ value) => bottom - (value / top) * (bottom - TOP);
  const values = multiples(0, top, rise);
  const step = CLOCK_STEPS.find((each) => x(from + each) - LEFT >= CLOCK_WIDTH) ?? to - from;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(
    ...values.map((value) => element("path", { class: "grid", d: `M${LEFT} ${y(value)}H${width}` })),
    ...values.map((value) => label(plot.show(value), LEFT - 8, y(value) + 4, "end")),
    ...multiples(from + step / 4, to - step / 4, step).map((time) => label(plot.clock(time, step < 60), x(time), height - 5, "middle")),
    ...plot.lines.map((points, number) => element("path", { class: `line s${number}`, d: pathOf(points, plot.maxGap, x, y) })),
  );
}

/** @param {string} name @param {Record<string, unknown>} attributes */
function element(name, attributes) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}

/** @param {string} text @param {number} x @param {number} y @param {string} anchor */
function label(text, x, y, anchor) {
  const made = element("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}
