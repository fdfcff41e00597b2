/** The recent activity of the stages: the spans of each rank, and their requests. */

/** @import { Frame, RunningRequest, Span } from "./types.d.ts" */

const KEPT_SECONDS = 25;
const BUSY_SECONDS = 5;
const NUM_OWNERS = 4000;
export const NUM_COLOURS = 8;

export class Timeline {
  /** @type {Map<number, Span[]>} by rank, in the order of their ends */
  lanes = new Map();
  /** @type {Map<number | string, {id: string, colour: number}>} by sequence and by id */
  owners = new Map();
  numRequests = 0;
  /** The server's time in the latest frame (seconds), and this page's when it arrived (milliseconds). */
  time = 0;
  takenAt = 0;

  /** The server's time, extrapolated from the latest frame. */
  now() {
    return this.time + (performance.now() - this.takenAt) / 1000;
  }

  /** @param {Frame} frame @param {RunningRequest[]} requests */
  take({ kind, time, spans }, requests) {
    // If the server's clock was set back, older steps would stay in the future.
    if (kind === "state" || time < this.time) this.lanes.clear();
    this.time = time;
    this.takenAt = performance.now();
    for (const request of requests) this.name(request);
    for (const [rank, step, kind, rows, tokens, start, end, sequences] of spans) {
      this.lane(rank).push({ step, kind, rows, tokens, start, end, sequences });
    }
    for (const [rank, lane] of this.lanes) {
      this.lanes.set(rank, lane.filter(({ end }) => end > time - KEPT_SECONDS));
    }
  }

  /** Requests that follow each other differ in colour. @param {RunningRequest} request */
  name({ id, sequences }) {
    const owner = this.owners.get(id) ?? { id, colour: this.numRequests++ % NUM_COLOURS };
    for (const each of [id, ...sequences]) this.owners.set(each, owner);
    for (const oldest of this.owners.keys()) {
      if (this.owners.size <= NUM_OWNERS) break;
      this.owners.delete(oldest);
    }
  }

  /** @param {number} rank */
  lane(rank) {
    const lane = this.lanes.get(rank) ?? [];
    this.lanes.set(rank, lane);
    return lane;
  }

  /** The name of a request's colour. @param {number | string} owned a sequence, or the request's id */
  colour(owned) {
    const owner = this.owners.get(owned);
    return owner ? `r${owner.colour}` : "nobody";
  }

  /** The spans of a rank that touch an interval. @param {number} rank @param {number} from @param {number} to */
  between(rank, from, to) {
    return this.lane(rank).filter(({ start, end }) => end >= from && start <= to);
  }

  /** The shares of the last seconds that a rank spent on each kind of step. @param {number} rank */
  shares(rank) {
    const from = this.time - BUSY_SECONDS;
    const shares = { prefill: 0, decode: 0 };
    for (const { kind, start, end } of this.between(rank, from, this.time)) {
      shares[kind] += (Math.min(end, this.time) - Math.max(start, from)) / BUSY_SECONDS;
    }
    return shares;
  }

  /**
   * The mean number of ranks that compute while at least one does; 0 if none does.
   * @param {number} from @param {number} to
   */
  overlap(from, to) {
    const spans = [...this.lanes.keys()].flatMap((rank) => this.between(rank, from, to));
    let sum = 0;
    let busy = 0;
    let last = from;
    for (const span of spans.sort((one, other) => one.start - other.start)) {
      const start = Math.max(span.start, from);
      const end = Math.min(span.end, to);
      sum += end - start;
      busy += Math.max(0, end - Math.max(start, last));
      last = Math.max(last, end);
    }
    return busy && sum / busy;
  }
}
