/** The LoRA adapters: load, replace, unload, pin, and the default for requests that name none. */
import { call } from "../lib/api.js";
import { carefulButton } from "../lib/careful.js";
import { h } from "../lib/dom.js";
import { NOTHING, bytes, clock, plural } from "../lib/format.js";
import { attempt, state } from "../lib/store.js";

/** @import { Adapter } from "../lib/types.d.ts" */

const PATHS = /** @type {Record<string, string>} */ ({ folder: "Folder", hub: "org/name on the hub" });

export function adaptersView() {
  const { adapters, link, server } = state;
  return [
    h.h1("Adapters"),
    server && (server.adapter_sources.length ? loadForm(server.adapter_sources) : howToLoad()),
    adapters.length
      ? h.div({ class: "cards" }, adapters.map(card))
      : link.state !== "refused" && h.p({ class: "empty" }, h.b("No adapter is loaded."), h.br(), `Requests are answered by ${server?.model ?? "the model"} itself.`),
  ];
}

/** @param {string} path @param {object} body */
const change = (path, body) => () => call(path, { body, isAdmin: true });

function howToLoad() {
  return h.p(
    { class: "note" },
    "To load adapters here, start the server with ", h.code("--adapter-root FOLDER"), " for adapters in folders, or with ",
    h.code("--allow-hub-adapters"), " for adapters on the hub.",
  );
}

/** @param {string[]} sources */
function loadForm(sources) {
  const field = { required: true, autocomplete: "off", spellcheck: "false" };
  return h.form(
    { class: "panel load", onsubmit: load },
    h.h2("Load or replace"),
    h.label("Name", h.input({ name: "name", maxlength: 300, ...field })),
    h.label(sources.map((each) => PATHS[each]).join(", or "), h.input({ name: "path", maxlength: 4096, ...field })),
    h.label({ class: "check" }, h.input({ type: "checkbox", name: "replace" }), " Replace an adapter of this name"),
    h.button({ class: "first", type: "submit", disabled: state.isBusy }, "Load on all ranks"),
    h.p(
      { class: "hint" },
      sources.includes("folder") && "Folders must be below --adapter-root. ",
      "Running requests finish with the version they started with.",
    ),
  );
}

/** @param {SubmitEvent} event */
async function load(event) {
  event.preventDefault();
  const target = /** @type {HTMLFormElement} */ (event.target);
  const data = new FormData(target);
  const name = String(data.get("name")).trim();
  const [what, done] = state.adapters.some((each) => each.name === name) ? ["replace", "Replaced"] : ["load", "Loaded"];
  const body = { lora_name: name, lora_path: String(data.get("path")).trim(), load_inplace: data.has("replace") };
  await attempt(`${what} ${name}`, change("v1/load_lora_adapter", body), `${done} ${name}`);
  if (!state.said.isBad) target.reset();
}

/** @param {Adapter} adapter */
function card(adapter) {
  const { name, pinned, source } = adapter;
  const facts = [
    ["version", adapter.version ?? "read on use"],
    ["LoRA rank", adapter.rank || NOTHING],
    ["requests", adapter.num_running],
    ["loaded", adapter.loaded_at ? clock(adapter.loaded_at) : NOTHING],
    ...adapter.bytes.map((size, rank) => [`on rank ${rank}`, bytes(size)]),
  ];
  return h.article(
    { key: name, class: "panel", "data-adapter": name },
    h.h2(h.span(name), state.default === name && h.span({ class: "tag" }, "default"), pinned && h.span({ class: "tag" }, "pinned")),
    h.dl({ class: "facts" }, facts.map(([title, value]) => h.div(h.dt(title), h.dd(value)))),
    h.p({ class: "source", title: source }, source),
    actions(adapter),
  );
}

/** @param {Adapter} adapter */
function actions({ name, pinned, num_running: running }) {
  const pin = change("admin/adapters", { lora_name: name, pin: !pinned });
  const [what, done] = pinned ? ["unpin", "Unpinned"] : ["pin", "Pinned"];
  const isDefault = state.default === name;
  const choose = change("admin/adapters", { lora_name: name, default: !isDefault });
  const chosen = `${isDefault ? "the model" : name} the default`;
  const unload = change("v1/unload_lora_adapter", { lora_name: name });
  const first = running ? ` ${plural(running, "request finishes", "requests finish")} first` : "";
  return h.p(
    { class: "actions" },
    h.button(
      { "aria-pressed": pinned, onclick: () => attempt(`${what} ${name}`, pin, `${done} ${name}`) },
      pinned ? "Unpin" : "Pin",
    ),
    h.button(
      { onclick: () => attempt(`make ${chosen}`, choose, `Made ${chosen}`) },
      isDefault ? "Not the default" : "Make default",
    ),
    carefulButton("Unload", `Unload ${name}`, `Really?${first}`, () => attempt(`unload ${name}`, unload, `Unloaded ${name}`)),
  );
}
