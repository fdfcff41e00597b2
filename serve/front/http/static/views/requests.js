// @ts-check
/** The requests that run or wait, with a button that cancels each. */
import { call } from "../lib/api.js";
import { redraw, tags } from "../lib/dom.js";
import { NOTHING, count, duration, percent, plural, rate, seconds, short } from "../lib/format.js";
import { state, timeline } from "../lib/store.js";

/** @import { Child, RunningRequest } from "../lib/types.d.ts" */

const { a, b, br, button, code, div, h1, i, p, small, span, table, tbody, td, th, thead, tr } = tags;
const STATES = { waiting: "waiting", prefill: "prefill", decode: "decoding" };
const COLUMNS = ["request", "client", "model", "state", "prompt", "answer", "speed", "first token", "age"];
const NUMBERS = COLUMNS.slice(4);
let trouble = "";
let sure = ""; // The request whose button asks once more.

export function requestsView() {
  return [
    h1("Requests"),
    trouble && p({ class: "notice bad", role: "alert" }, trouble),
    state.requests.length
      ? list()
      : p(
          { class: "empty" },
          b("No requests."), br(),
          "Requests appear here while they are answered. ", a({ href: "#chat" }, "Ask something"), " to see one.",
        ),
  ];
}

function list() {
  const hidden = state.num_requests - state.requests.length;
  const heads = COLUMNS.map((name) => th({ scope: "col", class: NUMBERS.includes(name) ? "num" : null }, name));
  return div(
    { class: "wide" },
    table(
      { class: "requests" },
      thead(tr(heads, th({ scope: "col" }, span({ class: "unseen" }, "actions")))),
      tbody(state.requests.map(row)),
    ),
    hidden > 0 && p({ class: "note" }, `${plural(hidden, "newer request is", "newer requests are")} not shown.`),
  );
}

/** @param {RunningRequest} request */
function row(request) {
  const { id, prompt_tokens: total, prompt_tokens_done: done } = request;
  return tr(
    { key: id + request.sequences[0], "data-request": id, "data-state": request.state },
    th(
      { scope: "row", "data-label": "request" },
      i({ class: `swatch c${timeline.colour(id)}`, "aria-hidden": true }),
      code({ title: id }, short(id)),
    ),
    cell("client", request.client ?? NOTHING),
    cell("model", request.model, request.adapter_version && small(` version ${request.adapter_version}`)),
    cell("state", span({ class: `state ${request.state}` }, STATES[request.state])),
    cell(
      "prompt",
      request.state === "decode" ? count(total) : `${count(done)} / ${count(total)}`,
      request.cached_tokens > 0 && small(`${percent(request.cached_tokens / total)} cached`),
    ),
    cell("answer", count(request.completion_tokens)),
    cell("speed", rate(speed(request))),
    cell("first token", seconds(request.ttft_seconds)),
    cell("age", duration(request.age_seconds)),
    td({ class: "actions" }, cancelButton(id)),
  );
}

/** @param {string} name @param {Child[]} children */
const cell = (name, ...children) => td({ "data-label": name, class: NUMBERS.includes(name) ? "num" : null }, children);

/** @param {RunningRequest} request */
function speed({ completion_tokens: tokens, age_seconds: age, ttft_seconds: first }) {
  return first == null || tokens < 2 || age <= first ? null : (tokens - 1) / (age - first);
}

/** Asks for confirmation, because a cancelled request cannot be continued. @param {string} id */
function cancelButton(id) {
  const isSure = sure === id;
  return button(
    {
      type: "button",
      class: isSure ? "danger" : "",
      "aria-label": `${isSure ? "Really cancel" : "Cancel"} request ${short(id)}`,
      onclick: () => (isSure ? void cancel(id) : ask(id)),
      onblur: () => isSure && ask(""),
    },
    isSure ? "Really?" : "Cancel",
  );
}

/** @param {string} id */
function ask(id) {
  sure = id;
  redraw();
}

/** @param {string} id */
async function cancel(id) {
  ask("");
  try {
    await call(`admin/requests/${encodeURIComponent(id)}/cancel`, { method: "POST", isAdmin: true });
    trouble = "";
  } catch (error) {
    trouble = `${short(id)} was not cancelled: ${/** @type {Error} */ (error).message}`;
  }
  redraw();
}
