// The pages of nodes and of incidents.

import { h } from "./dom.js";
import { age, bytes, ranks, rate } from "./format.js";
import { nodeTable } from "./overview.js";
import { badge, facts, groupLink, incidentList, nodeBadge, nodeLink, opList, section, table, title } from "./parts.js";

export function nodesPage(view) {
  return [h("div", { class: "heading", "data-key": "heading" }, title("Nodes")), section("All nodes", nodeTable(view.nodes)),
    view.nodes.some((node) => node.token) ? section("Tokens", tokenTable(view.nodes)) : null];
}

function tokenTable(nodes) {
  const names = [...new Set(nodes.map((node) => node.token))].sort();
  return table("Tokens", ["Name of the token", "#Nodes", "#Sends"], names.map((name) => {
    const own = nodes.filter((node) => node.token === name);
    return { key: name, cells: [name || "(none)", `${own.length}`, rate(own.reduce((sum, node) => sum + node.bytes_sent_per_second, 0))] };
  }));
}

export function nodePage(view, name) {
  const node = view.byNode.get(name);
  if (!node) {
    return [title(name), h("p", { class: "empty" }, "There is no node of this name. ", h("a", { href: "#/nodes" }, "All nodes"))];
  }
  const groups = view.groups.filter((group) => group.drawing.nodes.includes(name) || node.groups[group.name]);
  const links = groups.flatMap((group) => group.drawing.edges
    .filter((edge) => edge.source === name || edge.target === name)
    .map((edge) => ({ group: group.name, ...edge })));
  const about = view.incidents.filter((each) => each.culprit.node === name || each.culprit.to === name || each.reporter === name);
  const zones = Object.keys(node.sent_to_zones).sort();
  const waiting = view.ops.filter((op) => op.missing.some((each) => each.node === name) || op.silent_nodes.includes(name));
  return [
    h("nav", { class: "path", "aria-label": "Where you are", "data-key": "path" }, h("a", { href: "#/nodes" }, "Nodes"), " / node"),
    h("div", { class: "heading", "data-key": "heading" }, title(name), nodeBadge(node)),
    node.problem ? h("p", { class: "lead bad", "data-key": "lead" }, `It does not answer the orchestrator: ${node.problem}.`)
      : h("p", { class: `lead${node.waiting_for ? " waits" : ""}`, "data-key": "lead" }, node.waiting_for ? `It is not ready: ${node.waiting_for}.` : `Answers; sends ${rate(node.bytes_sent_per_second)}, receives ${rate(node.bytes_received_per_second)}.`),
    section("Groups", table("Groups of this node", ["Group", "Phase", "Ranks here"], groups.map((group) => ({
      key: group.name,
      cells: [groupLink(group.name), badge(group.phase), ranks(node.groups[group.name] ?? group.present.filter((each) => each.node === name).map((each) => each.rank))],
    })), "It is in no group.")),
    section("Ops that wait for it", opList(waiting)),
    section("Links", table("Links of this node", ["Link", "Group", "#Carries"], links.map((edge) => ({
      key: JSON.stringify([edge.group, edge.source, edge.target]),
      cells: [[nodeLink(edge.source), " → ", nodeLink(edge.target)], groupLink(edge.group), rate(edge.bytes_per_second ?? 0)],
    })), "Nothing goes over links of this node.")),
    about.length ? section("Incidents", incidentList(about, view.at)) : null,
    section("Facts", facts([
      ["Heard", node.heartbeat_age === null ? "not any more" : `${age(node.heartbeat_age)} ago`],
      ["Limits", node.limits.length ? node.limits.join("; ") : null], ["Token", node.token || null], ["Zone", node.zone],
      ["Sent to zones", zones.some((zone) => zone) || node.zone ? zones.map((zone) => `${zone || "none"}: ${bytes(node.sent_to_zones[zone])}`).join("; ") : null], ["Device", node.device_type], ["Version", node.version],
      ["Control port", node.control_url], ["Data port", node.data_address],
    ])),
  ];
}

export function incidentsPage(view) {
  const open = view.incidents.filter((each) => each.ended === null);
  const over = view.incidents.filter((each) => each.ended !== null);
  return [
    h("div", { class: "heading", "data-key": "heading" }, title("Incidents")),
    section("Now", open.length ? incidentList(open, view.at) : h("p", { class: "empty" }, "Nothing is wrong.")),
    section("Before", over.length ? incidentList(over, view.at) : h("p", { class: "empty" }, "Nothing was wrong, as far back as the orchestrator remembers.")),
  ];
}
