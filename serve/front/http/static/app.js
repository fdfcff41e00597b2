// @ts-check
/** The frame around the views: the header, the navigation and the announcements. */
import { follow } from "./lib/feed.js";
import { html, render, signal, useEffect } from "./lib/dom.js";
import { wanted } from "./lib/api.js";
import { rate } from "./lib/format.js";
import { RATE } from "./lib/history.js";
import { announcement, cluster, history, link, now, pipeline, server } from "./lib/store.js";
import { Adapters } from "./views/adapters.js";
import { Keys } from "./views/keys.js";
import { Notice } from "./views/notice.js";
import { PipelineView } from "./views/pipeline.js";
import { Requests } from "./views/requests.js";
import { Lazy } from "./views/lazy.js";

const VIEWS = [
  { id: "pipeline", title: "Pipeline", view: PipelineView },
  { id: "requests", title: "Requests", view: Requests },
  { id: "adapters", title: "Adapters", view: Adapters },
  { id: "chat", title: "Chat", view: () => html`<${Lazy} load=${() => import("./views/chat.js")} />` },
];

const shown = signal(fromAddress());

function fromAddress() {
  const id = location.hash.slice(1);
  return VIEWS.find((each) => each.id === id) ?? VIEWS[0];
}

addEventListener("hashchange", () => {
  shown.value = fromAddress();
});

/** One word for the cluster's state, and how it looks. */
function status() {
  const state = cluster.value;
  if (link.value.state !== "live" || !state) {
    const words = { refused: "locked", connecting: "connecting", full: "too many pages" };
    const word = /** @type {Record<string, string>} */ (words)[link.value.state] ?? "offline";
    return { word, look: link.value.state === "lost" ? "bad" : "idle" };
  }
  if (server.value?.is_draining) return { word: "draining", look: "warn" };
  if (state.name === "failed") return { word: "failed", look: "bad" };
  if (state.name === "working") return { word: "ready", look: "good" };
  return { word: state.has_worked ? "recovering" : "starting", look: "warn" };
}

function Header() {
  const { word, look } = status();
  const counted = pipeline.value;
  void now.value;
  return html`<header class="top">
    <a class="brand" href="#pipeline"><img src="ui/icon.svg" alt="" width="22" height="22" />Brigade</a>
    <span class="model" title="the model">${server.value?.model ?? ""}</span>
    <span class=${`pill ${look}`} data-state=${word}><i aria-hidden="true"></i>${word}</span>
    <dl class="vitals" aria-label="now">
      <div><dt>speed</dt><dd>${rate(history.latest(RATE))}</dd></div>
      <div><dt>running</dt><dd>${counted?.num_running ?? "–"}</dd></div>
      <div><dt>waiting</dt><dd>${counted?.num_waiting ?? "–"}</dd></div>
    </dl>
    <${Keys} />
  </header>`;
}

function Navigation() {
  return html`<nav class="views" aria-label="Views">
    ${VIEWS.map(
      ({ id, title }) =>
        html`<a href=${`#${id}`} aria-current=${shown.value.id === id ? "page" : undefined}>${title}</a>`,
    )}
  </nav>`;
}

function Page() {
  const { id, title, view: View } = shown.value;
  useEffect(() => {
    document.title = `${title} · Brigade`;
  }, [id]);
  const needsFeed = id !== "chat";
  return html`<${Header} />
    <${Navigation} />
    <main id="main" data-view=${id} tabindex="-1">
      <${Notice} />
      ${needsFeed && !cluster.value && wanted.value !== "admin"
        ? html`<p class="empty">${link.value.message || "Connecting to the server …"}</p>`
        : html`<${View} />`}
    </main>
    <div class="unseen" role="status" aria-live="polite">${announcement.value}</div>`;
}

const root = /** @type {Element} */ (document.getElementById("app"));
root.replaceChildren();
render(html`<${Page} />`, root);
void follow();
