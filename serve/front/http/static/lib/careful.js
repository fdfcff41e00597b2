/** A button that asks once more, because what it does cannot be undone. */
import { h, redraw } from "./dom.js";

let asked = ""; // The label of the button that asks once more.

/**
 * @param {string} words @param {string} label says what is meant, as in "Cancel request a"
 * @param {string} question @param {() => unknown} action
 */
export function carefulButton(words, label, question, action) {
  const isAsked = asked === label;
  const ask = (/** @type {string} */ next) => {
    asked = next;
    redraw();
  };
  const click = () => {
    ask(isAsked ? "" : label);
    if (isAsked) action();
  };
  return h.button(
    {
      class: isAsked ? "danger" : "",
      "aria-label": isAsked ? `${question} ${label}` : label,
      onclick: click,
      onblur: () => isAsked && ask(""),
    },
    isAsked ? question : words,
  );
}
