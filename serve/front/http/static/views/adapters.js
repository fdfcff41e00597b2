// @ts-check
/** The LoRA adapters: load, replace, unload, pin, and the default for requests that name none. */
import { call } from "../lib/api.js";
import { html, signal, useSignal } from "../lib/dom.js";
import { NOTHING, bytes, plural, seconds } from "../lib/format.js";
import { adapters, announce, defaultModel, server } from "../lib/store.js";

/** @typedef {import("../lib/types.d.ts").Adapter} Adapter */

const busy = signal("");
const said = signal({ isBad: false, text: "" });

export function Adapters() {
  return html`<h1>Adapters</h1>
    ${said.value.text && html`<p class=${`notice ${said.value.isBad ? "bad" : "good"}`} role=${said.value.isBad ? "alert" : "status"}>${said.value.text}</p>`}
    <${LoadForm} />
    ${adapters.value.length
      ? html`<div class="cards">${adapters.value.map((each) => html`<${Card} key=${each.name} adapter=${each} />`)}</div>`
      : html`<p class="empty"><b>No adapter is loaded.</b><br />Requests are answered by ${server.value?.model ?? "the model"} itself.</p>`}`;
}

/**
 * @param {string} what @param {string} path @param {Record<string, unknown>} body
 * @returns {Promise<boolean>}
 */
async function change(what, path, body) {
  busy.value = what;
  const begin = performance.now();
  try {
    await call(path, { body, isAdmin: true });
    const text = `${what}: done in ${seconds((performance.now() - begin) / 1000)}.`;
    said.value = { isBad: false, text };
    announce(text);
    return true;
  } catch (error) {
    said.value = { isBad: true, text: `${what}: ${/** @type {Error} */ (error).message}` };
    return false;
  } finally {
    busy.value = "";
  }
}

function LoadForm() {
  /** @param {SubmitEvent} event */
  const load = async (event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (event.target);
    const data = new FormData(form);
    const name = String(data.get("name")).trim();
    const isReplaced = adapters.value.some((each) => each.name === name);
    const body = { lora_name: name, lora_path: String(data.get("path")).trim(), load_inplace: data.has("replace") };
    if (await change(`${isReplaced ? "Replace" : "Load"} ${name}`, "v1/load_lora_adapter", body)) form.reset();
  };
  return html`<form class="panel load" onSubmit=${load}>
    <h2>Load or replace</h2>
    <label>Name<input name="name" required maxlength="300" autocomplete="off" spellcheck=${false} /></label>
    <label>Folder, or org/name on the hub<input name="path" required maxlength="4096" autocomplete="off" spellcheck=${false} /></label>
    <label class="check"><input type="checkbox" name="replace" /> Replace an adapter of this name</label>
    <button class="first" type="submit" disabled=${Boolean(busy.value)}>${busy.value ? `${busy.value} …` : "Load on all ranks"}</button>
    <p class="hint">Paths must be below --adapter-root. Running requests finish with the version they started with.</p>
  </form>`;
}

/** @param {{adapter: Adapter}} props */
function Card({ adapter }) {
  const { name, pinned, version } = adapter;
  const isDefault = defaultModel.value === name;
  const isSure = useSignal(false);
  const unload = () => {
    if (isSure.value) void change(`Unload ${name}`, "v1/unload_lora_adapter", { lora_name: name });
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
      <div><dt>loaded</dt><dd>${adapter.loaded_at ? new Date(adapter.loaded_at * 1000).toLocaleTimeString() : NOTHING}</dd></div>
      ${adapter.bytes.map((size, rank) => html`<div><dt>on rank ${rank}</dt><dd>${bytes(size)}</dd></div>`)}
    </dl>
    <p class="source" title=${adapter.source}>${adapter.source}</p>
    <p class="actions">
      <button type="button" aria-pressed=${pinned} onClick=${() => change(`${pinned ? "Unpin" : "Pin"} ${name}`, "admin/adapters", { lora_name: name, pin: !pinned })}>${pinned ? "Unpin" : "Pin"}</button>
      <button type="button" onClick=${() => change(isDefault ? "Make the model the default" : `Make ${name} the default`, "admin/adapters", { lora_name: name, default: !isDefault })}>${isDefault ? "Not the default" : "Make default"}</button>
      <button type="button" class=${isSure.value ? "danger" : ""} onClick=${unload} onBlur=${() => (isSure.value = false)}>
        ${isSure.value ? `Really unload${adapter.num_running ? `? ${plural(adapter.num_running, "request finishes", "requests finish")} first` : "?"}` : "Unload"}
      </button>
    </p>
  </article>`;
}
