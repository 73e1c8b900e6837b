// Parts that several pages show.

import { h } from "./dom.js";
import { age } from "./format.js";

export const to = {
  group: (name) => `#/groups/${encodeURIComponent(name)}`,
  node: (name) => `#/nodes/${encodeURIComponent(name)}`,
};

export function groupLink(name) {
  return h("a", { href: to.group(name) }, name);
}

export function nodeLink(name) {
  return h("a", { href: to.node(name) }, name);
}

/** A heading that gets the focus when its page is opened. */
export function title(...children) {
  return h("h1", { tabindex: "-1" }, ...children);
}

export function section(heading, ...children) {
  const id = `h-${heading.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { "aria-labelledby": id, "data-key": id }, h("h2", { id }, heading), ...children);
}

/** A table that scrolls by itself where it is wide. Rows: lists of cells, the first names the row. */
export function table(caption, columns, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  return h("div", { class: "scroll", role: "group", "aria-label": `${caption}, a table`, tabindex: "0" },
    h("table", {},
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, columns.map((each) => h("th", { scope: "col", class: each.startsWith("#") ? "number" : null }, each.replace("#", ""))))),
      h("tbody", {}, rows.map(({ key, cells }) => h("tr", { "data-key": key },
        cells.map((cell, index) => index === 0 ? h("th", { scope: "row" }, cell)
          : h("td", { class: columns[index].startsWith("#") ? "number" : null }, cell)))))));
}

const STATES = {
  alive: ["good", "there"],
  late: ["wait", "late"],
  gone: ["off", "gone"],
  ready: ["good", "complete"],
  reduced: ["wait", "goes on without some"],
  forming: ["wait", "is forming"],
  recalled: ["wait", "recalled"],
  unreadable: ["bad", "unreadable"],
};

export function badge(state, text) {
  const [mood, words] = STATES[state] ?? ["off", state];
  return h("span", { class: `badge ${mood}` }, text ?? words);
}

export function nodeBadge(node) {
  if (node.state !== "gone" && node.problem) return h("span", { class: "badge bad" }, "does not answer");
  if (node.draining) return h("span", { class: "badge wait" }, "drains");
  return badge(node.state);
}

/** Ops that are younger come and go too fast to be read. */
export const READABLE_SECONDS = 0.3;

function upper(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

const EFFECTS = { hang: "Hang", slow: "Slow", failed: "Failed" };

export function incidentItem(incident, now) {
  const open = incident.ended === null;
  const when = open ? `for ${age(now - incident.began)}` : `over, ${age(now - incident.ended)} ago; lasted ${age(incident.ended - incident.began)}`;
  return h("li", { class: `incident ${open ? incident.effect : "over"}`, "data-key": incident.id },
    h("p", { class: "kind" }, h("strong", {}, EFFECTS[incident.effect] ?? incident.effect), " ", h("span", {}, when),
      incident.group ? [" ", h("span", {}, "in group ", groupLink(incident.group))] : null),
    h("p", { class: "sentence" }, `${upper(incident.sentence)}.`),
    h("p", { class: "source" },
      incident.communication ? "The network or an agent is at fault" : "A rank or its machine is at fault",
      incident.reporter ? [", says node ", nodeLink(incident.reporter)] : null));
}

export function incidentList(incidents, now) {
  return h("ul", { class: "incidents" }, incidents.map((each) => incidentItem(each, now)));
}

/** The ops in flight, and the sends and receives, as sentences. */
export function opList(every, messages = []) {
  const ops = every.filter((op) => op.age >= READABLE_SECONDS);
  const shown = ops.slice(0, 12);
  if (!shown.length && !messages.length) {
    return h("p", { class: "empty" }, "No op waits for anyone.");
  }
  return h("ul", { class: "ops" },
    shown.map((op) => h("li", { class: op.missing.length || op.silent_nodes.length ? "waits" : null, "data-key": `${op.group}-${op.seq}` }, h("span", { class: "sentence" }, `${upper(op.sentence)}.`))),
    messages.slice(0, 12).map((each) => h("li", { class: "waits" }, h("span", { class: "sentence" }, `${upper(each.sentence)}.`))),
    ops.length > shown.length ? h("li", {}, `and ${ops.length - shown.length} more`) : null);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
