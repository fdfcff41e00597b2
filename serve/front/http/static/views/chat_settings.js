// @ts-check
/** The settings of a chat: models, system prompt, sampling, tools, format and log-probabilities. */
import { chat, save } from "../lib/chats.js";
import { tags } from "../lib/dom.js";

/** @import { Settings } from "../lib/types.d.ts" */

const { fieldset, input, label, legend, option, select, textarea } = tags;
const NUMBERS = /** @type {const} */ ([
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Max tokens", { min: 1, max: 1000000, step: 1 }],
  ["seed", "Seed", { min: 0, max: 4294967295, step: 1 }],
]);

/** @param {string[]} models the names of the model and its adapters */
export function chatSettings(models) {
  const { settings } = chat;
  /** @param {"tools" | "schema"} name @param {string} title @param {string} placeholder */
  const json = (name, title, placeholder) =>
    label({ class: "half" }, title, textarea({ rows: 3, spellcheck: "false", placeholder, value: settings[name], oninput: set(name) }));
  return fieldset(
    { class: "panel settings", key: chat.id },
    legend({ class: "unseen" }, "Settings of this chat"),
    label("Model or adapter", choice("model", "the default", models)),
    label("Second model", choice("second", "none", models)),
    NUMBERS.map(([name, title, limits]) =>
      label(title, input({ type: "number", ...limits, placeholder: "default", value: settings[name], oninput: set(name) })),
    ),
    label({ class: "all" }, "System prompt", textarea({ rows: 2, value: settings.system, oninput: set("system") })),
    json("tools", "Tools, as JSON", '[{"type": "function", "function": {…}}]'),
    json("schema", "JSON schema of the answer", '{"type": "object", …}'),
    label(
      { class: "check all" },
      input({ type: "checkbox", checked: settings.logprobs, onchange: set("logprobs") }),
      " Log-probabilities: shows how likely each token was",
    ),
  );
}

/** @param {keyof Settings} name */
function set(name) {
  return (/** @type {any} */ { target }) => {
    Object.assign(chat.settings, { [name]: target.type === "checkbox" ? target.checked : target.value });
    save();
  };
}

/** @param {"model" | "second"} name @param {string} none @param {string[]} models */
function choice(name, none, models) {
  const chosen = chat.settings[name];
  const names = models.includes(chosen) || !chosen ? models : [chosen, ...models];
  return select(
    { onchange: set(name) },
    option({ value: "", selected: !chosen }, none),
    names.map((each) => option({ value: each, selected: each === chosen }, each)),
  );
}
