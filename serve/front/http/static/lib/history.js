// @ts-check
/** The samples of the last ten minutes, which the server takes once a second. */

const NUM_KEPT = 600;
// The places of a sample's parts in its row.
export const TIME = 0;
export const RATE = 1;
export const FIRST = 2;
export const NEXT = 3;
export const RUNNING = 4;
export const WAITING = 5;
export const KV = 6;
export const CACHED = 7;

/** @import { Frame, SampleRow } from "./types.d.ts" */

export class History {
  constructor() {
    /** @type {SampleRow[]} the oldest first */
    this.samples = [];
  }

  /** @param {Frame} frame */
  take(frame) {
    if (frame.history) this.samples = frame.history;
    else if (frame.sample) this.add(frame.sample);
  }

  /** @param {SampleRow} sample */
  add(sample) {
    const last = this.samples.at(-1)?.[TIME] ?? 0;
    if (sample[TIME] < last) this.samples = []; // The server's clock was set back.
    this.samples = [...this.samples, sample].slice(-NUM_KEPT);
  }

  /** The newest value of a place; null if there is none. @param {number} place */
  latest(place) {
    return this.samples.findLast((sample) => sample[place] !== null)?.[place] ?? null;
  }

  /** The seconds from the oldest sample to the newest. */
  seconds() {
    const [first] = this.samples;
    return first ? /** @type {number} */ (this.latest(TIME)) - first[TIME] : 0;
  }
}
