/**
 * The elements of a model's text. The server turns Markdown into HTML, and only the elements and
 * attributes listed here are copied from it. Nothing in the text is run or fetched.
 */
import { call, entering } from "./api.js";
import { h, redraw } from "./dom.js";

/** @import { Answer, Child } from "./types.d.ts" */

const PAUSE_MILLISECONDS = 500;
const COPIED_MILLISECONDS = 1500;
const ELEMENTS = new Set(
  ("A BLOCKQUOTE BR CODE EM H1 H2 H3 H4 H5 H6 HR LI OL P PRE S STRONG TABLE TBODY TD TH THEAD TR UL").split(" "),
);
const ATTRIBUTES = ["start", "align"];
const ADDRESS = /^(?:https?|mailto):/i;

/** What is rendered of an answer's text, and the text that was sent last.
 * @type {WeakMap<Answer, {sent: string, text: string, elements: ChildNode[], timer: number}>} */
let written = new WeakMap();
// What could not be rendered without a key may be rendered with one.
entering.addEventListener("change", () => (written = new WeakMap()));

/** The elements of an answer's text. What came after the latest pause is plain. @param {Answer} answer @returns {Child[]} */
export function elementsOf(answer) {
  const found = written.get(answer) ?? { sent: "", text: "", elements: [], timer: 0 };
  written.set(answer, found);
  if (found.sent !== answer.text) {
    found.sent = answer.text;
    clearTimeout(found.timer);
    found.timer = setTimeout(() => void render(found), answer.state === "running" ? PAUSE_MILLISECONDS : 0);
  }
  const isStart = answer.text.startsWith(found.text);
  return isStart ? [...found.elements, plain(answer.text.slice(found.text.length))] : [plain(answer.text)];
}

/** @param {string} text */
const plain = (text) => text && h.span({ class: "plain" }, text);

/** @param {{sent: string, text: string, elements: ChildNode[]}} found */
async function render(found) {
  const { sent } = found;
  try {
    const { html } = await (await call("ui/markdown", { body: { text: sent } })).json();
    if (sent !== found.sent) return;
    Object.assign(found, { text: sent, elements: [...allowed(html).childNodes] });
    redraw();
  } catch (error) {
    console.info(`The text stays plain: ${error.message}`);
  }
}

/** Copies of the elements and attributes that are allowed. @param {string} html */
export function allowed(html) {
  const made = document.createDocumentFragment();
  copy(new DOMParser().parseFromString(html, "text/html").body, made);
  return made;
}

/** Copies the children of a node. An element that is not allowed becomes its text. @param {Node} from @param {Node} to */
function copy(from, to) {
  for (const node of from.childNodes) {
    if (node instanceof Element && ELEMENTS.has(node.tagName)) to.appendChild(copyElement(node));
    else to.appendChild(new Text(node.textContent ?? ""));
  }
}

/** @param {Element} element */
function copyElement(element) {
  const made = document.createElement(element.tagName);
  for (const name of ATTRIBUTES) {
    const value = element.getAttribute(name);
    if (value !== null) made.setAttribute(name, value);
  }
  const address = element.getAttribute("href");
  if (made instanceof HTMLAnchorElement && address && ADDRESS.test(address)) {
    Object.assign(made, { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
  }
  copy(element, made);
  if (made instanceof HTMLPreElement) made.prepend(copyButton(made.textContent ?? ""));
  return made;
}

/** @param {string} text */
function copyButton(text) {
  const button = document.createElement("button");
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text).then(
      () => (button.textContent = "Copied"),
      () => (button.textContent = "Not allowed"),
    );
    setTimeout(() => (button.textContent = "Copy"), COPIED_MILLISECONDS);
  });
  return button;
}
