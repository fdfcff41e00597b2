/** The settings of a chat: models, system prompt and sampling. */
import { chat, save } from "../lib/chats.js";
import { h } from "../lib/dom.js";

/** @import { Settings } from "../lib/types.d.ts" */

const NUMBERS = /** @type {const} */ ([
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Max tokens", { min: 1, max: 1000000, step: 1 }],
  ["seed", "Seed", { min: 0, max: 4294967295, step: 1 }],
]);

/** @param {string[]} models the names of the model and its adapters */
export function chatSettings(models) {
  const { settings } = chat;
  return h.fieldset(
    { class: "panel settings" },
    h.legend({ class: "unseen" }, "Settings of this chat"),
    h.label("Model or adapter", choice("model", "the default", models)),
    h.label("Second model", choice("second", "none", models)),
    NUMBERS.map(([name, title, limits]) =>
      h.label(title, h.input({ type: "number", ...limits, placeholder: "default", value: settings[name], oninput: set(name) })),
    ),
    h.label({ class: "all" }, "System prompt", h.textarea({ rows: 2, value: settings.system, oninput: set("system") })),
  );
}

/** @param {keyof Settings} name */
function set(name) {
  return (/** @type {any} */ { target }) => {
    chat.settings[name] = target.value;
    save();
  };
}

/** @param {"model" | "second"} name @param {string} none @param {string[]} models */
function choice(name, none, models) {
  const chosen = chat.settings[name];
  const names = models.includes(chosen) || !chosen ? models : [chosen, ...models];
  return h.select(
    { onchange: set(name) },
    h.option({ value: "", selected: !chosen }, none),
    names.map((each) => h.option({ value: each, selected: each === chosen }, each)),
  );
}
