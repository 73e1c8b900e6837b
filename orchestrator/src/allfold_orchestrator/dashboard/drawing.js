// A group as it is: its nodes, and the links over which its ops go, with what each carries.

import { s } from "./dom.js";
import { labels as labelsOf, percent, ranks, rate, short } from "./format.js";

const FEW_NODES = 16;
const LABELLED_EDGES = 12;
const ZONE_COLOURS = 6;

/** Return the SVG of a group. `waiting`: the nodes of ranks that an op waits for. */
export function drawing(group, nodes, waiting, { compact = false } = {}) {
  const { drawing: picture } = group;
  const places = layOut(picture, compact);
  const zones = zonesOf(picture.nodes, nodes);
  const most = Math.max(...picture.edges.map((edge) => edge.bytes_per_second ?? 0), 0);
  const both = new Set(picture.edges.map((edge) => JSON.stringify([edge.source, edge.target])));
  const drawn = picture.is_condensed ? [] : picture.edges;
  const names = labelsOf(picture.nodes, Math.min(compact ? 11 : 17, places.room));
  const edges = drawn.map((edge) => drawEdge(edge, places, both, most));
  const labels = compact || picture.shape === "mesh" || picture.edges.length > LABELLED_EDGES ? []
    : drawn.map((edge) => labelEdge(edge, places, both));
  const held = ranksByNode(group);
  const many = picture.nodes.length > FEW_NODES;
  // One picture where it is small or crowded, whose text is beside it; else a group of links.
  const role = compact || many ? "img" : "group";
  return s("svg", { class: "drawing", viewBox: `0 0 ${places.width} ${places.height}`, role, "aria-label": inWords(group) },
    picture.is_condensed ? s("circle", { class: "orbit", cx: places.width / 2, cy: places.height / 2, r: places.radius }) : null,
    edges,
    labels,
    picture.nodes.map((name) => drawNode(name, {
      place: places.of.get(name),
      label: names.get(name),
      room: places.room,
      size: places.size,
      view: nodes.get(name),
      zone: zones.get(nodes.get(name)?.zone ?? ""),
      held: held.get(name) ?? [],
      waits: waiting.has(name),
      compact,
      many,
    })));
}

/** The zones of these nodes, each with the number of its colour; none where there is only one. */
export function zonesOf(names, nodes) {
  const zones = [...new Set(names.map((name) => nodes.get(name)?.zone ?? ""))].sort();
  return new Map(zones.map((zone, index) => [zone, zones.length > 1 ? index % ZONE_COLOURS : null]));
}

export function ranksByNode(group) {
  const held = new Map();
  for (const { rank, node } of group.present) held.set(node, [...(held.get(node) ?? []), rank]);
  return held;
}

/** The drawing's sentence, for those who do not see it. */
export function inWords(group) {
  const { nodes, edges, shape } = group.drawing;
  if (!nodes.length) return `Group ${group.name} has no nodes yet`;
  const busiest = edges.filter((edge) => edge.bytes_per_second)
    .sort((a, b) => b.bytes_per_second - a.bytes_per_second)[0];
  const how = { alone: "alone", ring: "in a ring", tree: "as a tree", mesh: "as a mesh" }[shape];
  const order = nodes.length > FEW_NODES ? `${nodes.length} nodes` : `nodes ${nodes.join(", ")}`;
  const most = busiest ? `; most goes from ${busiest.source} to ${busiest.target}: ${rate(busiest.bytes_per_second)}` : "";
  return `Group ${group.name}: ${order} ${how}${most}. The tables below have all of it.`;
}

function layOut(picture, compact) {
  const count = picture.nodes.length;
  const size = count > 32 ? 5 : count > FEW_NODES ? 9 : compact ? 17 : 24;
  const width = compact ? 340 : 560;
  if (picture.shape === "tree" && count > 2) return layOutTree(picture, width, size, compact);
  const flat = count <= 2;
  const height = flat ? (compact ? 150 : 200) : compact ? 250 : count > FEW_NODES ? 420 : 380;
  const radius = flat ? width * 0.27 : height / 2 - size - (count > FEW_NODES ? 14 : 30);
  const of = new Map();
  picture.nodes.forEach((name, index) => {
    const angle = (2 * Math.PI * index) / Math.max(count, 1) + (flat ? Math.PI : -Math.PI / 2);
    const out = count === 1 ? 0 : radius;
    of.set(name, {
      x: width / 2 + out * Math.cos(angle),
      y: (flat ? height / 2 - 10 : height / 2) + out * Math.sin(angle),
      side: flat ? 0 : Math.cos(angle),
      above: !flat && Math.sin(angle) < -0.9,
    });
  });
  return { of, size, width, height, radius, room: 22 };
}

function layOutTree(picture, width, size, compact) {
  const step = compact ? 72 : 104;
  const height = picture.levels.length * step + 16;
  const of = new Map();
  picture.levels.forEach((level, depth) => {
    level.forEach((index, column) => {
      const x = (width * (column + 0.5)) / level.length;
      of.set(picture.nodes[index], { x, y: depth * step + size + 12, side: 0, above: false });
    });
  });
  const widest = Math.max(...picture.levels.map((level) => level.length));
  return { of, size, width, height, radius: 0, room: Math.max(2, Math.floor(width / widest / 8.5)) };
}

