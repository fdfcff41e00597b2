/** What the views build elements with. */
import { h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { render };
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
export { batch, computed, effect, signal, useComputed, useSignal } from "../vendor/signals.js";

/** JSX without a build step. Text in it is never read as HTML. */
export const html = htm.bind(h);
