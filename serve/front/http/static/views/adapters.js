// @ts-check
/** The LoRA adapters: load, replace, unload, pin, and the default for requests that name none. */
import { call } from "../lib/api.js";
import { redraw, tags } from "../lib/dom.js";
import { NOTHING, bytes, clock, plural, seconds } from "../lib/format.js";
import { announce, state } from "../lib/store.js";

/** @import { Adapter } from "../lib/types.d.ts" */

const { article, b, br, button, code, dd, div, dl, dt, form, h1, h2, input, label, p, span } = tags;
const PATHS = /** @type {Record<string, string>} */ ({ folder: "Folder", hub: "org/name on the hub" });
let isBusy = false;
let sure = ""; // The adapter whose button asks once more.
let said = { isBad: false, text: "" };

export function adaptersView() {
  const { adapters, link, server } = state;
  return [
    h1("Adapters"),
    said.text && p({ class: `notice ${said.isBad ? "bad" : "good"}`, role: said.isBad ? "alert" : "status" }, said.text),
    server && (server.adapter_sources.length ? loadForm(server.adapter_sources) : howToLoad()),
    adapters.length
      ? div({ class: "cards" }, adapters.map(card))
      : link.state !== "refused" && p({ class: "empty" }, b("No adapter is loaded."), br(), `Requests are answered by ${server?.model ?? "the model"} itself.`),
  ];
}

/**
 * Makes a call, and says how it went: `Loaded pirate in 12 ms.`, or `Could not load pirate: …`.
 * @param {string} what to do, as in "load pirate" @param {string} done the same when it is done
 * @param {string} path @param {Record<string, unknown>} body
 */
async function change(what, done, path, body) {
  isBusy = true;
  redraw();
  const begin = performance.now();
  try {
    await call(path, { body, isAdmin: true });
    said = { isBad: false, text: `${done} in ${seconds((performance.now() - begin) / 1000)}.` };
    announce(said.text);
  } catch (error) {
    said = { isBad: true, text: `Could not ${what}: ${/** @type {Error} */ (error).message}` };
  }
  isBusy = false;
  redraw();
}

function howToLoad() {
  return p(
    { class: "note" },
    "To load adapters here, start the server with ", code("--adapter-root FOLDER"), " for adapters in folders, or with ",
    code("--allow-hub-adapters"), " for adapters on the hub.",
  );
}

/** @param {string[]} sources */
function loadForm(sources) {
  const field = { required: true, autocomplete: "off", spellcheck: "false" };
  return form(
    { class: "panel load", onsubmit: load },
    h2("Load or replace"),
    label("Name", input({ name: "name", maxlength: 300, ...field })),
    label(sources.map((each) => PATHS[each]).join(", or "), input({ name: "path", maxlength: 4096, ...field })),
    label({ class: "check" }, input({ type: "checkbox", name: "replace" }), " Replace an adapter of this name"),
    button({ class: "first", type: "submit", disabled: isBusy }, "Load on all ranks"),
    p(
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
  await change(`${what} ${name}`, `${done} ${name}`, "v1/load_lora_adapter", body);
  if (!said.isBad) target.reset();
}

/** @param {Adapter} adapter */
function card(adapter) {
  const { name, pinned } = adapter;
  const facts = [
    ["version", adapter.version ?? "read on use"],
    ["LoRA rank", adapter.rank || NOTHING],
    ["requests", adapter.num_running],
    ["loaded", adapter.loaded_at ? clock(adapter.loaded_at) : NOTHING],
    ...adapter.bytes.map((size, rank) => [`on rank ${rank}`, bytes(size)]),
  ];
  return article(
    { key: name, class: "panel adapter", "data-adapter": name },
    h2(span(name), state.default === name && span({ class: "tag" }, "default"), pinned && span({ class: "tag" }, "pinned")),
    dl(facts.map(([title, value]) => div(dt(title), dd(value)))),
    p({ class: "source", title: adapter.source }, adapter.source),
    p({ class: "actions" }, pinButton(adapter), defaultButton(adapter), unloadButton(adapter)),
  );
}

/** @param {Adapter} adapter */
function pinButton({ name, pinned }) {
  const [what, done] = pinned ? ["unpin", "Unpinned"] : ["pin", "Pinned"];
  const pin = () => change(`${what} ${name}`, `${done} ${name}`, "admin/adapters", { lora_name: name, pin: !pinned });
  return button({ type: "button", "aria-pressed": pinned, onclick: pin }, pinned ? "Unpin" : "Pin");
}

/** @param {Adapter} adapter */
function defaultButton({ name }) {
  const isDefault = state.default === name;
  const chosen = isDefault ? "the model" : name;
  const choose = () =>
    change(`make ${chosen} the default`, `Made ${chosen} the default`, "admin/adapters", { lora_name: name, default: !isDefault });
  return button({ type: "button", onclick: choose }, isDefault ? "Not the default" : "Make default");
}

/** @param {Adapter} adapter */
function unloadButton({ name, num_running: running }) {
  const isSure = sure === name;
  const ask = (/** @type {string} */ asked) => {
    sure = asked;
    redraw();
  };
  const unload = () => {
    ask("");
    void change(`unload ${name}`, `Unloaded ${name}`, "v1/unload_lora_adapter", { lora_name: name });
  };
  const first = running ? ` ${plural(running, "request finishes", "requests finish")} first` : "";
  return button(
    { type: "button", class: isSure ? "danger" : "", onclick: () => (isSure ? unload() : ask(name)), onblur: () => isSure && ask("") },
    isSure ? `Really unload?${first}` : "Unload",
  );
}
