// @ts-check
/** The stages as a chain, the lanes of their steps, and the charts of the last minutes. */
import { tags } from "../lib/dom.js";
import { bytes, layers, percent, percents, plural, seconds, short } from "../lib/format.js";
import { state, timeline } from "../lib/store.js";
import { charts } from "./charts.js";
import { gantt } from "./gantt.js";
import { lastFault } from "./notice.js";

/** @import { Child, Pipeline, Stage } from "../lib/types.d.ts" */

const { a, b, code, dd, div, dl, dt, h1, h2, li, ol, p, rect, section, span, svg, ul } = tags;
const CLEARLY_BUSIER = 1.2;
const HARDLY_BUSY = 0.05;
const LIMITING = 0.5;
const SCARCE = 0.9;

export function pipelineView() {
  const { pipeline } = state;
  if (!pipeline) return null;
  return [
    h1({ class: "unseen" }, "Pipeline"),
    ul(
      { class: "findings" },
      li({ "data-finding": "bottleneck" }, bottleneck(pipeline)),
      li({ "data-finding": "queue" }, queue(pipeline)),
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
  if (!first || first.share < HARDLY_BUSY) return [b("Idle."), " No stage computes."];
  const leaders = busy.filter(({ share }) => share > first.share / CLEARLY_BUSIER);
  const next = busy[leaders.length];
  if (!next && leaders.length > 1) return [b("Balanced:"), ` every stage is busy up to ${percent(first.share)} of the time.`];
  const names = leaders.map(({ rank }) => rank).sort((one, other) => one - other).join(" and ");
  if (first.share < LIMITING) return [b(`Rank ${names} is the busiest:`), ` ${percent(first.share)} of the time. No stage limits the speed.`];
  const others = busy.length - leaders.length > 1 ? "the others up to" : `rank ${next?.rank}`;
  return [
    b(leaders.length > 1 ? `Ranks ${names} limit` : `Rank ${names} limits`, " the speed:"),
    ` busy ${percent(first.share)} of the time${next ? `, ${others} ${percent(next.share)}` : ""}.`,
    split && [" A faster split: ", code(`--split ${split.join(",")}`), "."],
  ];
}

/** Which request has waited the longest. @param {Pipeline} pipeline @returns {Child} */
function queue(pipeline) {
  const queued = state.requests.filter((each) => each.state === "waiting");
  const [oldest] = queued;
  if (!oldest) return [b("No request waits."), ` ${plural(pipeline.num_running, "answer")} running.`];
  const number = Math.max(queued.length, pipeline.num_waiting);
  return [
    b(plural(number, "request waits", "requests wait"), ":"), " ",
    a({ href: "#requests" }, code({ title: oldest.id }, short(oldest.id))),
    ` has waited the longest, for ${seconds(oldest.age_seconds)}.`,
    reason(pipeline),
  ];
}

/** The reason why requests wait, as far as it is known. @param {Pipeline} pipeline @returns {Child} */
function reason({ num_running: running, kv_tokens: used, max_kv_tokens: room }) {
  const places = state.server?.max_num_sequences ?? Infinity;
  if (running >= places) return [` All ${places} places are taken: `, code("--max-num-seqs"), "."];
  return room && used > SCARCE * room ? [" The memory for keys and values is nearly full: ", code("--kv-memory"), "."] : null;
}

/** In the order in which a step travels: the last rank holds the first layers. @param {Pipeline} pipeline */
function chain(pipeline) {
  return section(
    { "aria-label": "Stages" },
    ol({ class: "chain" }, state.stages.toReversed().map((stage) => card(stage, pipeline))),
    p({ class: "note" }, "A step enters at the first layers and leaves at the head, where tokens are sampled."),
  );
}

/** @param {Stage} stage @param {Pipeline} pipeline */
function card(stage, pipeline) {
  const shard = pipeline.tensor_parallel > 1 ? `, shard ${stage.shard}` : "";
  const fact = (/** @type {string} */ name, /** @type {Child} */ value, title = "") => div(dt({ title: title || null }, name), dd(value));
  return li(
    { key: stage.rank, class: stage.state === "ready" ? "stage" : "stage notready" },
    h2(span(`rank ${stage.rank}`), span({ class: "host" }, stage.host)),
    dl(
      fact("layers", layers(stage.layers) + shard),
      fact("weights", bytes(stage.bytes_owned)),
      fact("KV cache", bytes(stage.kv_bytes), "keys and values that the stage holds"),
      fact("adapters", bytes(stage.adapter_bytes)),
      fact("decode step", seconds(stage.decode_seconds), "how long the stage computes, on average"),
      fact(
        "transfer",
        seconds(stage.num_hops ? stage.hop_seconds / stage.num_hops : null),
        "how long a step takes from the rank before, from its header to its tensors, on average",
      ),
      fact("restarts", pipeline.num_restarts),
      fact("state", stage.state),
    ),
    busy(stage.rank),
  );
}

/** The shares of decode and prefill in a stage's latest seconds. @param {number} rank */
function busy(rank) {
  const { decode, prefill } = timeline.shares(rank);
  const whole = Math.max(1, decode + prefill);
  const shares = { decode: decode / whole, prefill: prefill / whole, idle: 1 - (decode + prefill) / whole };
  const texts = percents(Object.values(shares));
  const words = Object.keys(shares).map((kind, place) => `${kind} ${texts[place]}`);
  return div(
    { class: "busy", "data-rank": rank },
    svg(
      { viewBox: "0 0 1 1", preserveAspectRatio: "none", role: "img", "aria-label": `busy: ${words.join(", ")}` },
      rect({ class: "idle", width: 1, height: 1 }),
      rect({ class: "decode", width: shares.decode, height: 1 }),
      rect({ class: "prefill", x: shares.decode, width: shares.prefill, height: 1 }),
    ),
    p(Object.keys(shares).map((kind, place) => span({ class: kind }, words[place]))),
  );
}
