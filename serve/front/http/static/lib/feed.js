/** Follows /admin/events, and connects again whenever the stream ends. */
import { CallError, call, entering, serverSent } from "./api.js";
import { setLink, take } from "./store.js";

const RETRY_SECONDS = [0.5, 1, 2];
const MAX_RETRY_SECONDS = 4;
const SILENT_SECONDS = 5;

/** Runs for as long as the page is open. */
export async function follow() {
  for (let failures = 0; ; failures += 1) {
    try {
      if (await followOnce()) {
        failures = 0;
        setLink("lost", "The stream ended.");
      }
    } catch (error) {
      note(error);
    }
    await pause(RETRY_SECONDS[failures] ?? MAX_RETRY_SECONDS);
  }
}

/** @param {Error} error */
function note(error) {
  const status = error instanceof CallError ? error.status : 0;
  const states = /** @type {Record<number, string>} */ ({ 401: "refused", 403: "refused", 429: "full" });
  const isSilent = error.name === "AbortError";
  setLink(states[status] ?? "lost", isSilent ? "The server, or a proxy in front of it, sends no data." : error.message);
}

/** Returns whether anything came before the stream ended; throws if it did not begin. */
async function followOnce() {
  const aborting = new AbortController();
  const abortLater = () => setTimeout(() => aborting.abort(), SILENT_SECONDS * 1000);
  let watchdog = abortLater();
  let isLive = false;
  try {
    const response = await call("admin/events", { isAdmin: true, signal: aborting.signal });
    for await (const data of serverSent(response)) {
      clearTimeout(watchdog);
      watchdog = abortLater();
      if (data.startsWith(":")) continue;
      take(JSON.parse(data));
      if (!isLive) setLink("live");
      isLive = true;
    }
  } catch (error) {
    if (!isLive) throw error;
  } finally {
    clearTimeout(watchdog);
  }
  return isLive;
}

/** Waits some seconds, or until another key is entered. @param {number} seconds */
function pause(seconds) {
  return new Promise((resolve) => {
    setTimeout(resolve, seconds * 1000);
    entering.addEventListener("change", resolve, { once: true });
  });
}
