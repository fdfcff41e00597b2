// @ts-check
/** One answer: its reasoning, its text, its calls, and how fast it came. */
import { html, useEffect, useRef } from "../lib/dom.js";
import { digits, percent, plural, rate, seconds } from "../lib/format.js";
import { rendered } from "../lib/markdown.js";
import { requests } from "../lib/store.js";

/** @typedef {import("../lib/chats.js").Answer} Answer */
/** @typedef {import("../lib/chats.js").Token} Token */

const COPIED_MILLISECONDS = 1500;
const UNLIKELY = [-0.1, -1, -3];

/** @param {{answer: Answer, isNamed: boolean}} props */
export function AnswerView({ answer, isNamed }) {
  return html`<div class="answer" data-state=${answer.state}>
    ${isNamed && html`<h3>${answer.model || "the default model"}</h3>`}
    ${answer.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><p>${answer.reasoning}</p></details>`}
    ${answer.tokens.length && answer.state !== "running" ? html`<${Scored} tokens=${answer.tokens} />` : html`<${Text} text=${answer.text} />`}
    ${answer.calls.map((call) => html`<${Call} call=${call} />`)}
    ${answer.error && html`<p class="failure" role="alert">${answer.error}</p>`}
    ${answer.state === "failed" && !answer.speed.count ? null : html`<${Pace} answer=${{ ...answer }} />`}
  </div>`;
}

/** @param {{text: string}} props */
function Text({ text }) {
  const holder = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    const own = /** @type {HTMLElement} */ (holder.current);
    const elements = rendered(pretty(text));
    for (const code of elements.querySelectorAll("pre")) code.prepend(copyButton(code));
    own.replaceChildren(elements);
  }, [text]);
  return html`<div class="markdown" ref=${holder}></div>`;
}

/** Indents an answer that is JSON. @param {string} text */
function pretty(text) {
  if (!/^\s*[[{]/.test(text)) return text;
  try {
    return `\`\`\`\n${JSON.stringify(JSON.parse(text), null, 2)}\n\`\`\``;
  } catch {
    return text;
  }
}

/** @param {Element} code */
function copyButton(code) {
  const button = document.createElement("button");
  const text = code.textContent ?? "";
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    navigator.clipboard.writeText(text).then(
      () => (button.textContent = "Copied"),
      () => (button.textContent = "Not allowed"),
    );
    setTimeout(() => (button.textContent = "Copy"), COPIED_MILLISECONDS);
  });
  return button;
}

/** @param {{tokens: Token[]}} props */
function Scored({ tokens }) {
  return html`<p class="scored">
    ${tokens.map((token) => {
      const level = UNLIKELY.filter((limit) => token.logprob < limit).length;
      return html`<span class=${`l${level}`} title=${described(token)}>${token.token}</span>`;
    })}
  </p>
  <p class="hint">The stronger the underline, the less likely the token. Hover over a token for its alternatives.</p>`;
}

/** @param {Token} token */
function described(token) {
  const share = (/** @type {number} */ logprob) => `${digits(100 * Math.exp(logprob))} %`;
  const others = token.top_logprobs.map((each) => `${JSON.stringify(each.token)} ${share(each.logprob)}`);
  return [`${JSON.stringify(token.token)} ${share(token.logprob)} (${digits(token.logprob)})`, ...others].join("\n");
}

/** @param {{call: Answer["calls"][0]}} props */
function Call({ call }) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    shown = call.arguments; // It is still being written.
  }
  return html`<div class="call">
    <p>calls <code>${call.name}</code></p><pre>${shown}</pre>
    ${call.result !== undefined && html`<p>result</p><pre>${call.result}</pre>`}
  </div>`;
}

/** Gets a copy of the answer: a component that reads a signal is drawn again only if its props differ.
 * @param {{answer: Answer}} props */
function Pace({ answer }) {
  const { speed, state } = answer;
  if (state === "running" && speed.first == null) return html`<p class="pace">${progress(answer)}</p>`;
  const parts = [plural(speed.count, "token")];
  if (speed.first != null) {
    parts.push(`first after ${seconds(speed.first)}`);
    if (speed.count > 1 && speed.seconds > speed.first) parts.push(rate((speed.count - 1) / (speed.seconds - speed.first)));
  }
  if (speed.cached) parts.push(`${speed.cached} prompt tokens cached`);
  if (state === "stopped") parts.push("stopped");
  if (answer.finish === "length") parts.push("cut off at the token limit");
  return html`<p class="pace">${parts.join(" · ")}</p>`;
}

/** @param {Answer} answer */
function progress(answer) {
  const known = requests.value.find((each) => each.id === answer.request);
  if (known?.state === "waiting") return "waiting in the queue";
  const done = answer.prompt?.done ?? known?.prompt_tokens_done;
  const total = answer.prompt?.total ?? known?.prompt_tokens;
  if (!total) return "sent";
  const share = (done ?? 0) / total;
  return html`<progress max="1" value=${share} aria-label="prompt"></progress> reading the prompt: ${percent(share)} of ${plural(total, "token")}`;
}
