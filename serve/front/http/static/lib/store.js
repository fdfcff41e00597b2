// @ts-check
/** The state of the page: what the server sent last, and what was entered here. */
import { batch, computed, signal } from "./dom.js";
import { History } from "./history.js";
import { Timeline } from "./timeline.js";

/** @typedef {import("./types.js").Frame} Frame */

/** How the stream of events is: connecting, live, lost, refused (a key is needed) or full. */
export const link = signal({ state: "connecting", message: "" });

export const server = signal(/** @type {import("./types.js").ServerInfo | null} */ (null));
export const cluster = signal(/** @type {import("./types.js").Cluster | null} */ (null));
export const stages = signal(/** @type {import("./types.js").Stage[]} */ ([]));
export const pipeline = signal(/** @type {import("./types.js").Pipeline | null} */ (null));
export const requests = signal(/** @type {import("./types.js").RunningRequest[]} */ ([]));
export const adapters = signal(/** @type {import("./types.js").Adapter[]} */ ([]));
export const defaultModel = signal("");
export const now = signal(0);

export const timeline = new Timeline();
export const history = new History();

export const waiting = computed(() => requests.value.filter((each) => each.state === "waiting"));

const SECTIONS = { server, cluster, stages, pipeline, requests, adapters, default: defaultModel };

/** Takes a frame of the stream over. @param {Frame} frame */
export function take(frame) {
  batch(() => {
    for (const [name, section] of Object.entries(SECTIONS)) {
      if (name in frame) section.value = /** @type {any} */ (frame)[name];
    }
    const isWorking = cluster.value?.name === "working" || !cluster.value?.has_worked;
    timeline.take(frame, requests.value, isWorking);
    history.take(frame, pipeline.value);
    now.value = frame.time;
  });
}

// --- what is announced to screen readers

export const announcement = signal("");

/** @param {string} text */
export function announce(text) {
  announcement.value = text;
}
