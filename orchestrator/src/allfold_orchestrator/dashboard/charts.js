// Small charts of the last minutes, each with its figures as a table for those who do not see it.

import { h, s } from "./dom.js";
import { NONE } from "./format.js";

const WIDTH = 300;
const HEIGHT = 72;
const GAP_SECONDS = 4;
const SPANS = [[60, "1 min ago"], [120, "2 min ago"], [300, "5 min ago"]];
const ROWS = 10;

/** Return a chart with heading and current value; `read` gives the figure of a point, or null. */
export function chart(title, about, points, now, read, format) {
  const known = points.filter((point) => read(point) !== null && read(point) !== undefined);
  const values = known.map(read);
  const latest = values.length ? values.at(-1) : null;
  const most = Math.max(...values, 0);
  const [span, since] = spanOf(points, now);
  const said = values.length
    ? `${title}, since ${since}: now ${format(latest)}, at most ${format(most)}`
    : `${title}: nothing was measured yet`;
  return h("figure", { class: "chart", "data-key": `chart-${title}` },
    h("figcaption", {}, h("span", { class: "name" }, title), h("strong", {}, format(latest)), h("small", {}, about)),
    s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": said },
      s("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }),
      lines(known, now, read, most, span)),
    h("p", { class: "scale", "aria-hidden": "true" },
      h("span", {}, since), h("span", {}, values.length ? `max ${format(most)}` : ""), h("span", {}, "now")),
    asTable(title, known, now, read, format, span));
}

/** Return a line without words, for a row that has them. */
export function sparkline(points, now, read, most) {
  const known = points.filter((point) => read(point) !== null && read(point) !== undefined);
  return s("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    lines(known, now, read, most ?? Math.max(...known.map(read), 0), spanOf(points, now)[0]));
}

/** The shortest span that has all points: a chart is full from its first minute on. */
function spanOf(points, now) {
  const age = points.length ? now - points[0].at : 0;
  return SPANS.find(([span]) => age <= span) ?? SPANS.at(-1);
}

function lines(points, now, read, most, span) {
  const runs = [];
  let before = -Infinity;
  for (const point of points) {
    if (point.at - before > GAP_SECONDS) runs.push([]);
    before = point.at;
    const x = WIDTH * (1 - (now - point.at) / span);
    const y = HEIGHT - 2 - (most > 0 ? (read(point) / most) * (HEIGHT - 8) : 0);
    runs.at(-1).push([Math.max(0, x).toFixed(1), y.toFixed(1)]);
  }
  return runs.map((run) => {
    const path = run.map((each) => each.join(" ")).join(" L ");
    const base = HEIGHT - 1;
    return s("g", {},
      s("path", { class: "area", d: `M ${run[0][0]} ${base} L ${path} L ${run.at(-1)[0]} ${base} Z` }),
      s("path", { class: "curve", d: `M ${path}` }));
  });
}

function asTable(title, points, now, read, format, span) {
  const rows = [];
  const step = span / ROWS;
  for (let back = span; back > 0; back -= step) {
    const inside = points.filter((point) => point.at > now - back && point.at <= now - back + step);
    const mean = inside.length ? inside.reduce((sum, point) => sum + read(point), 0) / inside.length : null;
    rows.push(h("tr", {},
      h("th", { scope: "row" }, `${back} to ${back - step} s ago`), h("td", {}, mean === null ? NONE : format(mean))));
  }
  return h("details", {},
    h("summary", {}, "As a table", h("span", { class: "unseen" }, `: ${title}`)),
    h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "When"), h("th", { scope: "col" }, title))),
      h("tbody", {}, rows)));
}
