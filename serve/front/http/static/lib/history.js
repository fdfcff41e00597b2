// @ts-check
/** The charts' data: the last ten minutes in steps of a second, computed from the counters. */

const KEPT_SECONDS = 600;
const NAMES = {
  generated: "brigade_generation_tokens_total",
  prompts: "brigade_prompt_tokens_total",
  queried: "brigade_prefix_cache_queries_total",
  hits: "brigade_prefix_cache_hits_total",
  firstSum: "brigade_time_to_first_token_seconds_sum",
  firstCount: "brigade_time_to_first_token_seconds_count",
  nextSum: "brigade_inter_token_latency_seconds_sum",
  nextCount: "brigade_inter_token_latency_seconds_count",
};
export const SERIES = ["time", "rate", "first", "next", "running", "waiting", "kv", "cached"];

/** @typedef {Record<keyof typeof NAMES, number>} Counters */

export class History {
  constructor() {
    /** @type {Record<string, (number | null)[]>} */
    this.series = Object.fromEntries(SERIES.map((name) => [name, []]));
    /** @type {Counters | null} */
    this.last = null;
    this.lastTime = 0;
    /** @type {Record<string, number>} */
    this.totals = {};
    this.version = 0;
  }

  /**
   * @param {import("./types.d.ts").Frame} frame
   * @param {import("./types.d.ts").Pipeline | null} pipeline
   */
  take(frame, pipeline) {
    if (frame.totals) this.totals = frame.totals;
    const entries = Object.entries(NAMES).map(([name, key]) => [name, this.totals[key] ?? 0]);
    const counters = /** @type {Counters} */ (Object.fromEntries(entries));
    const isRestarted = this.last && counters.prompts < this.last.prompts;
    const isSetBack = frame.time < this.lastTime; // The server's clock: times must not decrease.
    if (isSetBack) for (const name of SERIES) this.series[name].length = 0;
    if (!this.last || isRestarted || isSetBack) {
      this.last = counters;
      this.lastTime = frame.time;
      return;
    }
    const seconds = frame.time - this.lastTime;
    if (seconds < 0.95) return;
    this.add(frame.time, seconds, counters, pipeline);
    this.last = counters;
    this.lastTime = frame.time;
  }

  /**
   * @param {number} time @param {number} seconds @param {Counters} counters
   * @param {import("./types.d.ts").Pipeline | null} pipeline
   */
  add(time, seconds, counters, pipeline) {
    const last = /** @type {Counters} */ (this.last);
    /** @param {keyof Counters} name */
    const change = (name) => counters[name] - last[name];
    /** @param {keyof Counters} sum @param {keyof Counters} number */
    const mean = (sum, number) => (change(number) ? change(sum) / change(number) : null);
    if (seconds > 3) this.push({ time: time - seconds / 2 }); // A gap in the lines.
    const room = pipeline?.max_kv_tokens;
    this.push({
      time,
      rate: change("generated") / seconds,
      first: mean("firstSum", "firstCount"),
      next: mean("nextSum", "nextCount"),
      running: pipeline?.num_running ?? null,
      waiting: pipeline?.num_waiting ?? null,
      kv: room ? (pipeline?.kv_tokens ?? 0) / room : null,
      cached: change("queried") ? change("hits") / change("queried") : null,
    });
  }

  /** @param {Record<string, number | null>} values */
  push(values) {
    const since = /** @type {number} */ (values.time) - KEPT_SECONDS;
    for (const name of SERIES) this.series[name].push(values[name] ?? null);
    while (/** @type {number} */ (this.series.time[0]) < since) {
      for (const name of SERIES) this.series[name].shift();
    }
    this.version += 1;
  }

  /** The latest value of a series that is known. @param {string} name */
  latest(name) {
    return this.series[name].findLast((value) => value != null) ?? null;
  }

  /** The seconds that the series cover. */
  seconds() {
    const { time } = this.series;
    return time.length ? /** @type {number} */ (time.at(-1)) - /** @type {number} */ (time[0]) : 0;
  }
}
