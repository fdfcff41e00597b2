/** The dialog for keys, and the button that opens it. */
import { keys, useKeys } from "../lib/api.js";
import { h, show } from "../lib/dom.js";

export const keysDialog = document.createElement("dialog");
keysDialog.setAttribute("aria-labelledby", "keys-title");

export function openKeys() {
  show(keysDialog, content());
  keysDialog.showModal();
}

export function keysButton() {
  return h.button({ class: "keys", onclick: openKeys }, keys.api || keys.admin ? "API keys ✓" : "API keys");
}

function content() {
  const field = { type: "password", autocomplete: "off" };
  return h.form(
    { onsubmit: enter },
    h.h2({ id: "keys-title" }, "API keys"),
    h.p({ class: "hint" }, "The API key is for chats, the admin key for everything else. They are sent to this server only, in a header."),
    h.label("API key", h.input({ name: "api", ...field, value: keys.api })),
    h.label("Admin key", h.input({ name: "admin", ...field, value: keys.admin })),
    h.label({ class: "check" }, h.input({ name: "kept", type: "checkbox" }), " Keep them until this tab is closed"),
    h.div(
      { class: "actions" },
      h.button({ type: "button", onclick: () => keysDialog.close() }, "Cancel"),
      h.button({ type: "submit", class: "first" }, "Use"),
    ),
  );
}

/** @param {SubmitEvent} event */
function enter(event) {
  event.preventDefault();
  const data = new FormData(/** @type {HTMLFormElement} */ (event.target));
  useKeys({ api: String(data.get("api")).trim(), admin: String(data.get("admin")).trim() }, data.has("kept"));
  keysDialog.close();
}
