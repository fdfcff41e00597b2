/** Formats numbers for readers: a few digits and a unit. */

const UNITS = ["B", "kB", "MB", "GB", "TB"];
export const NOTHING = "–";

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value == null) return NOTHING;
  const unit = value < 1000 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log10(value) / 3));
  return `${digits(value / 1000 ** unit)} ${UNITS[unit]}`;
}

/** Three digits, without zeros at the end: 5 and not 5.00. @param {number} value */
export function digits(value) {
  if (!value) return "0";
  const fraction = 2 - Math.floor(Math.log10(Math.abs(value)));
  return String(Number(value.toFixed(Math.max(0, Math.min(3, fraction)))));
}

/** @param {number} value */
export const count = (value) => Math.round(value).toLocaleString("en-US");

/** @param {number | null | undefined} value in seconds */
export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return NOTHING;
  if (!value) return "0 s";
  if (value < 0.001) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1000)} ms`;
  return value < 100 ? `${digits(value)} s` : duration(value);
}

/** @param {number} value in seconds, without fractions */
export function duration(value) {
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** @param {number} share from 0 to 1 */
export const percent = (share) => `${Math.round(share * 100)} %`;

/** The time of day. @param {number} time in seconds since 1970 @param {boolean} [hasSeconds] */
export function clock(time, hasSeconds = true) {
  return new Date(time * 1000).toTimeString().slice(0, hasSeconds ? 8 : 5);
}

/** @param {number | null} value */
export const rate = (value) => (value == null ? NOTHING : `${digits(value)} tok/s`);

/** @param {[number, number] | null} layers from the first to the one behind the last */
export const layers = (layers) => (layers ? `${layers[0]}–${layers[1] - 1}` : NOTHING);

/** @param {number} number @param {string} one @param {string} [many] */
export const plural = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;

/** The first characters of a long id. @param {string} id */
export const short = (id) => (id.length > 14 ? `${id.slice(0, 10)}…` : id);
