// @ts-check
/** The dialog for keys, and the button that opens it. */
import { keys, useKeys } from "../lib/api.js";
import { show, tags } from "../lib/dom.js";

const { button, div, form, h2, input, label, p, path, span, svg } = tags;
const LOCK = "M5 8V5a3 3 0 0 1 6 0v3M3 8h10v6H3z";

export const keysDialog = document.createElement("dialog");
keysDialog.setAttribute("aria-labelledby", "keys-title");

export function openKeys() {
  show(keysDialog, content());
  keysDialog.showModal();
}

export function keysButton() {
  return button(
    {
      class: keys.wanted ? "keys wanted" : "keys",
      type: "button",
      "aria-label": keys.api || keys.admin ? "API keys (entered)" : "API keys",
      onclick: openKeys,
    },
    svg({ viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": true }, path({ d: LOCK })),
    span("API keys"),
  );
}

function content() {
  const field = { type: "password", autocomplete: "off" };
  return form(
    { onsubmit: enter },
    h2({ id: "keys-title" }, "API keys"),
    p(
      { class: "hint" },
      "The API key is for chats, the admin key for everything else. They are sent to this server in a header, and to nobody else.",
    ),
    label("API key", input({ name: "api", ...field, value: keys.api })),
    label("Admin key", input({ name: "admin", ...field, value: keys.admin })),
    label({ class: "check" }, input({ name: "kept", type: "checkbox" }), " Keep them until this tab is closed"),
    div(
      { class: "actions" },
      button({ type: "button", onclick: () => keysDialog.close() }, "Cancel"),
      button({ type: "submit", class: "first" }, "Use"),
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
