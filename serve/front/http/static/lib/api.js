/** Calls of the server. Keys are sent as headers, and never appear in an address. */
import { redraw } from "./dom.js";

const STORED = "brigade-keys";

/** The API key and the admin key. They are kept until the tab is closed only if the user wants it. */
export const keys = read();
/** Fires "change" when keys have been entered. */
export const entering = new EventTarget();

function read() {
  try {
    const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    return { api: String(stored.api ?? ""), admin: String(stored.admin ?? "") };
  } catch {
    return { api: "", admin: "" };
  }
}

/** @param {{api: string, admin: string}} entered @param {boolean} isKept */
export function useKeys(entered, isKept) {
  if (isKept) sessionStorage.setItem(STORED, JSON.stringify(entered));
  else sessionStorage.removeItem(STORED);
  Object.assign(keys, entered);
  entering.dispatchEvent(new Event("change"));
  redraw();
}

/** An error that the server returned, or with status 0 an error of the connection. */
export class CallError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Browsers describe a broken connection with a TypeError, each in its own words.
 * @param {unknown} error @param {string} words @returns {never} */
function fail(error, words) {
  throw error instanceof TypeError ? new CallError(0, words) : error;
}

/** @param {Response} response */
async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || response.statusText;
  }
}

/**
 * Calls the server, and returns the reply before its body is read. Throws CallError.
 * @param {string} path without a leading slash, so that it works below a proxy's folder
 * @param {{body?: object, isAdmin?: boolean, signal?: AbortSignal}} [options] the body is posted
 */
export async function call(path, { body, isAdmin = false, signal } = {}) {
  const key = isAdmin ? keys.admin || keys.api : keys.api;
  const headers = new Headers(key ? { authorization: `Bearer ${key}` } : {});
  if (body) headers.set("content-type", "application/json");
  const fetching = fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: JSON.stringify(body),
    signal,
    credentials: "omit",
    cache: "no-store",
  });
  const response = await fetching.catch((error) => fail(error, "The server does not answer. Is it still running?"));
  if (response.ok) return response;
  throw new CallError(response.status, await refusal(response));
}

/**
 * The data of server-sent events, and comments with their colon, as they arrive.
 * @param {Response} response
 */
export async function* serverSent(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read().catch((error) => fail(error, "The connection to the server broke."));
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = /** @type {string} */ (lines.pop());
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
        else if (line.startsWith(":")) yield line.trim();
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
