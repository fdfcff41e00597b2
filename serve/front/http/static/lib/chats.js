// @ts-check
/** The chats, which are saved in this browser only. */
import { redraw } from "./dom.js";

/** @import { Answer, Chat, Settings } from "./types.d.ts" */

const STORED = "brigade-chats";
const MAX_CHATS = 50;

/** @type {Settings} */
const DEFAULTS = {
  model: "",
  second: "",
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  tools: "",
  schema: "",
  logprobs: false,
};

export let chats = read();
export let chat = chats[0]; // The one that is shown.

/** @returns {Chat[]} */
function read() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORED) ?? "[]");
    if (Array.isArray(stored) && stored.length) return stored.map(repaired);
  } catch {
    return [fresh()];
  }
  return [fresh()];
}

/** Marks answers that a reload interrupted as stopped. @param {Chat} stored @returns {Chat} */
function repaired(stored) {
  for (const { answers } of stored.turns) {
    for (const answer of answers) if (answer.state === "running") answer.state = "stopped";
  }
  return { ...stored, settings: { ...DEFAULTS, ...stored.settings } };
}

/** @param {Settings} [settings] @returns {Chat} */
function fresh(settings = DEFAULTS) {
  return { id: crypto.randomUUID?.() ?? String(Math.random()), title: "New chat", turns: [], settings: { ...settings } };
}

/** Saves the chats, and shows them. */
export function save() {
  try {
    localStorage.setItem(STORED, JSON.stringify(chats.slice(0, MAX_CHATS)));
  } catch {
    chats = chats.slice(0, Math.max(1, chats.length - 1)); // The storage is full.
  }
  redraw();
}

/** @param {Chat} chosen */
export function choose(chosen) {
  chat = chosen;
  redraw();
}

export function begin() {
  chat = fresh(chat.settings);
  chats = [chat, ...chats.filter((each) => each.turns.length)];
  save();
}

/** @param {Chat} removed */
export function remove(removed) {
  chats = chats.filter((each) => each !== removed);
  if (!chats.length) chats = [fresh()];
  if (removed === chat) [chat] = chats;
  save();
}

/** @param {string} model @returns {Answer} */
export function emptyAnswer(model) {
  return {
    model,
    request: "",
    text: "",
    reasoning: "",
    calls: [],
    tokens: [],
    state: "running",
    error: "",
    finish: "",
    prompt: null,
    speed: { count: 0, first: null, seconds: 0, cached: 0 },
  };
}
