// @ts-check
/** The LoRA adapters: load, replace, unload, pin, and the default for requests that name none. */
import { call } from "../lib/api.js";
import { html, signal, useSignal } from "../lib/dom.js";
import { NOTHING, bytes, clock, plural, seconds } from "../lib/format.js";
import { adapters, announce, defaultModel, server } from "../lib/store.js";

/** @typedef {import("../lib/types.d.ts").Adapter} Adapter */

const isBusy = signal(false);
const said = signal({ isBad: false, text: "" });

export function Adapters() {
  return html`<h1>Adapters</h1>
    ${said.value.text && html`<p class=${`notice ${said.value.isBad ? "bad" : "good"}`} role=${said.value.isBad ? "alert" : "status"}>${said.value.text}</p>`}
    ${server.value?.adapter_sources.length ? html`<${LoadForm} sources=${server.value.adapter_sources} />` : html`<${NoLoading} />`}
    ${adapters.value.length
      ? html`<div class="cards">${adapters.value.map((each) => html`<${Card} key=${each.name} adapter=${each} />`)}</div>`
      : html`<p class="empty"><b>No adapter is loaded.</b><br />Requests are answered by ${server.value?.model ?? "the model"} itself.</p>`}`;
}

/**
 * Makes a call, and says how it went: `Loaded pirate in 12 ms.`, or `Could not load pirate: …`.
 * @param {string} what to do, as in "load pirate" @param {string} done the same when it is done
 * @param {string} path @param {Record<string, unknown>} body
 */
async function change(what, done, path, body) {
  isBusy.value = true;
  const begin = performance.now();
  try {
    await call(path, { body, isAdmin: true });
    const text = `${done} in ${seconds((performance.now() - begin) / 1000)}.`;
    said.value = { isBad: false, text };
    announce(text);
    return true;
  } catch (error) {
    said.value = { isBad: true, text: `Could not ${what}: ${/** @type {Error} */ (error).message}` };
    return false;
  } finally {
    isBusy.value = false;
  }
}

function NoLoading() {
  return html`<p class="note">
    To load adapters here, start the server with <code>--adapter-root FOLDER</code> for adapters in folders, or
    with <code>--allow-hub-adapters</code> for adapters on the hub.
  </p>`;
}

const PATHS = /** @type {Record<string, string>} */ ({ folder: "Folder", hub: "org/name on the hub" });

/** @param {{sources: string[]}} props */
function LoadForm({ sources }) {
  /** @param {SubmitEvent} event */
  const load = async (event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (event.target);
    const data = new FormData(form);
    const name = String(data.get("name")).trim();
    const isReplaced = adapters.value.some((each) => each.name === name);
    const body = { lora_name: name, lora_path: String(data.get("path")).trim(), load_inplace: data.has("replace") };
    if (await change(`${isReplaced ? "replace" : "load"} ${name}`, `${isReplaced ? "Replaced" : "Loaded"} ${name}`, "v1/load_lora_adapter", body)) form.reset();
  };
  return html`<form class="panel load" onSubmit=${load}>
    <h2>Load or replace</h2>
    <label>Name<input name="name" required maxlength="300" autocomplete="off" spellcheck=${false} /></label>
    <label>${sources.map((each) => PATHS[each]).join(", or ")}<input name="path" required maxlength="4096" autocomplete="off" spellcheck=${false} /></label>
    <label class="check"><input type="checkbox" name="replace" /> Replace an adapter of this name</label>
    <button class="first" type="submit" disabled=${isBusy.value}>Load on all ranks</button>
    <p class="hint">${sources.includes("folder") && "Folders must be below --adapter-root. "}Running requests finish with the version they started with.</p>
  </form>`;
}

/** @param {{adapter: Adapter}} props */
function Card({ adapter }) {
  const { name, pinned, version } = adapter;
  const isDefault = defaultModel.value === name;
  const isSure = useSignal(false);
  const unload = () => {
    if (isSure.value) void change(`unload ${name}`, `Unloaded ${name}`, "v1/unload_lora_adapter", { lora_name: name });
    isSure.value = !isSure.value;
  };
  return html`<article class="panel adapter" data-adapter=${name}>
    <h2><span>${name}</span>
      ${isDefault && html`<span class="tag">default</span>`}${pinned && html`<span class="tag">pinned</span>`}
    </h2>
    <dl>
      <div><dt>version</dt><dd>${version ?? "read on use"}</dd></div>
      <div><dt>LoRA rank</dt><dd>${adapter.rank || NOTHING}</dd></div>
      <div><dt>requests</dt><dd>${adapter.num_running}</dd></div>
      <div><dt>loaded</dt><dd>${adapter.loaded_at ? clock(adapter.loaded_at) : NOTHING}</dd></div>
      ${adapter.bytes.map((size, rank) => html`<div><dt>on rank ${rank}</dt><dd>${bytes(size)}</dd></div>`)}
    </dl>
    <p class="source" title=${adapter.source}>${adapter.source}</p>
    <p class="actions">
      <button type="button" aria-pressed=${pinned} onClick=${() => change(`${pinned ? "unpin" : "pin"} ${name}`, `${pinned ? "Unpinned" : "Pinned"} ${name}`, "admin/adapters", { lora_name: name, pin: !pinned })}>${pinned ? "Unpin" : "Pin"}</button>
      <button type="button" onClick=${() => change(isDefault ? "make the model the default" : `make ${name} the default`, isDefault ? "Made the model the default" : `Made ${name} the default`, "admin/adapters", { lora_name: name, default: !isDefault })}>${isDefault ? "Not the default" : "Make default"}</button>
      <button type="button" class=${isSure.value ? "danger" : ""} onClick=${unload} onBlur=${() => (isSure.value = false)}>
        ${isSure.value ? `Really unload${adapter.num_running ? `? ${plural(adapter.num_running, "request finishes", "requests finish")} first` : "?"}` : "Unload"}
      </button>
    </p>
  </article>`;
}
