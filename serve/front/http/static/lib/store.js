/** The state of the page: the latest sections that the server sent, and what follows from them. */
import { redraw } from "./dom.js";
import { seconds } from "./format.js";
import { Timeline } from "./timeline.js";

/** @import { Frame, Measure, Sample, SampleRow, Sections } from "./types.d.ts" */

const NUM_SAMPLES = 600; // Ten minutes.
const SAMPLE = ["time", "rate", "first", "next", "running", "waiting", "kv", "cached"];

/**
 * link is the stream's state: connecting, live, lost, refused (it needs a key) or full (too many
 * watchers). said is how the user's latest action went.
 * @type {Sections & {link: {state: string, message: string},
 *   said: {isBad: boolean, text: string}, isBusy: boolean, samples: Sample[]}}
 */
export const state = {
  link: { state: "connecting", message: "" },
  said: { isBad: false, text: "" },
  isBusy: false,
  samples: [],
  server: null,
  cluster: null,
  stages: [],
  pipeline: null,
  requests: [],
  num_requests: 0,
  adapters: [],
  default: "",
};
export const timeline = new Timeline();

/** Updates the state with a frame of the stream. @param {Frame} frame */
export function take(frame) {
  const { kind, time, spans, sample, history, ...sections } = frame;
  Object.assign(state, sections);
  timeline.take(frame, state.requests);
  if (history) state.samples = history.map(sampleOf);
  else if (sample) addSample(sampleOf(sample));
  redraw();
}

/** @param {SampleRow} row */
const sampleOf = (row) => /** @type {Sample} */ (Object.fromEntries(row.map((value, place) => [SAMPLE[place], value])));

/** @param {Sample} sample */
function addSample(sample) {
  const isSetBack = sample.time < (latest("time") ?? 0); // The server's clock went back.
  state.samples = [...(isSetBack ? [] : state.samples), sample].slice(-NUM_SAMPLES);
}

/** The newest value; null if there is none. @param {Measure} name */
export function latest(name) {
  return state.samples.findLast((sample) => sample[name] !== null)?.[name] ?? null;
}

/** @param {string} name @param {string} [message] */
export function setLink(name, message = "") {
  state.link = { state: name, message };
  redraw();
}

/**
 * Does what the user wants, and says how it went: `Loaded pirate in 12 ms.`, or `Could not load pirate: …`.
 * @param {string} what to do, as in "load pirate" @param {() => Promise<unknown>} action
 * @param {string} [done] the same when it is done; without it, success is not mentioned
 */
export async function attempt(what, action, done = "") {
  state.isBusy = true;
  tell("");
  const begin = performance.now();
  try {
    await action();
    tell(done && `${done} in ${seconds((performance.now() - begin) / 1000)}.`);
  } catch (error) {
    tell(`Could not ${what}: ${error.message}`, true);
  }
  state.isBusy = false;
}

/** @param {string} text @param {boolean} [isBad] */
export function tell(text, isBad = false) {
  state.said = { isBad, text };
  redraw();
}
