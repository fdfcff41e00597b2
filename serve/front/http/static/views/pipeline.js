// @ts-check
/** The stages as a chain, the chart of their steps, and the charts of the last minutes. */
import { html } from "../lib/dom.js";
import { bytes, layers, percent, percents, plural, seconds, short } from "../lib/format.js";
import { now, pipeline, server, stages, timeline, waiting } from "../lib/store.js";
import { Gantt } from "./gantt.js";
import { Lazy } from "./lazy.js";
import { LastFault } from "./notice.js";

const CLEARLY_BUSIER = 1.2;
const HARDLY_BUSY = 0.05;
const SCARCE = 0.9;

export function PipelineView() {
  if (!pipeline.value) return null;
  return html`<h1 class="unseen">Pipeline</h1>
    <${Findings} />
    <${LastFault} />
    <${Chain} />
    <${Gantt} />
    <${Lazy} load=${() => import("./charts.js")} />`;
}

/** Two sentences for operators: which stage limits the speed, and which request waits. */
function Findings() {
  void now.value;
  return html`<ul class="findings">
    <li data-finding="bottleneck">${bottleneck()}</li>
    <li data-finding="queue">${queue()}</li>
  </ul>`;
}

function bottleneck() {
  const busy = stages.value
    .map((stage) => {
      const shares = timeline.shares(stage.rank);
      return { rank: stage.rank, share: Math.min(1, shares.prefill + shares.decode) };
    })
    .sort((a, b) => b.share - a.share);
  if (!busy.length || busy[0].share < HARDLY_BUSY) return html`<b>Idle.</b> No stage computes.`;
  const limit = busy[0].share / CLEARLY_BUSIER;
  const leaders = busy.filter((each) => each.share > limit);
  const next = busy[leaders.length];
  if (!next && leaders.length > 1) {
    return html`<b>Balanced:</b> every stage is busy up to ${percent(busy[0].share)} of the time.`;
  }
  const names = leaders.map((each) => each.rank).sort((a, b) => a - b).join(" and ");
  const verb = leaders.length > 1 ? `Ranks ${names} limit` : `Rank ${names} limits`;
  const others = busy.length - leaders.length > 1 ? "the others up to" : `rank ${next?.rank}`;
  return html`<b>${verb} the speed:</b> busy ${percent(busy[0].share)} of the time${next ? `, ${others} ${percent(next.share)}` : ""}.${advice()}`;
}

function advice() {
  const split = pipeline.value?.better_split;
  return split ? html` A faster split: <code>--split ${split.join(",")}</code>.` : null;
}

function queue() {
  const queued = waiting.value;
  if (!queued.length) return html`<b>No request waits.</b> ${plural(pipeline.value?.num_running ?? 0, "answer")} running.`;
  const oldest = queued[0];
  const number = Math.max(queued.length, pipeline.value?.num_waiting ?? 0);
  return html`<b>${plural(number, "request waits", "requests wait")}:</b> ${" "}<a href="#requests"><code title=${oldest.id}>${short(oldest.id)}</code></a>
    ${" "}has waited the longest, for ${seconds(oldest.age_seconds)}.${reason()}`;
}

/** The reason why requests wait, as far as it is known. */
function reason() {
  const places = server.value?.max_num_sequences ?? Infinity;
  const { num_running: running = 0, kv_tokens: used = 0, max_kv_tokens: room } = pipeline.value ?? {};
  if (running >= places) return html` All ${places} places are taken: <code>--max-num-sequences</code>.`;
  if (room && used > SCARCE * room) return html` The memory for keys and values is nearly full: <code>--kv-memory</code>.`;
  return null;
}

/** In the order in which a step travels: the last rank holds the first layers. */
function Chain() {
  const ordered = [...stages.value].reverse();
  return html`<section aria-label="Stages">
    <ol class="chain">
      ${ordered.map((stage) => html`<${StageCard} key=${stage.rank} stage=${stage} />`)}
    </ol>
    <p class="note">
      A step enters at the first layers and leaves at the head, where tokens are sampled.
    </p>
  </section>`;
}

/** @param {{stage: import("../lib/types.d.ts").Stage}} props */
function StageCard({ stage }) {
  void now.value;
  const shares = timeline.shares(stage.rank);
  const shard = (pipeline.value?.tensor_parallel ?? 1) > 1 ? `, shard ${stage.shard}` : "";
  const hop = stage.num_hops ? stage.hop_seconds / stage.num_hops : null;
  return html`<li class=${`stage ${stage.state === "ready" ? "" : "notready"}`}>
    <h2>
      <span>rank ${stage.rank}</span><span class="host">${stage.host}</span>
    </h2>
    <dl>
      <div><dt>layers</dt><dd>${layers(stage.layers)}${shard}</dd></div>
      <div><dt>weights</dt><dd>${bytes(stage.bytes_owned)}</dd></div>
      <div><dt title="keys and values that the stage holds">KV cache</dt><dd>${bytes(stage.kv_bytes)}</dd></div>
      <div><dt>adapters</dt><dd>${bytes(stage.adapter_bytes)}</dd></div>
      <div><dt title="how long the stage computes in a decode step, on average">decode step</dt><dd>${seconds(stage.decode_seconds)}</dd></div>
      <div><dt title="how long a step takes from the rank before, from its header to its tensors, on average">transfer</dt><dd>${seconds(hop)}</dd></div>
      <div><dt>restarts</dt><dd>${pipeline.value?.num_restarts ?? 0}</dd></div>
      <div><dt>state</dt><dd>${stage.state}</dd></div>
    </dl>
    <${Busy} prefill=${shares.prefill} decode=${shares.decode} rank=${stage.rank} />
  </li>`;
}

/** @param {{prefill: number, decode: number, rank: number}} props */
function Busy({ prefill, decode, rank }) {
  const scale = Math.max(1, prefill + decode);
  const idle = Math.max(0, 1 - prefill - decode);
  const [decoding, prefilling, idling] = percents([decode, prefill, idle].map((share) => share / scale));
  const text = `decode ${decoding}, prefill ${prefilling}, idle ${idling}`;
  return html`<div class="busy" data-rank=${rank}>
    <svg viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${`busy: ${text}`}>
      <rect class="idle" width="100" height="6" />
      <rect class="decode" width=${(100 * decode) / scale} height="6" />
      <rect class="prefill" x=${(100 * decode) / scale} width=${(100 * prefill) / scale} height="6" />
    </svg>
    <p>
      <span class="decode">decode ${decoding}</span>
      <span class="prefill">prefill ${prefilling}</span>
      <span class="idle">idle ${idling}</span>
    </p>
  </div>`;
}

