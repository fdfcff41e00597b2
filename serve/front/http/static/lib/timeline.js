// @ts-check
/** The recent activity of the stages: the spans of each rank, their requests, and recoveries. */

/** @import { Frame, RunningRequest, SpanRow } from "./types.d.ts" */

const KEPT_SECONDS = 25;
const BUSY_SECONDS = 5;
const NUM_NAMES = 4000;
export const NUM_COLOURS = 8;
// The places of a span's parts in its row.
export const RANK = 0;
export const STEP = 1;
export const KIND = 2;
export const ROWS = 3;
export const TOKENS = 4;
export const START = 5;
export const END = 6;
export const SEQUENCES = 7;

export class Timeline {
  constructor() {
    /** @type {Map<number, SpanRow[]>} by rank, in the order of their ends */
    this.lanes = new Map();
    /** @type {{start: number, end: number | null}[]} the times without working engines */
    this.recoveries = [];
    /** @type {Map<number, {id: string, colour: number}>} the request of each sequence */
    this.owners = new Map();
    /** @type {Map<string, number>} */
    this.colours = new Map();
    /** The server's time in the latest frame in seconds, and this page's when it arrived in ms. */
    this.time = 0;
    this.takenAt = 0;
    this.isComplete = false;
  }

  /** The server's time, extrapolated from the latest frame. */
  now() {
    return this.time + (performance.now() - this.takenAt) / 1000;
  }

  /**
   * @param {Frame} frame
   * @param {RunningRequest[]} requests
   * @param {boolean} isWorking
   */
  take(frame, requests, isWorking) {
    // If the server's clock was set back, older steps would stay in the future.
    const isSetBack = frame.time < this.time;
    if (isSetBack) this.recoveries = [];
    if (isSetBack || frame.kind === "state") this.lanes.clear();
    this.time = frame.time;
    this.takenAt = performance.now();
    for (const request of requests) this.name(request);
    for (const row of frame.spans) this.lane(row[RANK]).push(row);
    this.forget(frame.time - KEPT_SECONDS);
    const last = this.recoveries.at(-1);
    if (!isWorking && (!last || last.end)) this.recoveries.push({ start: frame.time, end: null });
    if (isWorking && last && !last.end) last.end = frame.time;
  }

  /** @param {RunningRequest} request */
  name(request) {
    for (const sequence of request.sequences) {
      if (this.owners.get(sequence)?.id !== request.id) {
        this.owners.set(sequence, { id: request.id, colour: this.colour(request.id) });
      }
    }
    if (this.owners.size > NUM_NAMES) {
      this.owners.delete(/** @type {number} */ (this.owners.keys().next().value));
    }
  }

  /** Requests that follow each other differ in colour. @param {string} id */
  colour(id) {
    let colour = this.colours.get(id);
    if (colour === undefined) {
      colour = this.colours.size % NUM_COLOURS;
      this.colours.set(id, colour);
    }
    return colour;
  }

  /** @param {number} rank */
  lane(rank) {
    let lane = this.lanes.get(rank);
    if (!lane) {
      lane = [];
      this.lanes.set(rank, lane);
    }
    return lane;
  }

  /** @param {number} since */
  forget(since) {
    for (const lane of this.lanes.values()) {
      let number = 0;
      while (number < lane.length && lane[number][END] < since) number += 1;
      if (number > 200) lane.splice(0, number);
    }
    this.recoveries = this.recoveries.filter((each) => !each.end || each.end > since);
  }

  /**
   * The spans of a rank that touch an interval.
   * @param {number} rank @param {number} from @param {number} to
   */
  between(rank, from, to) {
    const lane = this.lanes.get(rank) ?? [];
    let first = lane.length;
    while (first > 0 && lane[first - 1][END] >= from) first -= 1;
    return lane.slice(first).filter((row) => row[START] <= to);
  }

  /** The shares of the last seconds that a rank spent on each kind of step. @param {number} rank */
  shares(rank) {
    const to = this.time;
    const from = to - BUSY_SECONDS;
    const shares = { prefill: 0, decode: 0 };
    for (const row of this.between(rank, from, to)) {
      const length = Math.min(row[END], to) - Math.max(row[START], from);
      shares[row[KIND]] += Math.max(0, length) / BUSY_SECONDS;
    }
    return shares;
  }

  /**
   * The mean number of ranks that compute while at least one does; 0 if none does.
   * @param {number} from @param {number} to
   */
  overlap(from, to) {
    /** @type {[number, number][]} */
    const edges = [];
    for (const rank of this.lanes.keys()) {
      for (const row of this.between(rank, from, to)) {
        edges.push([Math.max(row[START], from), 1], [Math.min(row[END], to), -1]);
      }
    }
    edges.sort((a, b) => a[0] - b[0]);
    let active = 0;
    let before = from;
    let busy = 0;
    let sum = 0;
    for (const [time, change] of edges) {
      if (active) busy += time - before;
      sum += active * (time - before);
      active += change;
      before = time;
    }
    return busy ? sum / busy : 0;
  }
}
