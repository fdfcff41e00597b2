// @ts-check
/** The trace of the last minute, as a file or in Perfetto. */
import { call } from "./api.js";

const SECONDS = 60;
const PERFETTO = "https://ui.perfetto.dev";
const PING_MILLISECONDS = 200;
const MAX_PINGS = 100;

async function fetchTrace() {
  const response = await call(`admin/trace?seconds=${SECONDS}`, { isAdmin: true });
  return response.arrayBuffer();
}

export async function saveTrace() {
  saveFile(new Blob([await fetchTrace()], { type: "application/json" }), "brigade-trace.json");
}

/** @param {Blob} data @param {string} name */
export function saveFile(data, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(data);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Opens Perfetto's page, and passes it the trace within this browser once the page answers. */
export async function openInPerfetto() {
  const page = window.open(PERFETTO);
  if (!page) throw new Error("The browser did not open a window: allow it, or save the trace.");
  const buffer = await fetchTrace();
  await answered(page);
  page.postMessage({ perfetto: { buffer, title: "Brigade" } }, PERFETTO);
}

/** @param {Window} page */
function answered(page) {
  return new Promise((resolve, reject) => {
    let pings = 0;
    const timer = setInterval(() => {
      page.postMessage("PING", PERFETTO);
      pings += 1;
      if (pings > MAX_PINGS) finish(() => reject(new Error("Perfetto's page does not answer: save the trace.")));
    }, PING_MILLISECONDS);
    /** @param {MessageEvent} event */
    const hear = (event) => {
      if (event.source === page && event.data === "PONG") finish(() => resolve(undefined));
    };
    addEventListener("message", hear);
    /** @param {() => void} end */
    function finish(end) {
      clearInterval(timer);
      removeEventListener("message", hear);
      end();
    }
  });
}
