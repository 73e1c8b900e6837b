// The page of a group.

import { chart, sparkline } from "./charts.js";
import { h, s } from "./dom.js";
import { drawing, ranksByNode, zonesOf } from "./drawing.js";
import { age, bytes, count, percent, perSecond, rate, ranks, seconds } from "./format.js";
import { pointsOf } from "./history.js";
import { waitingNodes } from "./overview.js";
import { badge, facts, incidentList, nodeBadge, nodeLink, opList, section, table, title } from "./parts.js";

const RECENT = 5;
const MOST_CAPS = 8;

export function groupPage(view, name) {
  const group = view.groups.find((each) => each.name === name);
  if (!group) return missing(name);
  const points = pointsOf(name);
  const incidents = view.incidents.filter((each) => each.group === name);
  const open = incidents.filter((each) => each.ended === null);
  const over = incidents.filter((each) => each.ended !== null).slice(0, RECENT);
  const messages = view.messages.filter((each) => each.group === name);
  return [
    h("nav", { class: "path", "aria-label": "Where you are", "data-key": "path" }, h("a", { href: "#/" }, "Overview"), " / group"),
    h("div", { class: "heading", "data-key": "heading" }, title(group.name), badge(group.phase)),
    h("p", { class: `lead${group.is_waiting || group.phase === "forming" ? " waits" : ""}`, "data-key": "lead" }, `${group.sentence}.`),
    open.length ? section("Incidents", incidentList(open, view.at)) : null,
    section("Nodes and links", picture(group, view)),
    section("Over time", h("div", { class: "charts" },
      chart("Throughput", "bytes of tensors per second", points, view.at, (p) => p.bytes_per_second, rate),
      chart("Ops", "collectives per second", points, view.at, (p) => p.ops_per_second, perSecond),
      chart("Latency", "median of an op, first call to result", points, view.at, (p) => p.latency, seconds),
      chart("Skew", "how far apart the ranks call an op", points, view.at, (p) => p.skew, seconds))),
    section("Who is slow", stragglers(group, points, view.at)),
    group.rounds.length ? section("Rounds", rounds(group, view.at)) : null,
    section("Ops in flight", opList(view.ops.filter((op) => op.group === name), messages)),
    section("Members", members(group, view)),
    over.length ? section("Past incidents", incidentList(over, view.at)) : null,
    section("Facts", groupFacts(group, view)),
  ];
}

function missing(name) {
  return [title(name), h("p", { class: "empty" }, "There is no group of this name, or it is over. ", h("a", { href: "#/" }, "To the overview"))];
}

