// @ts-check
/** The dialog for keys. */
import { keys, useKeys, wanted } from "../lib/api.js";
import { html, useEffect, useRef } from "../lib/dom.js";

const LOCK = "M5 8V5a3 3 0 0 1 6 0v3M3 8h10v6H3z";

export function Keys() {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const hasKeys = keys.value.api || keys.value.admin;
  /** @param {SubmitEvent} event */
  const enter = (event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    const entered = { api: String(form.get("api")).trim(), admin: String(form.get("admin")).trim() };
    useKeys(entered, form.has("kept"));
    dialog.current?.close();
  };
  useEffect(() => {
    const open = () => dialog.current?.showModal();
    addEventListener("brigade-keys", open);
    return () => removeEventListener("brigade-keys", open);
  }, []);
  return html`<button
      class=${`keys ${wanted.value ? "wanted" : ""}`}
      type="button"
      aria-label=${hasKeys ? "API keys (entered)" : "API keys"}
      onClick=${() => dialog.current?.showModal()}
    >
      <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true"><path d=${LOCK} /></svg>
      <span>API keys</span>
    </button>
    <dialog ref=${dialog} aria-labelledby="keys-title">
      <form onSubmit=${enter}>
        <h2 id="keys-title">API keys</h2>
        <p class="hint">
          The API key is for chats, the admin key for everything else. They are sent to this server
          in a header, and to nobody else.
        </p>
        <label>API key<input name="api" type="password" autocomplete="off" defaultValue=${keys.value.api} /></label>
        <label>Admin key<input name="admin" type="password" autocomplete="off" defaultValue=${keys.value.admin} /></label>
        <label class="check"><input name="kept" type="checkbox" /> Keep them until this tab is closed</label>
        <div class="actions">
          <button type="button" onClick=${() => dialog.current?.close()}>Cancel</button>
          <button class="first" type="submit">Use</button>
        </div>
      </form>
    </dialog>`;
}

/** Opens the dialog from anywhere. */
export function askForKeys() {
  dispatchEvent(new Event("brigade-keys"));
}
