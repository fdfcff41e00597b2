// @ts-check
/** The settings of a chat: models, system prompt, sampling, tools, format and log-probabilities. */
import { changed, chat } from "../lib/chats.js";
import { html, signal } from "../lib/dom.js";

/** @typedef {import("../lib/chats.js").Settings} Values */

/** The names of the model and its adapters. */
export const models = signal(/** @type {string[]} */ ([]));

const NUMBERS = /** @type {const} */ ([
  { name: "temperature", title: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", title: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "max_tokens", title: "Max tokens", min: 1, max: 1000000, step: 1 },
  { name: "seed", title: "Seed", min: 0, max: 4294967295, step: 1 },
]);

export function Settings() {
  const { settings } = chat();
  /** @param {keyof Values} name */
  const set = (name) => (/** @type {any} */ event) => {
    const { target } = event;
    Object.assign(settings, { [name]: target.type === "checkbox" ? target.checked : target.value });
    changed();
  };
  return html`<fieldset class="panel settings">
    <legend class="unseen">Settings of this chat</legend>
    <label>Model or adapter<${Choice} value=${settings.model} none="the default" onChange=${set("model")} /></label>
    <label>Second model<${Choice} value=${settings.second} none="none" onChange=${set("second")} /></label>
    ${NUMBERS.map(
      ({ name, title, ...limits }) => html`<label>${title}<input type="number" ...${limits} placeholder="default" value=${settings[name]} onInput=${set(name)} /></label>`,
    )}
    <label class="all">System prompt<textarea rows="2" value=${settings.system} onInput=${set("system")}></textarea></label>
    <label class="half">Tools, as JSON<textarea rows="3" spellcheck=${false} placeholder='[{"type": "function", "function": {…}}]' value=${settings.tools} onInput=${set("tools")}></textarea></label>
    <label class="half">JSON schema of the answer<textarea rows="3" spellcheck=${false} placeholder='{"type": "object", …}' value=${settings.schema} onInput=${set("schema")}></textarea></label>
    <label class="check all"><input type="checkbox" checked=${settings.logprobs} onChange=${set("logprobs")} /> Log-probabilities: shows how likely each token was</label>
  </fieldset>`;
}

/** @param {{value: string, none: string, onChange: (event: Event) => void}} props */
function Choice({ value, none, onChange }) {
  const names = models.value.includes(value) || !value ? models.value : [value, ...models.value];
  return html`<select value=${value} onChange=${onChange}>
    <option value="">${none}</option>
    ${names.map((name) => html`<option value=${name} selected=${name === value}>${name}</option>`)}
  </select>`;
}
