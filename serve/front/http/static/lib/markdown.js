// @ts-check
/** Turns a model's text into elements. Nothing in the text is run or fetched. */
import DOMPurify from "../vendor/dompurify.js";
import { Marked } from "../vendor/marked.js";

const marked = new Marked({ gfm: true, breaks: false });
const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
  "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const OPTIONS = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (/** @type {Element} */ node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** HTML in the text is shown and not interpreted. @param {string} text */
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

marked.use({
  renderer: {
    html: (/** @type {{text: string}} */ { text }) => escaped(text),
    // An image would be fetched, so only its description is shown.
    image: (/** @type {{text: string, href: string}} */ { text, href }) =>
      escaped(`[image: ${text || href}]`),
  },
});

/** @param {string} text @returns {DocumentFragment} */
export function rendered(text) {
  return DOMPurify.sanitize(/** @type {string} */ (marked.parse(text)), OPTIONS);
}
