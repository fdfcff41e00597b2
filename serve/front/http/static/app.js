// @ts-check
/** The frame around the views: the header, the navigation and the announcements. */
import { keys } from "./lib/api.js";
import { mount, redraw, tags } from "./lib/dom.js";
import { follow } from "./lib/feed.js";
import { NOTHING, rate } from "./lib/format.js";
import { RATE } from "./lib/history.js";
import { history, state } from "./lib/store.js";
import { adaptersView } from "./views/adapters.js";
import { chatView } from "./views/chat.js";
import { keysButton, keysDialog } from "./views/keys.js";
import { notice } from "./views/notice.js";
import { pipelineView } from "./views/pipeline.js";
import { requestsView } from "./views/requests.js";

const { a, dd, div, dl, dt, header, i, img, main, nav, p, span } = tags;

const VIEWS = [
  { id: "pipeline", title: "Pipeline", view: pipelineView },
  { id: "requests", title: "Requests", view: requestsView },
  { id: "adapters", title: "Adapters", view: adaptersView },
  { id: "chat", title: "Chat", view: chatView },
];

/** One word for the cluster's state, and how it looks. */
function status() {
  const { cluster, link, server } = state;
  if (link.state !== "live" || !cluster) {
    const words = { refused: "locked", connecting: "connecting", full: "too many pages" };
    const word = /** @type {Record<string, string>} */ (words)[link.state] ?? "offline";
    return { word, look: link.state === "lost" ? "bad" : "idle" };
  }
  if (server?.is_draining) return { word: "draining", look: "warn" };
  if (cluster.name === "failed") return { word: "failed", look: "bad" };
  if (cluster.name === "working") return { word: "ready", look: "good" };
  return { word: cluster.has_worked ? "recovering" : "starting", look: "warn" };
}

function head() {
  const { word, look } = status();
  const vitals = [
    ["speed", rate(history.latest(RATE))],
    ["running", state.pipeline?.num_running ?? NOTHING],
    ["waiting", state.pipeline?.num_waiting ?? NOTHING],
  ];
  return header(
    { class: "top" },
    a({ class: "brand", href: "#pipeline" }, img({ src: "ui/icon.svg", alt: "", width: 22, height: 22 }), "Brigade"),
    span({ class: "model", title: "the model" }, state.server?.model),
    span({ class: `pill ${look}`, "data-state": word }, i({ "aria-hidden": true }), word),
    dl({ class: "vitals", "aria-label": "now" }, vitals.map(([name, value]) => div(dt(name), dd(value)))),
    keysButton(),
    keysDialog,
  );
}

function page() {
  const { id, title, view } = VIEWS.find((each) => `#${each.id}` === location.hash) ?? VIEWS[0];
  document.title = `${title} · Brigade`;
  const isKnown = id === "chat" || state.cluster || keys.wanted === "admin";
  return [
    head(),
    nav(
      { class: "views", "aria-label": "Views" },
      VIEWS.map((each) => a({ href: `#${each.id}`, "aria-current": each.id === id ? "page" : null }, each.title)),
    ),
    main(
      { id: "main", key: id, "data-view": id, tabindex: -1 },
      notice(id),
      isKnown ? view() : p({ class: "empty" }, state.link.message || "Connecting to the server …"),
    ),
    div({ class: "unseen", role: "status", "aria-live": "polite" }, state.announcement),
  ];
}

addEventListener("hashchange", redraw);
mount(/** @type {Element} */ (document.getElementById("app")), page);
void follow();
