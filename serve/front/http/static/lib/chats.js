/** The chat, which is saved in this browser only. */
import { redraw } from "./dom.js";

/** @import { Answer, Chat, Settings } from "./types.d.ts" */

const STORED = "brigade-chat";
/** @type {Settings} */
const DEFAULTS = { model: "", second: "", system: "", temperature: "", top_p: "", max_tokens: "", seed: "" };

/** @type {Chat} */
export let chat = { turns: [], settings: { ...DEFAULTS } };
try {
  chat = repaired(JSON.parse(localStorage.getItem(STORED) ?? "null") ?? chat);
} catch {
  console.info("The saved chat cannot be read.");
}

/** Marks answers that a reload interrupted as stopped. @param {Chat} stored @returns {Chat} */
function repaired({ turns, settings }) {
  for (const answer of turns.flatMap(({ answers }) => answers)) {
    if (answer.state === "running") answer.state = "stopped";
  }
  return { turns, settings: { ...DEFAULTS, ...settings } };
}

/** Saves the chat, and shows it. */
export function save() {
  try {
    localStorage.setItem(STORED, JSON.stringify(chat));
  } catch {
    console.info("The chat is not saved: the storage is full.");
  }
  redraw();
}

/** Begins a chat with the same settings. */
export function begin() {
  chat = { ...chat, turns: [] };
  save();
}

/** @param {string} model @returns {Answer} */
export function emptyAnswer(model) {
  return {
    model,
    text: "",
    reasoning: "",
    state: "running",
    error: "",
    finish: "",
    prompt: null,
    speed: { count: 0, first: null, seconds: 0, cached: 0 },
  };
}
