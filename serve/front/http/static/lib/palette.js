// @ts-check
/** The colours of the style sheet, for drawing on a canvas. */
import { signal } from "./dom.js";
import { NUM_COLOURS } from "./timeline.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
/** Counts the changes of the colour scheme. */
export const scheme = signal(0);
dark.addEventListener("change", () => {
  palettes.clear();
  scheme.value += 1;
});

const calm = matchMedia("(prefers-reduced-motion: reduce)");
export const isCalm = () => calm.matches;

/** @type {Map<string, string>} */
const palettes = new Map();

/** @param {string} name of a custom property, without its dashes */
export function colour(name) {
  let value = palettes.get(name);
  if (value === undefined) {
    value = resolve(getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    palettes.set(name, value);
  }
  return value;
}

/** The current value of light-dark(), which a canvas does not understand. @param {string} value */
function resolve(value) {
  const probe = document.createElement("i");
  probe.style.color = value;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** @param {number} number of a request's colour */
export const requestColour = (number) => colour(`r${number % NUM_COLOURS}`);
