/** The notice above every view while the cluster is not ready: the reason, and the progress. */
import { h } from "../lib/dom.js";
import { bytes, duration, percent } from "../lib/format.js";
import { state } from "../lib/store.js";
import { openKeys } from "./keys.js";

/** @import { Child, Cluster, Stage } from "../lib/types.d.ts" */

/** @param {string} view */
export function notice(view) {
  const { cluster, link, server } = state;
  if (link.state === "refused" && view === "chat") return null; // A chat needs no admin key.
  if (link.state === "refused") {
    return box("warn", "This view needs an admin key", h.p(link.message), h.p(h.button({ class: "first", onclick: openKeys }, "Enter a key")));
  }
  if (link.state === "full" || (link.state === "lost" && cluster)) {
    const title = link.state === "full" ? "Too many pages watch this server" : "Not connected";
    return box("warn", title, h.p(link.message, " Below is the last state received; trying again."));
  }
  if (cluster?.name === "failed") return box("bad", "The cluster has stopped", h.p({ class: "reason" }, cluster.fault ?? "The log of rank 0 says why."));
  if (cluster && cluster.name !== "working") return starting(cluster);
  return server?.is_draining && box("warn", "The server is draining", h.p("It takes no new requests, and ends when the last answer is finished."));
}

/** @param {string} look @param {string} title @param {Child[]} children */
const box = (look, title, ...children) => h.section({ key: "notice", class: `notice ${look}` }, h.h2(title), children);

/** @param {Cluster} cluster */
function starting({ has_worked: isRecovering, fault, what, reason }) {
  return box(
    "warn",
    isRecovering ? "Recovering from a fault" : "The cluster is starting",
    fault && h.p({ class: "reason" }, fault),
    h.p(`Now ${what}${reason ? ` (${reason})` : ""}.`, isRecovering && " Requests wait, and continue where they stopped."),
    h.ul({ class: "ranks" }, state.stages.map(rankProgress)),
  );
}

/** @param {Stage} stage */
function rankProgress({ rank, host, state: word, bytes_done, bytes_total }) {
  const share = bytes_total ? bytes_done / bytes_total : null;
  return h.li(
    h.b(`rank ${rank}`),
    h.span({ class: "host" }, host),
    h.span(state.cluster?.missing.includes(rank) ? "awaited" : word),
    share !== null && word !== "ready" && [
      h.progress({ max: 1, value: share, "aria-label": `rank ${rank}` }),
      h.span(`${percent(share)} of ${bytes(bytes_total)}`),
    ],
  );
}

/** A line about the latest fault once the cluster works again. */
export function lastFault() {
  const { cluster } = state;
  if (!cluster?.fault || cluster.name !== "working") return null;
  return h.p({ class: "past", "data-past-fault": true }, `Latest fault, ${duration(cluster.fault_seconds_ago ?? 0)} ago: ${cluster.fault} Recovered.`);
}
