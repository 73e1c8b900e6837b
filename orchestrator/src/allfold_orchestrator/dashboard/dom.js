// Elements from data, and a document that follows them. Text is always a text node, never markup:
// a name from the network can do no harm.

const SVG = "http://www.w3.org/2000/svg";

/** Return an HTML element. Children: elements, strings, numbers, lists of them; null is left out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return an SVG element. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child);
  }
  return element;
}

/**
 * Make the children of `parent` those that are given, and touch only what differs: the focus, a
 * selection, the scroll position and what a reader of the screen has come to stay where they are.
 */
export function show(parent, ...children) {
  const wanted = document.createDocumentFragment();
  wanted.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined));
  followChildren(parent, wanted);
}

function followChildren(old, wanted) {
  const keyed = new Map();
  for (const child of old.children) {
    const key = child.getAttribute("data-key");
    if (key !== null) keyed.set(key, child);
  }
  let at = old.firstChild;
  for (const next of [...wanted.childNodes]) {
    const key = next.nodeType === Node.ELEMENT_NODE ? next.getAttribute("data-key") : null;
    const known = key === null ? undefined : keyed.get(key);
    if (known && known !== at) old.insertBefore(known, at);
    const match = known ?? at;
    if (match && isLike(match, next)) {
      follow(match, next);
      at = match.nextSibling;
    } else {
      old.insertBefore(next, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function isLike(old, next) {
  if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName) return false;
  if (old.nodeType !== Node.ELEMENT_NODE) return true;
  return old.getAttribute("data-key") === next.getAttribute("data-key");
}

function follow(old, next) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const { name, value } of [...next.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    // What a reader has opened stays open.
    if (!next.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  followChildren(old, next);
}
