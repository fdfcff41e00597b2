// @ts-check
/** Follows /admin/events, and connects again whenever the stream ends. */
import { CallError, call, entering, serverSent } from "./api.js";
import { announce, setLink, take } from "./store.js";

const RETRY_SECONDS = [0.5, 1, 2, 4];
const SILENT_SECONDS = 5;

/** Runs for as long as the page is open. */
export async function follow() {
  for (let failures = 0; ; failures += 1) {
    let frames = 0;
    try {
      frames = await followOnce();
    } catch (error) {
      note(error);
    }
    if (frames) {
      failures = 0;
      setLink("lost", "The stream ended.");
      announce("Connection to the server lost.");
    }
    await pause(RETRY_SECONDS[Math.min(failures, RETRY_SECONDS.length - 1)]);
  }
}

/** @param {unknown} error */
function note(error) {
  const status = error instanceof CallError ? error.status : 0;
  const message = error instanceof Error ? error.message : String(error);
  if (status === 401 || status === 403) setLink("refused", message);
  else if (status === 429) setLink("full", message);
  else if (status === 404) setLink("old", message);
  else if (error instanceof DOMException) setLink("lost", "The server, or a proxy in front of it, sends no data.");
  else setLink("lost", message);
}

async function followOnce() {
  const aborting = new AbortController();
  let watchdog = setTimeout(() => aborting.abort(), SILENT_SECONDS * 1000);
  let frames = 0;
  try {
    const response = await call("admin/events", { isAdmin: true, signal: aborting.signal });
    for await (const data of serverSent(response)) {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => aborting.abort(), SILENT_SECONDS * 1000);
      if (data.startsWith(":")) continue;
      take(JSON.parse(data));
      if (!frames) setLink("live");
      frames += 1;
    }
  } catch (error) {
    if (!frames) throw error;
  } finally {
    clearTimeout(watchdog);
  }
  return frames;
}

/** Waits some seconds, or until another key is entered. @param {number} seconds */
function pause(seconds) {
  return new Promise((resolve) => {
    setTimeout(resolve, seconds * 1000);
    entering.addEventListener("change", resolve, { once: true });
  });
}
