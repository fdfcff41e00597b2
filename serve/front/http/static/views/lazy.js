/** A view whose modules are fetched when it is first shown. */
import { html, useEffect, useState } from "../lib/dom.js";

/** @param {{load: () => Promise<{View: any}>}} props */
export function Lazy({ load }) {
  const [module, setModule] = useState(/** @type {{View: any} | null} */ (null));
  useEffect(() => {
    void load().then(setModule);
  }, []);
  return module ? html`<${module.View} />` : html`<p class="empty">Loading …</p>`;
}
