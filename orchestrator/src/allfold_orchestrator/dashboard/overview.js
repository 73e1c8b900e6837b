// The first page: what is going on, in a sentence; then incidents, groups and nodes.

import { sparkline } from "./charts.js";
import { h } from "./dom.js";
import { drawing } from "./drawing.js";
import { count, perSecond, rate, ranks, seconds, age } from "./format.js";
import { pointsOf } from "./history.js";
import { badge, groupLink, incidentList, nodeBadge, nodeLink, opList, READABLE_SECONDS, section, table, title } from "./parts.js";

export function overviewPage(view) {
  const { headline, groups, nodes, at } = view;
  const open = view.incidents.filter((each) => each.ended === null);
  return [
    h("div", { class: `headline ${headline.mood}`, "data-key": "headline" },
      title(headline.text),
      headline.mood === "calm" && view.is_complete ? null : h("p", {}, `${count(nodes.filter((each) => each.state === "alive").length, "node")}, `
        + `${count(groups.filter((each) => each.phase !== "gone").length, "group")}`
        + `${view.is_complete ? "" : ". There are more than this page shows"}.`)),
    open.length ? section("Incidents", incidentList(open, at)) : null,
    section("Groups", groups.length ? h("div", { class: "cards" }, groups.map((group) => card(group, view)))
      : h("div", { class: "empty" },
        h("p", {}, "No group has been opened yet. Ranks open one with ", h("code", {}, "allfold.init()"), ", or try:"),
        h("pre", {}, "allfold run --nproc-per-node 2 train.py"))),
    section("Ops in flight", opList(view.ops, view.messages)),
    section("Nodes", nodeTable(nodes)),
  ];
}

export function waitingNodes(view, group) {
  const found = new Set();
  for (const op of view.ops) {
    if (op.group !== group || op.age < READABLE_SECONDS) continue;
    for (const each of op.missing) found.add(each.node);
  }
  return found;
}

function card(group, view) {
  const points = pointsOf(group.name);
  const { figures } = group;
  const nodes = view.byNode;
  return h("article", { class: `card ${group.phase}`, "data-key": group.name, "aria-label": `Group ${group.name}` },
    h("header", {}, h("h3", {}, groupLink(group.name)), badge(group.phase),
      h("span", { class: "small" }, `${count(group.present.length, "rank")} on ${count(group.drawing.nodes.length, "node")}`)),
    h("p", { class: `sentence${group.is_waiting || group.phase === "forming" ? " waits" : ""}` }, `${group.sentence}.`),
    group.phase === "gone" ? null : h("div", { class: "inside" },
      drawing(group, nodes, waitingNodes(view, group.name), { compact: true }),
      h("dl", { class: "figures" },
        figure("Throughput", rate(figures.bytes_per_second), points, view.at, (p) => p.bytes_per_second),
        figure("Ops", perSecond(figures.ops_per_second), points, view.at, (p) => p.ops_per_second),
        figure("Latency", seconds(figures.latency), points, view.at, (p) => p.latency),
        figure("Skew", seconds(figures.skew), points, view.at, (p) => p.skew))));
}

function figure(name, value, points, now, read) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value, sparkline(points, now, read)));
}

export function nodeTable(nodes) {
  return table("Nodes", ["Node", "State", "Zone", "Device", "Ranks", "#Sends", "#Receives", "#Heard"],
    nodes.map((node) => ({
      key: node.node,
      cells: [nodeLink(node.node), [nodeBadge(node), node.problem && node.state !== "gone" ? h("span", { class: "why" }, node.problem) : null,
        node.waiting_for ? h("span", { class: "why" }, node.waiting_for) : null], whole(node.zone), whole(node.device_type), ranksOf(node),
      rate(node.bytes_sent_per_second), rate(node.bytes_received_per_second),
      node.heartbeat_age === null ? "–" : `${age(node.heartbeat_age)} ago`],
    })), [
      "No node has registered yet. An agent does so when it is started, e.g. with ",
      h("code", {}, "allfold agent"), ".",
    ]);
}

/** Short words stay on one line. */
function whole(word) {
  return h("span", { class: word.length <= 20 ? "whole" : null }, word);
}

function ranksOf(node) {
  const groups = Object.entries(node.groups);
  return groups.map(([name, held], index) => [index ? "; " : "", groupLink(name), `: ${ranks(held)}`]);
}
