// @ts-check
/** The state of the page: the latest sections that the server sent, and what follows from them. */
import { redraw } from "./dom.js";
import { History } from "./history.js";
import { Timeline } from "./timeline.js";

/** @import { Cluster, Frame, Sections } from "./types.d.ts" */

/**
 * link is the stream's state: connecting, live, lost, refused (it needs a key), full (too many
 * watchers) or old (no such call). announcement is what screen readers say.
 * @type {Sections & {link: {state: string, message: string}, announcement: string}}
 */
export const state = {
  link: { state: "connecting", message: "" },
  announcement: "",
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
export const history = new History();

/** Updates the state with a frame of the stream. @param {Frame} frame */
export function take(frame) {
  const { kind, time, spans, sample, history: samples, ...sections } = frame;
  const before = state.cluster;
  Object.assign(state, sections);
  if (state.cluster && before && word(before) !== word(state.cluster)) announce(sentence(state.cluster));
  timeline.take(frame, state.requests, state.cluster?.name === "working" || !state.cluster?.has_worked);
  history.take(frame);
  redraw();
}

/** @param {string} name @param {string} [message] */
export function setLink(name, message = "") {
  state.link = { state: name, message };
  redraw();
}

/** @param {string} text */
export function announce(text) {
  state.announcement = text;
  redraw();
}

/** @param {Cluster} cluster */
const word = (cluster) => `${cluster.name}${cluster.has_worked}`;

/** @param {Cluster} cluster */
function sentence({ name, what, fault, has_worked }) {
  if (name === "working") return "The cluster is ready.";
  if (name === "failed") return `The cluster has stopped: ${fault ?? ""}`;
  return has_worked ? `Recovering: ${what}.` : `Starting: ${what}.`;
}