function picture(group, view) {
  const { drawing: drawn, last_op: op } = group;
  const zones = [...zonesOf(drawn.nodes, view.byNode)].filter(([, number]) => number !== null);
  const words = drawn.is_condensed
    ? `${drawn.nodes.length} nodes in the order of the ring; links are drawn for 64 nodes or fewer.`
    : op ? `Op ${op.seq}, ${op.what || "a call"}: ${op.strategy}, ${seconds(op.seconds)}, ${age(op.age)} ago.`
      : "No op has run yet: the nodes in the order of the ring.";
  return h("div", { class: "picture" },
    h("figure", {}, drawing(group, view.byNode, waitingNodes(view, group.name)),
      h("figcaption", {}, words,
        zones.length ? h("ul", { class: "legend" }, zones.map(([zone, number]) => h("li", {},
          s("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, s("circle", { cx: 6, cy: 6, r: 4.5, class: `zone${number}` })),
          zone ? `zone ${zone}` : "no zone"))) : null)),
    table("Links", ["Link", "#Carries", "#Share", "Last op"], links(drawn), drawn.is_condensed ? "Nothing was sent between nodes in the last seconds." : "Nothing goes over links between nodes."));
}

function links({ edges }) {
  const busiest = [...edges].sort((a, b) => (b.bytes_per_second ?? 0) - (a.bytes_per_second ?? 0));
  return busiest.slice(0, 200).map((edge) => ({
    key: JSON.stringify([edge.source, edge.target]),
    cells: [[nodeLink(edge.source), " → ", nodeLink(edge.target)], rate(edge.bytes_per_second ?? 0), percent(edge.share),
      edge.planned ? `in its schedule, ${percent(edge.planned_share)}` : "not in its schedule"],
  }));
}

function stragglers(group, points, now) {
  const ranked = group.stragglers;
  if (!ranked.length) return h("p", { class: "empty" }, "Nothing was recorded in the last seconds.");
  const most = Math.max(...ranked.map((each) => each.own), 1e-9);
  const least = Math.min(...ranked.map((each) => each.own));
  return [
    h("p", { class: "note" }, "A rank's own time is from the end of an op until it calls the next one: all others wait for the rank with the longest."),
    table("Ranks by their own time", ["Rank", "Node", "#Own time", "Compared", "Over time", "#More than the fastest"], ranked.map((each) => ({
      key: `rank-${each.rank}-${each.node}`,
      cells: [`rank ${each.rank}`, nodeLink(each.node), seconds(each.own), bar(each.own / most),
        sparkline(points, now, (point) => point.own[each.rank], mostOwn(points, ranked)), seconds(each.own - least)],
    }))),
  ];
}

function mostOwn(points, ranked) {
  let most = 0;
  for (const point of points) for (const { rank } of ranked) most = Math.max(most, point.own[rank] ?? 0);
  return most;
}

function bar(share) {
  return s("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { class: "track", width: 100, height: 8, rx: 4 }), s("rect", { class: "value", width: (100 * share).toFixed(1), height: 8, rx: 4 }));
}

function members(group, view) {
  const held = ranksByNode(group);
  const names = [...new Set([...group.drawing.nodes, ...held.keys()])];
  return table("Members", ["Node", "State", "Zone", "Device", "Ranks"], names.map((name) => {
    const node = view.byNode.get(name);
    return {
      key: name,
      cells: [nodeLink(name), node ? nodeBadge(node) : badge("gone"), node?.zone ?? "", node?.device_type ?? "", ranks(held.get(name) ?? [])],
    };
  }), "No rank is there.");
}

function rounds(group, now) {
  return table("Latest rounds", ["Round", "Done", "Took part", "#Took", "#Sent"], group.rounds.map((each) => ({
    key: `round-${each.seq}`,
    cells: [`op ${each.seq}`, `${age(now - each.ended_at)} ago`, tookPart(each), seconds(each.seconds), bytes(each.sent_bytes)],
  })));
}

/** `2 of 4: not waited for rank 2; without rank 3` */
function tookPart({ absent, late, world_size: all }) {
  if (!absent.length) return `all ${all}`;
  const without = absent.filter((each) => !late.includes(each));
  return `${all - absent.length} of ${all}: ${[[late, "not waited for"], [without, "without"]].filter(([those]) => those.length)
    .map(([those, how]) => `${how} ${those.length > 1 ? "ranks" : "rank"} ${ranks(those)}`).join("; ")}`;
}

/** The caps on what nodes of a group send for it; those on other groups begin with their names. */
function capsOf(group, view) {
  const all = new Set(group.drawing.nodes.flatMap((name) => view.byNode.get(name)?.limits ?? []));
  const caps = [...all].filter((each) => !each.startsWith("group ") || each.startsWith(`group ${group.name}: `));
  return [...caps.slice(0, MOST_CAPS), ...(caps.length > MOST_CAPS ? [`and ${caps.length - MOST_CAPS} more`] : [])].join("; ");
}

function groupFacts(group, view) {
  const without = [...group.lost.map((each) => `rank ${each.rank} on node ${each.node} was lost`),
    ...group.left.map((each) => `rank ${each.rank} on node ${each.node} left`)];
  const strategies = Object.entries(group.strategies).map(([kind, strategy]) => `${kind}: ${strategy}`);
  return [
    facts([
      ["Ranks at the opening", group.world_size === null ? null : String(group.world_size)],
      ["Present", count(group.present.length, "rank")],
      ["Missing", group.missing.length ? ranks(group.missing) : null],
      ["Opening", group.opening === null ? null : String(group.opening)],
      ["Term", group.term === null ? null : String(group.term)],
      ["Timeout of an op", group.timeout === null ? null : seconds(group.timeout)],
      ["When a rank is lost", group.on_loss === "shrink" ? "the others repeat the op" : group.on_loss === "raise" ? "the op fails on all" : null],
      ["Fewest ranks", group.min_world === null ? null : String(group.min_world)],
      ["Most ranks", group.max_world === null ? null : String(group.max_world)],
      ["Traffic", group.traffic],
      ["Limits of its nodes", capsOf(group, view)],
      ["Strategies", strategies.length ? strategies.join(", ") : "chosen for each op"],
    ]),
    h("ul", { class: "lines" }, [...without, ...group.changes, ...group.links, ...group.lanes].map((each) => h("li", {}, each))),
  ];
}