function curve(edge, places, both) {
  const from = places.of.get(edge.source);
  const to = places.of.get(edge.target);
  if (!from || !to) return null;
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const [ux, uy] = [dx / length, dy / length];
  const bend = both.has(JSON.stringify([edge.target, edge.source])) ? Math.min(22, length * 0.16) : 0;
  const start = { x: from.x + ux * (places.size + 3), y: from.y + uy * (places.size + 3) };
  const end = { x: to.x - ux * (places.size + 7), y: to.y - uy * (places.size + 7) };
  const middle = { x: (from.x + to.x) / 2 - uy * bend, y: (from.y + to.y) / 2 + ux * bend };
  if (bend) {
    for (const [point, sign] of [[start, 1], [end, 1]]) {
      point.x -= uy * bend * 0.35 * sign;
      point.y += ux * bend * 0.35 * sign;
    }
  }
  return { start, middle, end, ux, uy };
}

function drawEdge(edge, places, both, most) {
  const path = curve(edge, places, both);
  if (!path) return null;
  const carried = edge.bytes_per_second ?? 0;
  const strength = most > 0 ? Math.sqrt(carried / most) : 0;
  const kind = carried > 0 ? (edge.planned ? "carries" : "other") : "idle";
  const { start, middle, end } = path;
  const [ax, ay] = direction(middle, end);
  const tip = 4 + 3 * strength;
  const points = [[end.x + ax * tip, end.y + ay * tip], [end.x - ax * 2 - ay * tip * 0.8, end.y - ay * 2 + ax * tip * 0.8],
    [end.x - ax * 2 + ay * tip * 0.8, end.y - ay * 2 - ax * tip * 0.8]];
  return s("g", { class: `edge ${kind}`, "data-key": JSON.stringify(["edge", edge.source, edge.target]) },
    s("title", {}, `${edge.source} → ${edge.target}: ${rate(carried)}, ${percent(edge.share)} of what the group sends`),
    s("path", { d: `M ${fixed(start)} Q ${fixed(middle)} ${fixed(end)}`, "stroke-width": (1.4 + 3.2 * strength).toFixed(2) }),
    s("polygon", { points: points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ") }));
}

function labelEdge(edge, places, both) {
  const path = curve(edge, places, both);
  if (!path || !edge.bytes_per_second) return null;
  const centre = { x: places.width / 2, y: places.height / 2 };
  const at = { x: (path.start.x + 2 * path.middle.x + path.end.x) / 4, y: (path.start.y + 2 * path.middle.y + path.end.y) / 4 };
  // Beside the line, on the side away from the middle, or on that to which it bends.
  let [nx, ny] = [-path.uy, path.ux];
  const bent = both.has(JSON.stringify([edge.target, edge.source]));
  if (!bent && (at.x - centre.x) * nx + (at.y - centre.y) * ny < 0) [nx, ny] = [-nx, -ny];
  const away = 13;
  return s("text", {
    class: "carried",
    x: (at.x + nx * away).toFixed(1),
    y: (at.y + ny * away + 4).toFixed(1),
    "text-anchor": nx > 0.5 ? "start" : nx < -0.5 ? "end" : "middle",
  }, rate(edge.bytes_per_second));
}

function direction(from, to) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  return [dx / length, dy / length];
}

function drawNode(name, { place, label: called, room, size, view, zone, held, waits, compact, many }) {
  if (!place) return null;
  const state = view?.problem ? "silent" : waits ? "waits" : "";
  const about = [view?.zone, view?.device_type].filter(Boolean).join(" · ");
  const words = state === "silent" ? "does not answer" : waits ? "an op waits for it" : about;
  const label = place.above ? { x: place.x, y: place.y - size - (compact || !words ? 8 : 22), anchor: "middle" }
    : Math.abs(place.side) > 0.3
      ? { x: place.x + Math.sign(place.side) * (size + 10), y: place.y + (compact ? 4 : 0), anchor: place.side > 0 ? "start" : "end" }
      : { x: place.x, y: place.y + size + 17, anchor: "middle" };
  const inner = ranks(held);
  const link = many || compact ? {} : { href: `#/nodes/${encodeURIComponent(name)}`, "aria-label": `Node ${name}, ${words || "there"}` };
  return s(link.href ? "a" : "g", { class: `node ${state}`, "data-key": `node-${name}`, ...link },
    s("title", {}, `${name}: ${words || "there"}${inner ? `, ranks ${inner}` : ""}`),
    s("circle", { cx: place.x.toFixed(1), cy: place.y.toFixed(1), r: size, class: zone === null || zone === undefined ? "" : `zone${zone}` }),
    many ? null : s("text", { class: "ranks", x: place.x.toFixed(1), y: (place.y + 4).toFixed(1), "text-anchor": "middle" }, short(inner, compact ? 5 : 7)),
    many ? null : s("text", { class: "label", x: label.x.toFixed(1), y: label.y.toFixed(1), "text-anchor": label.anchor }, called),
    many || compact || !words ? null
      : s("text", { class: "about", x: label.x.toFixed(1), y: (label.y + 15).toFixed(1), "text-anchor": label.anchor }, short(words, Math.min(22, room + 2))));
}

function fixed({ x, y }) {
  return `${x.toFixed(1)} ${y.toFixed(1)}`;
}
