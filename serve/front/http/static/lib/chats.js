// @ts-check
/** The chats, which are saved in this browser only. */
import { signal } from "./dom.js";

/**
 * @typedef {object} Token
 * @property {string} token
 * @property {number} logprob
 * @property {{token: string, logprob: number}[]} top_logprobs
 *
 * @typedef {object} Answer
 * @property {string} model
 * @property {string} request the id of its request
 * @property {string} text
 * @property {string} reasoning
 * @property {{id: string, name: string, arguments: string, result?: string}[]} calls
 * @property {Token[]} tokens
 * @property {string} state running, done, stopped or failed
 * @property {string} error
 * @property {string} finish
 * @property {{done: number, total: number} | null} prompt
 * @property {{count: number, first: number | null, seconds: number, cached: number}} speed
 *
 * A question has the answers of one or two models; the chat continues from the first one. The
 * question is empty after results of calls, which are kept with the calls.
 * @typedef {{question: string, answers: Answer[]}} Turn
 *
 * @typedef {object} Settings
 * @property {string} model
 * @property {string} second
 * @property {string} system
 * @property {string} temperature
 * @property {string} top_p
 * @property {string} max_tokens
 * @property {string} seed
 * @property {string} tools
 * @property {string} schema
 * @property {boolean} logprobs
 *
 * @typedef {{id: string, title: string, turns: Turn[], settings: Settings}} Chat
 */

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

export const chats = signal(read());
export const current = signal(chats.value[0].id);

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

/** Marks answers that a reload interrupted as stopped. @param {Chat} chat @returns {Chat} */
function repaired(chat) {
  for (const turn of chat.turns) {
    for (const answer of turn.answers) if (answer.state === "running") answer.state = "stopped";
  }
  return { ...chat, settings: { ...DEFAULTS, ...chat.settings } };
}

/** @param {Settings} [settings] @returns {Chat} */
function fresh(settings = DEFAULTS) {
  return { id: crypto.randomUUID?.() ?? String(Math.random()), title: "New chat", turns: [], settings: { ...settings } };
}

export const chat = () => chats.value.find((each) => each.id === current.value) ?? chats.value[0];

/** Draws the chats again. @param {boolean} [isSaved] */
export function changed(isSaved = true) {
  chats.value = [...chats.value];
  if (isSaved) save();
}

function save() {
  try {
    localStorage.setItem(STORED, JSON.stringify(chats.value.slice(0, MAX_CHATS)));
  } catch {
    chats.value = chats.value.slice(0, Math.max(1, chats.value.length - 1)); // The storage is full.
  }
}

export function begin() {
  const made = fresh(chat().settings);
  chats.value = [made, ...chats.value.filter((each) => each.turns.length)];
  current.value = made.id;
  save();
}

/** @param {string} id */
export function remove(id) {
  const left = chats.value.filter((each) => each.id !== id);
  chats.value = left.length ? left : [fresh()];
  if (id === current.value) current.value = chats.value[0].id;
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
