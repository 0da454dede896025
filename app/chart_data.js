// The data of <ft-chart>: bins of a run's metrics, smoothing, the horizontal axes, and numbers as text. Nothing here draws.
import { tr } from "./language.js";

// The bins of one metric, which the server sends in parts: the same bin again is a newer one.
export class Bins {
  constructor() { this.width = 0; this.bins = new Map(); this.sorted = null; }
  // False when the server's bins are wider by now: everything has to be asked for again.
  take({ w, i, m, l = m, h = m, gaps = {} }) {
    if (this.width && this.width !== w) return false;
    this.width = w;
    m.forEach((mean, n) => {
      const index = i[n] ?? i[0] + n;
      this.bins.set(index, { mean, low: l[n], high: h[n], gaps: gaps[index] || 0 });
    });
    this.sorted = null;
    return true;
  }
  // In order of steps: { step (the middle), first, last, mean, low, high, gaps }.
  rows() {
    this.sorted ??= [...this.bins].sort(([a], [b]) => a - b).map(([index, bin]) => (
      { step: (index + 0.5) * this.width - 0.5, first: Math.max(index * this.width, this.width > 1 ? 1 : 0), last: (index + 1) * this.width - 1, ...bin }));
    return this.sorted;
  }
}

// One followed run: what the server has sent, and of a zoom its finer bins.
export class Followed {
  constructor(name, label = name) { this.name = name; this.label = label; this.clear(); }
  clear() { this.version = ""; this.metrics = {}; this.marks = []; this.step = this.total = 0; this.panels ??= []; this.zoom = null; }
  get address() { return `/ft/series/${encodeURIComponent(this.name)}`; }
  // Takes an answer; false when everything has to be asked for again.
  take(answer) {
    if (answer.all) { this.metrics = {}; this.marks = []; }
    if (answer.panels) this.panels = answer.panels;
    for (const [name, part] of Object.entries(answer.series)) {
      if (!(this.metrics[name] ??= new Bins()).take(part)) { this.version = ""; return false; }
    }
    if (answer.from !== null) this.marks = this.marks.filter(([, step]) => step < answer.from).concat(answer.marks);
    const { version, step, total, alive, epochs_per_step: epochs, read } = answer;
    Object.assign(this, { version, step, total, alive, epochs, read });
    return true;
  }
  takeZoom({ from, to, series }) {
    this.zoom = { from, to: Math.min(to, this.step), metrics: {} };
    for (const [name, part] of Object.entries(series)) (this.zoom.metrics[name] = new Bins()).take(part);
  }
  // Bins of a metric, finer ones where a zoom has them.
  rows(name) {
    const rows = this.metrics[name]?.rows() ?? [], finer = this.zoom?.metrics[name];
    if (!finer || finer.width >= this.metrics[name].width) return rows;
    const inside = finer.rows(), end = inside.at(-1)?.last ?? -1;
    return inside.length ? [...rows.filter((row) => row.last < inside[0].first), ...inside, ...rows.filter((row) => row.first > end)] : rows;
  }
  // Whether finer bins of these steps can be asked for; the few that came since the last answer don't count.
  isCoarse(from, to) {
    const end = Math.min(to, this.step), zoom = this.zoom;
    if (!Object.values(this.metrics).some(({ width }) => width > 1)) return false;
    return !zoom || zoom.from > from || zoom.to < end - (end - from) / 20;
  }
}

// Exponential moving average of the means without the pull of its beginning; gaps stay. A bin of half the width counts half.
export function smoothed(rows, factor, width) {
  let average = 0, weight = 0;
  return rows.map(({ mean, first, last }) => {
    if (mean === null) return null;
    const keep = factor ** ((last - first + 1) / width);
    average = keep * average + (1 - keep) * mean;
    weight = keep * weight + (1 - keep);
    return average / weight;
  });
}

