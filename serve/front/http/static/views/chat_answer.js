// @ts-check
/** One answer: its reasoning, its text, its calls, and how fast it came. */
import { tags } from "../lib/dom.js";
import { digits, percent, plural, rate, seconds } from "../lib/format.js";
import { elementsOf } from "../lib/markdown.js";
import { state } from "../lib/store.js";

/** @import { Answer, Call, Child, Token } from "../lib/types.d.ts" */

const { code, details, div, h3, p, pre, progress, span, summary } = tags;
const UNLIKELY = [-0.1, -1, -3];

/** @param {Answer} answer @param {boolean} isNamed */
export function answerView(answer, isNamed) {
  const isScored = answer.tokens.length > 0 && answer.state !== "running";
  return div(
    { class: "answer", "data-state": answer.state },
    isNamed && h3(answer.model || "the default model"),
    answer.reasoning && details({ class: "reasoning" }, summary("Reasoning"), p(answer.reasoning)),
    isScored ? scored(answer.tokens) : div({ class: "markdown" }, json(answer.text) ?? elementsOf(answer)),
    answer.calls.map(callView),
    answer.error && p({ class: "failure", role: "alert" }, answer.error),
    (answer.state !== "failed" || answer.speed.count > 0) && p({ class: "pace" }, pace(answer)),
  );
}

/** The text of JSON, indented; null for other text. @param {string} text @returns {Child} */
function json(text) {
  const found = /^\s*[[{]/.test(text) ? indented(text) : text;
  return found === text ? null : pre(code(found));
}

/** @param {string} text that may be JSON */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** @param {Token[]} tokens @returns {Child} */
function scored(tokens) {
  return [
    p(
      { class: "scored" },
      tokens.map((token) => {
        const level = UNLIKELY.filter((limit) => token.logprob < limit).length;
        return span({ class: `l${level}`, title: described(token) }, token.token);
      }),
    ),
    p({ class: "hint" }, "The stronger the underline, the less likely the token. Hover over a token for its alternatives."),
  ];
}

/** @param {Token} token */
function described(token) {
  const line = (/** @type {{token: string, logprob: number}} */ each) =>
    `${JSON.stringify(each.token)} ${digits(100 * Math.exp(each.logprob))} %`;
  return [`${line(token)} (${digits(token.logprob)})`, ...token.top_logprobs.map(line)].join("\n");
}

/** @param {Call} call */
function callView({ name, arguments: text, result }) {
  return div(
    { class: "call" },
    p("calls ", code(name)),
    pre(indented(text)),
    result !== undefined && [p("result"), pre(result)],
  );
}

/** @param {Answer} answer @returns {Child} */
function pace(answer) {
  const { finish, speed, state: ended } = answer;
  if (ended === "running" && speed.first === null) return reading(answer);
  const parts = [plural(speed.count, "token")];
  if (speed.first !== null) {
    const length = speed.seconds - speed.first;
    parts.push(`first after ${seconds(speed.first)}`);
    if (speed.count > 1 && length > 0) parts.push(rate((speed.count - 1) / length));
  }
  if (speed.cached) parts.push(`${speed.cached} prompt tokens cached`);
  if (ended === "stopped") parts.push("stopped");
  if (finish === "length") parts.push("cut off at the token limit");
  return parts.join(" · ");
}

/** @param {Answer} answer @returns {Child} */
function reading(answer) {
  const known = state.requests.find(({ id }) => id === answer.request);
  if (known?.state === "waiting") return "waiting in the queue";
  const done = answer.prompt?.done ?? known?.prompt_tokens_done ?? 0;
  const total = answer.prompt?.total ?? known?.prompt_tokens;
  if (!total) return "sent";
  const share = done / total;
  return [
    progress({ max: 1, value: share, "aria-label": "prompt" }),
    ` reading the prompt: ${percent(share)} of ${plural(total, "token")}`,
  ];
}
