/** The requests that run or wait, with a button that cancels each. */
import { call } from "../lib/api.js";
import { carefulButton } from "../lib/careful.js";
import { h } from "../lib/dom.js";
import { NOTHING, count, duration, percent, plural, rate, seconds, short } from "../lib/format.js";
import { attempt, state, timeline } from "../lib/store.js";

/** @import { Child, RunningRequest } from "../lib/types.d.ts" */

const STATES = { waiting: "waiting", prefill: "prefill", decode: "decoding" };
const COLUMNS = ["request", "client", "model", "state", "prompt", "answer", "speed", "first token", "age"];
const NUMBERS = COLUMNS.slice(4);

export function requestsView() {
  return [
    h.h1("Requests"),
    state.requests.length
      ? list()
      : h.p(
          { class: "empty" },
          h.b("No requests."), h.br(),
          "Requests appear here while they are answered. ", h.a({ href: "#chat" }, "Ask something"), " to see one.",
        ),
  ];
}

function list() {
  const hidden = state.num_requests - state.requests.length;
  const heads = COLUMNS.map((name) => h.th({ scope: "col", class: NUMBERS.includes(name) ? "num" : null }, name));
  return h.div(
    { class: "wide" },
    h.table(
      { class: "panel requests" },
      h.thead(h.tr(heads, h.th({ scope: "col" }, h.span({ class: "unseen" }, "actions")))),
      h.tbody(state.requests.map(row)),
    ),
    hidden > 0 && h.p({ class: "note" }, `${plural(hidden, "newer request is", "newer requests are")} not shown.`),
  );
}

/** @param {RunningRequest} request */
function row(request) {
  const { id, prompt_tokens: total, prompt_tokens_done: done } = request;
  const cancel = () => call(`admin/requests/${encodeURIComponent(id)}/cancel`, { body: {}, isAdmin: true });
  return h.tr(
    { key: id + request.sequences[0], "data-request": id, "data-state": request.state },
    h.th(
      { scope: "row", "data-label": "request" },
      h.i({ class: "swatch", "aria-hidden": true, drawn: (/** @type {HTMLElement} */ { style }) => style.setProperty("--kind", `var(--${timeline.colour(id)})`) }),
      h.code({ title: id }, short(id)),
    ),
    cell("client", request.client ?? NOTHING),
    cell("model", request.model, request.adapter_version && h.small(` version ${request.adapter_version}`)),
    cell("state", h.span({ class: `tag ${request.state}` }, STATES[request.state])),
    cell(
      "prompt",
      request.state === "decode" ? count(total) : `${count(done)} / ${count(total)}`,
      request.cached_tokens > 0 && h.small(`${percent(request.cached_tokens / total)} cached`),
    ),
    cell("answer", count(request.completion_tokens)),
    cell("speed", rate(speed(request))),
    cell("first token", seconds(request.ttft_seconds)),
    cell("age", duration(request.age_seconds)),
    h.td(
      { class: "num" },
      carefulButton("Cancel", `Cancel request ${short(id)}`, "Really?", () => attempt(`cancel request ${short(id)}`, cancel)),
    ),
  );
}

/** @param {string} name @param {Child[]} children */
const cell = (name, ...children) => h.td({ "data-label": name, class: NUMBERS.includes(name) ? "num" : null }, children);

/** @param {RunningRequest} request */
function speed({ completion_tokens: tokens, age_seconds: age, ttft_seconds: first }) {
  return first == null || tokens < 2 || age <= first ? null : (tokens - 1) / (age - first);
}
