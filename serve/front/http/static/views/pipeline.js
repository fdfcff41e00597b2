/** The stages, the lanes of their steps, and the charts. */
import { h } from "../lib/dom.js";
import { bytes, layers, percent, plural, seconds, short } from "../lib/format.js";
import { state, timeline } from "../lib/store.js";
import { charts } from "./charts.js";
import { gantt } from "./gantt.js";
import { lastFault } from "./notice.js";

/** @import { Child, Pipeline, Stage } from "../lib/types.d.ts" */

const CLEARLY_BUSIER = 1.2;
const HARDLY_BUSY = 0.05;
const LIMITING = 0.5;
const SCARCE = 0.9;

export function pipelineView() {
  const { pipeline } = state;
  if (!pipeline) return null;
  return [
    h.h1({ class: "unseen" }, "Pipeline"),
    h.ul(
      { class: "findings" },
      h.li({ "data-finding": "bottleneck" }, bottleneck(pipeline)),
      h.li({ "data-finding": "queue" }, queue(pipeline)),
    ),
    lastFault(),
    chain(pipeline),
    gantt(),
    charts(),
  ];
}

/** Which stage limits the speed. @param {Pipeline} pipeline @returns {Child} */
function bottleneck({ better_split: split }) {
  const busy = state.stages
    .map(({ rank }) => {
      const { prefill, decode } = timeline.shares(rank);
      return { rank, share: Math.min(1, prefill + decode) };
    })
    .sort((one, other) => other.share - one.share);
  const [first] = busy;
  if (!first || first.share < HARDLY_BUSY) return [h.b("Idle."), " No stage computes."];
  const leaders = busy.filter(({ share }) => share > first.share / CLEARLY_BUSIER);
  const next = busy[leaders.length];
  const most = `${percent(first.share)} of the time`;
  if (!next && leaders.length > 1) return [h.b("Balanced:"), ` every stage is busy up to ${most}.`];
  const names = leaders.map(({ rank }) => rank).sort((one, other) => one - other).join(" and ");
  if (first.share < LIMITING) return [h.b(`Rank ${names} is the busiest:`), ` ${most}. No stage limits the speed.`];
  const others = busy.length - leaders.length > 1 ? "the others up to" : `rank ${next?.rank}`;
  return [
    h.b(leaders.length > 1 ? `Ranks ${names} limit` : `Rank ${names} limits`, " the speed:"),
    ` busy ${most}${next ? `, ${others} ${percent(next.share)}` : ""}.`,
    split && [" A faster split: ", h.code(`--split ${split.join(",")}`), "."],
  ];
}

/** The oldest request. @param {Pipeline} pipeline @returns {Child} */
function queue(pipeline) {
  const queued = state.requests.filter((each) => each.state === "waiting");
  const [oldest] = queued;
  if (!oldest) return [h.b("No request waits."), ` ${plural(pipeline.num_running, "answer")} running.`];
  const number = Math.max(queued.length, pipeline.num_waiting);
  return [
    h.b(plural(number, "request waits", "requests wait"), ":"), " ",
    h.a({ href: "#requests" }, short(oldest.id)),
    ` has waited the longest, for ${seconds(oldest.age_seconds)}.`,
    reason(pipeline),
  ];
}

/** Why requests wait. @param {Pipeline} pipeline @returns {Child} */
function reason({ num_running: running, kv_tokens: used, max_kv_tokens: room }) {
  const places = state.server?.max_num_sequences ?? Infinity;
  if (running >= places) return [` All ${places} places are taken: `, h.code("--max-num-seqs"), "."];
  return room && used > SCARCE * room ? [" The memory for keys and values is nearly full: ", h.code("--memory"), "."] : null;
}

/** The last rank holds the first layers. @param {Pipeline} pipeline */
function chain(pipeline) {
  return h.section(
    { "aria-label": "Stages" },
    h.ol({ class: "chain" }, state.stages.toReversed().map((stage) => card(stage, pipeline))),
    h.p({ class: "note" }, "A step enters at the first layers and leaves at the head."),
  );
}

/** @param {Stage} stage @param {Pipeline} pipeline */
function card(stage, pipeline) {
  const shard = pipeline.tensor_parallel > 1 ? `, shard ${stage.shard}` : "";
  const { memory } = stage;
  const transfer = stage.num_hops ? stage.hop_seconds / stage.num_hops : null;
  const facts = [
    ["layers", layers(stage.layers) + shard],
    ["weights", bytes(stage.bytes_owned)],
    ["KV cache", bytes(stage.kv_bytes), "keys and values"],
    ["adapters", bytes(stage.adapter_bytes)],
    ["memory left", memory && bytes(memory.head_room_bytes), memory &&
      `${bytes(memory.active_bytes)} active, ${bytes(memory.cached_bytes)} cached, ${bytes(memory.wired_bytes)} wired`],
    ["decode step", seconds(stage.decode_seconds), "on average"],
    ["transfer", seconds(transfer), "from the rank before"],
    ["restarts", pipeline.num_restarts],
    ["state", stage.state],
  ];
  return h.li(
    { key: stage.rank, class: stage.state === "ready" ? "panel stage" : "panel stage notready" },
    h.h2(h.span(`rank ${stage.rank}`), h.span({ class: "host" }, stage.host)),
    h.dl({ class: "facts" }, facts.map(([name, value, title]) => h.div(h.dt({ title }, name), h.dd(value)))),
    busy(stage.rank),
  );
}

/** The shares of decode and prefill in a stage's latest seconds. @param {number} rank */
function busy(rank) {
  const { decode, prefill } = timeline.shares(rank);
  const whole = Math.max(1, decode + prefill) / 100;
  const decoding = Math.round(decode / whole);
  const working = Math.round((decode + prefill) / whole);
  // Differences of rounded numbers, so that the three sum to 100.
  const shares = Object.entries({ decode: decoding, prefill: working - decoding, idle: 100 - working });
  return h.div(
    { class: "busy", "data-rank": rank },
    h.svg(
      { viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": true },
      h.rect({ class: "idle", width: 100, height: 1 }),
      h.rect({ class: "prefill", width: working, height: 1 }),
      h.rect({ class: "decode", width: decoding, height: 1 }),
    ),
    h.p(shares.map(([kind, share]) => h.span({ class: kind }, `${kind} ${share} %`))),
  );
}
