/**
 * Builds and updates elements. A view is a function that describes the elements, and `show`
 * changes what differs, so that focus, scroll positions and typed text stay. Text is never read as HTML.
 */

/** @import { Child, Props } from "./types.d.ts" */

const SVG = "http://www.w3.org/2000/svg";
/** Properties that the user changes, too: the element has their values, not its latest description. */
const LIVE = ["value", "checked", "selected", "data"];

export class Description {
  /** @param {string} tag @param {Props} props @param {Child[]} children */
  constructor(tag, props, children) {
    this.tag = tag;
    this.props = props;
    this.children = children;
    /** Children of one element with equal names are interchangeable. */
    this.name = `${tag} ${props.key ?? ""}`;
  }
}

/**
 * Functions that describe elements, by tag: `h.p({ class: "note" }, "text", h.b("more"))`. The
 * properties are optional: attributes, handlers such as `onclick`, the `key` of an item in a list,
 * and the functions `created` and `drawn`, which get the element.
 * @type {Record<string, (...parts: (Props | Child)[]) => Description>}
 */
export const h = new Proxy({}, {
  get: (_, /** @type {string} */ tag) => (/** @type {any} */ first, /** @type {any[]} */ ...rest) =>
    first?.constructor === Object ? new Description(tag, first, rest) : new Description(tag, {}, [first, ...rest]),
});

/** The description of each node that was made of one. @type {WeakMap<Node, Description>} */
const descriptions = new WeakMap();

/** Makes these the children of an element. Nothing is shown for null, false and "".
 * @param {Element} parent @param {Child[]} children */
export function show(parent, ...children) {
  const wanted = /** @type {any[]} */ (children).flat(Infinity).filter((each) => each != null && each !== false && each !== "");
  const old = Map.groupBy(parent.childNodes, (node) => descriptions.get(node)?.name);
  const nodes = wanted.map((child) => nodeOf(child, parent, old));
  const kept = new Set(nodes);
  for (const node of [...parent.childNodes]) if (!kept.has(node)) node.remove();
  nodes.forEach((node, place) => {
    const next = parent.childNodes[place] ?? null;
    if (node !== next) parent.insertBefore(node, next);
  });
}

/** The node for a child: the first old one of its name, if there is one.
 * @param {any} child @param {Element} parent @param {Map<string | undefined, ChildNode[]>} old */
function nodeOf(child, parent, old) {
  if (child instanceof Node) return child;
  const description = child instanceof Description ? child : new Description("#text", { data: String(child) }, []);
  const found = old.get(description.name)?.shift();
  const node = found ?? make(description.tag, parent);
  const before = found && descriptions.get(found);
  if (before === description) return node;
  descriptions.set(node, description);
  update(node, before?.props ?? {}, description);
  if (!found) description.props.created?.(node);
  description.props.drawn?.(node);
  return node;
}

/** @param {string} tag @param {Element} parent */
function make(tag, parent) {
  return tag === "#text" ? new Text() : document.createElementNS(tag === "svg" ? SVG : parent.namespaceURI, tag);
}

/** @param {any} element @param {Props} before @param {Description} description */
function update(element, before, { props, children }) {
  show(element, ...children);
  for (const name of Object.keys({ ...before, ...props })) {
    const value = props[name];
    if (["key", "created", "drawn"].includes(name)) continue;
    if (LIVE.includes(name)) {
      if (element[name] !== value) element[name] = value;
    } else if (name.startsWith("on")) element[name] = value ?? null;
    else if (value !== before[name]) setAttribute(element, name, value);
  }
}

/** @param {Element} element @param {string} name @param {unknown} value */
function setAttribute(element, name, value) {
  const isState = name.startsWith("aria-"); // Its values are the words true and false.
  if (value == null || (value === false && !isState)) element.removeAttribute(name);
  else element.setAttribute(name, value === true && !isState ? "" : String(value));
}

let isDue = false;
let draw = () => {};

/** Shows a view in an element whenever `redraw` is called. @param {Element} parent @param {() => Child} view */
export function mount(parent, view) {
  draw = () => show(parent, view());
  draw();
}

/** Shows the view again with the next frame of the screen. */
export function redraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}
