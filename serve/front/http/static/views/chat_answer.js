/** One answer: its reasoning, its text, and how fast it came. */
import { h } from "../lib/dom.js";
import { percent, plural, rate, seconds } from "../lib/format.js";
import { elementsOf } from "../lib/markdown.js";

/** @import { Answer, Child } from "../lib/types.d.ts" */

/** @param {Answer} answer @param {boolean} isNamed */
export function answerView(answer, isNamed) {
  const { error, model, reasoning, speed, state } = answer;
  return h.div(
    { class: "answer", "data-state": state },
    isNamed && h.h3(model || "the default model"),
    reasoning && h.details({ class: "reasoning" }, h.summary("Reasoning"), h.p(reasoning)),
    h.div({ class: "markdown" }, elementsOf(answer)),
    error && h.p({ class: "failure", role: "alert" }, error),
    (state !== "failed" || speed.count > 0) && h.p({ class: "pace" }, pace(answer)),
  );
}

/** @param {Answer} answer @returns {Child} */
function pace({ finish, prompt, speed, state }) {
  if (state === "running" && speed.first === null) return prompt ? reading(prompt) : "sent";
  const parts = [plural(speed.count, "token")];
  if (speed.first !== null) {
    const length = speed.seconds - speed.first;
    parts.push(`first after ${seconds(speed.first)}`);
    if (speed.count > 1 && length > 0.05) parts.push(rate((speed.count - 1) / length)); // else a burst
  }
  if (speed.cached) parts.push(`${speed.cached} prompt tokens cached`);
  if (state === "stopped") parts.push("stopped");
  if (finish === "length") parts.push("cut off at the token limit");
  return parts.join(" · ");
}

/** @param {{done: number, total: number}} prompt */
function reading({ done, total }) {
  const share = done / total;
  return [
    h.progress({ max: 1, value: share, "aria-label": "prompt" }),
    ` reading the prompt: ${percent(share)} of ${plural(total, "token")}`,
  ];
}
