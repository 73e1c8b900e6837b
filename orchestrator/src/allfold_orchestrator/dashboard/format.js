// Figures in the units in which people say them.

const DECIMALS = [[100, 0], [10, 1], [0, 2]];

function rounded(value) {
  const [, digits] = DECIMALS.find(([least]) => Math.abs(value) >= least);
  return value.toFixed(digits);
}

function scaled(value, units) {
  const [size, unit] = units.find(([size]) => Math.abs(value) >= size) ?? units.at(-1);
  return `${rounded(value / size)} ${unit}`;
}

export const NONE = "–";

/** `1.25 ms` */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 120) return age(value);
  return scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
}

/** `840 MB` */
export function bytes(value) {
  return value === 0 ? "0 B" : scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
}

/** `840 MB/s` */
export function rate(value) {
  return value === null || value === undefined ? NONE : `${bytes(value)}/s`;
}

/** `12,400 /s` */
export function perSecond(value) {
  if (value === null || value === undefined) return NONE;
  return `${value >= 100 ? Math.round(value).toLocaleString("en") : rounded(value)} /s`;
}

export function percent(share) {
  if (share === null || share === undefined) return NONE;
  return `${Math.round(share * 100)} %`;
}

/** `4 s`, `12 min`, `3.1 h`; a clock that is behind makes it 0. */
export function age(value) {
  const past = Math.max(value, 0);
  if (past < 120) return `${past < 10 ? past.toFixed(1) : Math.round(past)} s`;
  return past < 7200 ? `${Math.round(past / 60)} min` : `${(past / 3600).toFixed(1)} h`;
}

/** `0–3, 6`: ranks in order. */
export function ranks(numbers) {
  const runs = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs
    .map(([from, to]) => (from === to ? `${from}` : to === from + 1 ? `${from}, ${to}` : `${from}–${to}`))
    .join(", ");
}

/** A name that fits into a drawing; its whole is in the title and in the table. */
export function short(name, most) {
  return name.length <= most ? name : `${name.slice(0, Math.ceil(most / 2) - 1)}…${name.slice(-Math.floor(most / 2))}`;
}

/** Labels of at most so many characters that tell the names apart: their common ends go first. */
export function labels(names, most) {
  if (names.length < 2 || names.every((name) => name.length <= most)) {
    return new Map(names.map((name) => [name, short(name, most)]));
  }
  const from = common(names, (name, at) => name[at]);
  const to = common(names.map((name) => name.slice(from)), (name, at) => name[name.length - 1 - at]);
  return new Map(names.map((name) => {
    const own = `${from > 1 ? "…" : name.slice(0, from)}${name.slice(from, name.length - to)}${to > 1 ? "…" : name.slice(name.length - to)}`;
    return [name, short(own, most)];
  }));
}

function common(names, character) {
  const least = Math.min(...names.map((name) => name.length)) - 1;
  let at = 0;
  while (at < least && names.every((name) => character(name, at) === character(names[0], at))) at += 1;
  return at;
}

export function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}
