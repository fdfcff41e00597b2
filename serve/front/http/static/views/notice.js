// @ts-check
/** The notice above every view while the cluster is not ready: the reason, and the progress. */
import { html, useEffect, useRef } from "../lib/dom.js";
import { bytes, duration, percent } from "../lib/format.js";
import { announce, cluster, link, server, stages } from "../lib/store.js";
import { askForKeys } from "./keys.js";

export function Notice() {
  const state = cluster.value;
  useAnnouncements();
  if (link.value.state === "refused") return html`<${Locked} />`;
  if (link.value.state === "full" || (link.value.state === "lost" && state)) {
    return html`<section class="notice warn">
      <h2>${link.value.state === "full" ? "Too many pages watch this server" : "Not connected"}</h2>
      <p>${link.value.message} Below is the last state received; trying again.</p>
    </section>`;
  }
  if (!state || state.name === "working") return server.value?.is_draining ? html`<${Draining} />` : null;
  if (state.name === "failed") return html`<${Failed} />`;
  return html`<${Progress} />`;
}

function Locked() {
  return html`<section class="notice warn">
    <h2>This view needs an admin key</h2>
    <p>${link.value.message}</p>
    <p><button type="button" class="first" onClick=${askForKeys}>Enter a key</button></p>
  </section>`;
}

function Draining() {
  return html`<section class="notice warn">
    <h2>The server is draining</h2>
    <p>It takes no new requests, and ends when the last answer is finished.</p>
  </section>`;
}

function Failed() {
  return html`<section class="notice bad">
    <h2>The cluster has stopped</h2>
    <p class="reason">${cluster.value?.fault ?? "The log of rank 0 says why."}</p>
  </section>`;
}

function Progress() {
  const state = /** @type {import("../lib/types.d.ts").Cluster} */ (cluster.value);
  const isRecovering = state.has_worked;
  return html`<section class="notice warn" data-notice=${isRecovering ? "recovering" : "starting"}>
    <h2>${isRecovering ? "Recovering from a fault" : "The cluster is starting"}</h2>
    ${state.fault && html`<p class="reason">${state.fault}</p>`}
    <p>
      Now ${state.what}${state.reason ? ` (${state.reason})` : ""}.
      ${isRecovering ? " Requests wait, and continue where they stopped." : ""}
    </p>
    <ul class="ranks">${stages.value.map((stage) => html`<${RankProgress} stage=${stage} />`)}</ul>
  </section>`;
}

/** @param {{stage: import("../lib/types.d.ts").Stage}} props */
function RankProgress({ stage }) {
  const share = stage.bytes_total ? stage.bytes_done / stage.bytes_total : null;
  const isMissing = cluster.value?.missing.includes(stage.rank);
  const word = isMissing ? "awaited" : stage.state;
  return html`<li>
    <span class="who">rank ${stage.rank}</span><span class="host">${stage.host}</span>
    <span class="word">${word}</span>
    ${share != null && stage.state !== "ready"
      ? html`<progress max="1" value=${share} aria-label=${`rank ${stage.rank}`}></progress>
          <span class="num">${percent(share)} of ${bytes(stage.bytes_total)}</span>`
      : null}
  </li>`;
}

/** Announces only changes of the state to screen readers. */
function useAnnouncements() {
  const last = useRef("");
  const state = cluster.value;
  const word = state ? `${state.name}${state.has_worked}` : "";
  useEffect(() => {
    if (state && last.current && last.current !== word) announce(sentence(state));
    last.current = word;
  }, [word]);
}

/** @param {import("../lib/types.d.ts").Cluster} state */
function sentence(state) {
  if (state.name === "working") return "The cluster is ready.";
  if (state.name === "failed") return `The cluster has stopped: ${state.fault ?? ""}`;
  return state.has_worked ? `Recovering: ${state.what}.` : `Starting: ${state.what}.`;
}

/** A line about the latest fault once the cluster works again. */
export function LastFault() {
  const state = cluster.value;
  if (!state?.fault || state.name !== "working") return null;
  return html`<p class="past" data-past-fault>
    Latest fault, ${duration(state.fault_seconds_ago ?? 0)} ago: ${state.fault} Recovered.
  </p>`;
}

