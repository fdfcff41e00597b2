// @ts-check
/** The state of the page: the latest sections that the server sent. */
import { batch, computed, signal } from "./dom.js";
import { History } from "./history.js";
import { Timeline } from "./timeline.js";

/** @typedef {import("./types.d.ts").Frame} Frame */

/** The stream's state: connecting, live, lost, refused (it needs a key), full (too many watchers) or old (no such call). */
export const link = signal({ state: "connecting", message: "" });

export const server = signal(/** @type {import("./types.d.ts").ServerInfo | null} */ (null));
export const cluster = signal(/** @type {import("./types.d.ts").Cluster | null} */ (null));
export const stages = signal(/** @type {import("./types.d.ts").Stage[]} */ ([]));
export const pipeline = signal(/** @type {import("./types.d.ts").Pipeline | null} */ (null));
export const requests = signal(/** @type {import("./types.d.ts").RunningRequest[]} */ ([]));
/** The number of all requests: the server sends only the oldest ones. */
export const numRequests = signal(0);
export const adapters = signal(/** @type {import("./types.d.ts").Adapter[]} */ ([]));
export const defaultModel = signal("");
export const now = signal(0);

export const timeline = new Timeline();
export const history = new History();

export const waiting = computed(() => requests.value.filter((each) => each.state === "waiting"));

const SECTIONS = { server, cluster, stages, pipeline, requests, num_requests: numRequests, adapters, default: defaultModel };

/** Updates the state with a frame of the stream. @param {Frame} frame */
export function take(frame) {
  batch(() => {
    for (const [name, section] of Object.entries(SECTIONS)) {
      if (name in frame) section.value = /** @type {any} */ (frame)[name];
    }
    const isWorking = cluster.value?.name === "working" || !cluster.value?.has_worked;
    timeline.take(frame, requests.value, isWorking);
    history.take(frame);
    now.value = frame.time;
  });
}

// --- announcements to screen readers

export const announcement = signal("");

/** @param {string} text */
export function announce(text) {
  announcement.value = text;
}
