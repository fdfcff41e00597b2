// @ts-check
/** A view whose modules are fetched when it is first shown. */
import { html, useEffect, useState } from "../lib/dom.js";

/** @param {{load: () => Promise<{View: any}>}} props */
export function Lazy({ load }) {
  const [module, setModule] = useState(/** @type {{View: any} | null} */ (null));
  const [isFailed, setFailed] = useState(false);
  const fetchModule = () => {
    setFailed(false);
    load().then(setModule, () => setFailed(true));
  };
  useEffect(fetchModule, []);
  if (module) return html`<${module.View} />`;
  if (!isFailed) return html`<p class="empty">Loading …</p>`;
  return html`<p class="empty">
    This part of the page could not be loaded.<br /><button type="button" onClick=${fetchModule}>Try again</button>
  </p>`;
}
