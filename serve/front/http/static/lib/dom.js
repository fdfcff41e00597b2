// @ts-check
/** The functions of the libraries with which the views are built. */
import { h, render as renderInto } from "../vendor/preact.js";
import htm from "../vendor/htm.js";
import * as hooks from "../vendor/hooks.js";
import * as signals from "../vendor/signals.js";

/**
 * @template T
 * @typedef {{value: T, subscribe: (hear: (value: T) => void) => () => void}} Signal
 */

/** @type {(element: any, into: Element) => void} */
export const render = renderInto;
/** JSX without a build step. Text in it is never read as HTML.
 * @type {(strings: TemplateStringsArray, ...values: any[]) => any} */
export const html = htm.bind(h);

/** @type {<T>(value: T) => Signal<T>} */
export const signal = signals.signal;
/** @type {<T>(compute: () => T) => Signal<T>} */
export const computed = signals.computed;
/** @type {<T>(value: T) => Signal<T>} */
export const useSignal = signals.useSignal;
/** @type {(action: () => void) => void} */
export const batch = signals.batch;
/** @type {(run: () => void | (() => void), changes?: any[]) => void} */
export const useEffect = hooks.useEffect;
/** @type {<T>(value: T) => {current: T}} */
export const useRef = hooks.useRef;
/** @type {<T>(value: T) => [T, (value: T) => void]} */
export const useState = hooks.useState;
