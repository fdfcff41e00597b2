/** The frame around the views: the header, the navigation, and how actions went. */
import { h, mount } from "./lib/dom.js";
import { follow } from "./lib/feed.js";
import { NOTHING, rate } from "./lib/format.js";
import { latest, state, tell } from "./lib/store.js";
import { adaptersView } from "./views/adapters.js";
import { chatView } from "./views/chat.js";
import { keysButton, keysDialog } from "./views/keys.js";
import { notice } from "./views/notice.js";
import { pipelineView } from "./views/pipeline.js";
import { requestsView } from "./views/requests.js";

const VIEWS = [
  { id: "pipeline", title: "Pipeline", view: pipelineView },
  { id: "requests", title: "Requests", view: requestsView },
  { id: "adapters", title: "Adapters", view: adaptersView },
  { id: "chat", title: "Chat", view: chatView },
];

/** One word for the cluster's state, and how it looks. */
function status() {
  const { cluster, link, server } = state;
  if (link.state === "lost") return ["offline", "bad"];
  if (link.state === "refused") return ["locked", "idle"];
  if (link.state !== "live" || !cluster) return ["connecting", "idle"];
  if (server?.is_draining) return ["draining", "warn"];
  if (cluster.name === "failed") return ["failed", "bad"];
  if (cluster.name === "working") return ["ready", "good"];
  return [cluster.has_worked ? "recovering" : "starting", "warn"];
}

function head() {
  const [word, look] = status();
  const vitals = [
    ["speed", rate(latest("rate"))],
    ["running", state.pipeline?.num_running ?? NOTHING],
    ["waiting", state.pipeline?.num_waiting ?? NOTHING],
  ];
  return h.header(
    { class: "top" },
    h.a({ class: "brand", href: "#pipeline" }, h.img({ src: "ui/icon.svg", alt: "", width: 22, height: 22 }), "Brigade"),
    h.span({ class: "model" }, state.server?.model),
    h.span({ class: `pill ${look}`, role: "status", "data-state": word }, word),
    h.dl({ class: "vitals" }, vitals.map(([name, value]) => h.div(h.dt(name), h.dd(value)))),
    keysButton(),
    keysDialog,
  );
}

/** How the user's latest action went. @param {{isBad: boolean, text: string}} said */
const outcome = ({ isBad, text }) => h.p({ key: "said", class: `notice ${isBad ? "bad" : "good"}`, role: isBad ? "alert" : "status" }, text);

function page() {
  const { id, title, view } = VIEWS.find((each) => `#${each.id}` === location.hash) ?? VIEWS[0];
  document.title = `${title} · Brigade`;
  const isKnown = id === "chat" || state.cluster || state.link.state === "refused";
  return [
    head(),
    h.nav(
      { class: "views", "aria-label": "Views" },
      VIEWS.map((each) => h.a({ href: `#${each.id}`, "aria-current": each.id === id ? "page" : null }, each.title)),
    ),
    h.main(
      { id: "main", key: id, "data-view": id, tabindex: -1 },
      notice(id),
      state.said.text && outcome(state.said),
      isKnown ? view() : h.p({ class: "empty" }, state.link.message || "Connecting to the server …"),
    ),
  ];
}

addEventListener("hashchange", () => tell(""));
mount(/** @type {Element} */ (document.getElementById("app")), page);
void follow();