// The horizontal axis of a run: from a step to its place and back. Time is that of the steps, without pauses.
export function timeline(run, kind) {
  if (kind === "epoch" && run.epochs) return { to: (step) => step * run.epochs, from: (x) => x / run.epochs };
  const rows = kind === "time" ? run.rows("step_s").filter(({ mean }) => mean !== null) : [];
  if (!rows.length) return { to: (step) => step, from: (x) => x };
  const steps = [0], times = [0];
  for (const { last, mean } of rows) {
    const end = Math.min(last, Math.max(run.step, 1));
    if (end <= steps.at(-1)) continue;
    times.push(times.at(-1) + mean * (end - steps.at(-1)));
    steps.push(end);
  }
  const recent = rows.slice(-20).reduce((sum, { mean }) => sum + mean, 0) / Math.min(20, rows.length) || 1;
  const interpolate = (from, to, slope) => (value) => {
    if (value >= from.at(-1)) return to.at(-1) + (value - from.at(-1)) * slope;
    let low = 0, high = from.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (from[middle] <= value) low = middle; else high = middle; }
    return to[low] + ((value - from[low]) / (from[high] - from[low])) * (to[high] - to[low]);
  };
  return { to: interpolate(steps, times, recent), from: interpolate(times, steps, 1 / recent) };
}

const grouped = (value) => Math.round(value).toLocaleString("en-US");
const significant = (value, digits) => (value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3
  ? value.toExponential(digits - 1).replace("e+", "e") : String(+value.toPrecision(digits)));
const FORMATS = {
  loss: (value) => value.toFixed(Math.abs(value) < 0.1 ? 4 : 3), GiB: (value) => value.toFixed(2), count: grouped,
  percent: (value) => `${(100 * value).toFixed(1)} %`, "°C": (value) => `${value.toFixed(0)} °C`, W: (value) => `${value.toFixed(0)} W`,
  short: (value) => significant(value, 3),
};
// A value as the row above a plot has it.
export const text = (value, unit) => (value === null || value === undefined ? tr("not a number") : FORMATS[unit](value));
// A value as an axis has it: no more digits than `step`, the distance of two ticks, asks for.
export function tick(value, unit, step) {
  if (unit === "count") return grouped(value);
  if (unit === "percent") return `${+(100 * value).toFixed(1)} %`;
  const digits = Math.min(6, Math.max(0, -Math.floor(Math.log10(step || 1))));
  return Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? significant(value, 2) : value.toFixed(digits);
}
export const steps = grouped;
export function duration(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours) return tr("{h} h {m} min", { h: hours, m: minutes % 60 });
  const s = Math.round(seconds % 60);
  if (minutes && minutes < 10 && s) return tr("{m} min {s} s", { m: minutes, s });
  return minutes ? tr("{m} min", { m: minutes }) : tr("{s} s", { s: +seconds.toFixed(seconds < 10 ? 1 : 0) });
}

// Round values from `low` to `high`, about `count` of them; `bases` are the distances of two ticks that are round.
export function ticks(low, high, count, bases = [1, 2, 2.5, 5, 10]) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * (bases.find((base) => base * power >= raw) ?? 10), values = [];
  for (let n = Math.ceil(low / step); n <= Math.floor(high / step + 1e-9); n++) values.push(+(n * step).toPrecision(12));
  return values;
}
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
export function timeTicks(low, high, count) {
  const step = SECONDS.find((seconds) => seconds * count >= high - low);
  if (!step || high - low < count) return ticks(low, high, count);
  return ticks(low / step, high / step, (high - low) / step, [1]).map((n) => n * step);
}
// Round values on a logarithmic axis; where it spans less than a factor of four, as on a linear one.
export function logTicks(low, high) {
  if (high / low < 4) return ticks(low, high, 4);
  const values = [], factors = high / low > 1000 ? [1] : high / low > 40 ? [1, 3] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of factors) { const value = +(factor * 10 ** power).toPrecision(3); if (value >= low && value <= high) values.push(value); }
  }
  return values;
}
