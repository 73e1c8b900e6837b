// The points of the groups' charts: each overview brings the new ones.

export const WINDOW_SECONDS = 300;

const points = new Map();

/** Add the points of an overview; forget groups that are gone, and what is too old. */
export function keep(overview) {
  const names = new Set(overview.groups.map((group) => group.name));
  for (const name of points.keys()) if (!names.has(name)) points.delete(name);
  for (const group of overview.groups) {
    const known = points.get(group.name) ?? [];
    const last = known.at(-1)?.at ?? 0;
    known.push(...group.series.filter((point) => point.at > last));
    points.set(group.name, known.filter((point) => point.at > overview.at - WINDOW_SECONDS));
  }
}

/** The points of a group, oldest first. */
export function pointsOf(name) {
  return points.get(name) ?? [];
}
