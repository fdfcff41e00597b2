// @ts-check
/** The requests that run or wait, with a button that cancels each. */
import { call } from "../lib/api.js";
import { html, signal, useSignal } from "../lib/dom.js";
import { NOTHING, count, duration, percent, plural, rate, seconds, short } from "../lib/format.js";
import { numRequests, requests, timeline } from "../lib/store.js";

/** @typedef {import("../lib/types.d.ts").RunningRequest} RunningRequest */

const STATES = { waiting: "waiting", prefill: "prefill", decode: "decoding" };
const trouble = signal("");

export function Requests() {
  return html`<h1>Requests</h1>
    ${trouble.value && html`<p class="notice bad" role="alert">${trouble.value}</p>`}
    ${requests.value.length ? html`<${Table} />` : html`<${Empty} />`}`;
}

function Empty() {
  return html`<p class="empty">
    <b>No requests.</b><br />
    Requests appear here while they are answered. <a href="#chat">Ask something</a> to see one.
  </p>`;
}

function Table() {
  const hidden = numRequests.value - requests.value.length;
  return html`<div class="wide">
    <table class="requests">
      <thead>
        <tr>
          <th scope="col">request</th><th scope="col">client</th><th scope="col">model</th>
          <th scope="col">state</th><th scope="col" class="num">prompt</th>
          <th scope="col" class="num">answer</th><th scope="col" class="num">speed</th>
          <th scope="col" class="num">first token</th><th scope="col" class="num">age</th>
          <th scope="col"><span class="unseen">actions</span></th>
        </tr>
      </thead>
      <tbody>${requests.value.map((each) => html`<${Row} key=${each.id + each.sequences[0]} request=${each} />`)}</tbody>
    </table>
    ${hidden > 0 && html`<p class="note">${plural(hidden, "newer request is", "newer requests are")} not shown.</p>`}
  </div>`;
}

/** @param {{request: RunningRequest}} props */
function Row({ request }) {
  const { prompt_tokens: total, prompt_tokens_done: done } = request;
  return html`<tr data-request=${request.id} data-state=${request.state}>
    <th scope="row" data-label="request">
      <i class=${`swatch c${timeline.colour(request.id)}`} aria-hidden="true"></i>
      <code title=${request.id}>${short(request.id)}</code>
    </th>
    <td data-label="client">${request.client ?? NOTHING}</td>
    <td data-label="model">${request.model}${request.adapter_version ? html` <small>version ${request.adapter_version}</small>` : null}</td>
    <td data-label="state"><span class=${`state ${request.state}`}>${STATES[request.state]}</span></td>
    <td data-label="prompt" class="num">
      ${request.state === "prefill" || request.state === "waiting" ? `${count(done)} / ` : ""}${count(total)}
      ${request.cached_tokens ? html`<small>${percent(request.cached_tokens / total)} cached</small>` : null}
    </td>
    <td data-label="answer" class="num">${count(request.completion_tokens)}</td>
    <td data-label="speed" class="num">${rate(speed(request))}</td>
    <td data-label="first token" class="num">${seconds(request.ttft_seconds)}</td>
    <td data-label="age" class="num">${duration(request.age_seconds)}</td>
    <td class="actions"><${Cancel} id=${request.id} /></td>
  </tr>`;
}

/** @param {RunningRequest} request */
function speed({ completion_tokens: tokens, age_seconds: age, ttft_seconds: first }) {
  if (first == null || tokens < 2 || age <= first) return null;
  return (tokens - 1) / (age - first);
}

/** Asks for confirmation, because a cancelled request cannot be continued. @param {{id: string}} props */
function Cancel({ id }) {
  const isSure = useSignal(false);
  const cancel = async () => {
    try {
      await call(`admin/requests/${encodeURIComponent(id)}/cancel`, { method: "POST", isAdmin: true });
      trouble.value = "";
    } catch (error) {
      trouble.value = `${short(id)} was not cancelled: ${/** @type {Error} */ (error).message}`;
    }
  };
  const ask = () => {
    if (isSure.value) void cancel();
    isSure.value = !isSure.value;
  };
  return html`<button
    type="button"
    class=${isSure.value ? "danger" : ""}
    aria-label=${`${isSure.value ? "Really cancel" : "Cancel"} request ${short(id)}`}
    onClick=${ask}
    onBlur=${() => (isSure.value = false)}
  >
    ${isSure.value ? "Really?" : "Cancel"}
  </button>`;
}
