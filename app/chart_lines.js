// What <ft-chart> draws: the lines of each panel with their points, and uPlot's options for them. Colours come from the style sheet.
import { duration, logTicks, smoothed, steps, text, tick, ticks, timeTicks } from "./chart_data.js";
import { tr } from "./language.js";

export const LEFT = 56, RIGHT = 16;
// Asking the browser for a colour makes it compute styles, dozens of times a tick: they are kept while the page's theme is.
let [theme, colours] = ["", {}];
export const colour = (name) => {
  if (theme !== document.body.className) [theme, colours] = [document.body.className, {}];
  return (colours[name] ||= getComputedStyle(document.body).getPropertyValue(`--ft-${name}`).trim()) || "#888";
};
const font = (size, weight = 400) => `${weight} ${size}px Inter, system-ui, sans-serif`;
const RUNS = [["loss", []], ["forecast", [8, 3]], ["memory", [2, 3]], ["eval", [12, 3, 2, 3]], ["card", [5, 5]]];
// Strokes by kind of line: [colour, width, dash, which value of a bin].
const STROKES = {
  held: ["eval", 1.75, [], "mean"], process: ["memory", 1.75, [], "high"], allocated: ["reserved", 1, [], "high"],
  whole: ["soft", 1, [2, 2], "high"], mean: ["loss", 1.5, [], "mean"],
};

// The lines that uPlot draws of a panel's; the loss is three: the highest and lowest value of each bin, and the smoothed mean.
export function linesOf(panel) {
  return panel.lines.flatMap((line) => {
    if (line.kind === "loss") {
      const spread = { ...line, stroke: "raw", width: 1, dash: [] };
      return [{ ...spread, value: "high" }, { ...spread, value: "low", label: "" },
        { ...line, label: tr("smoothed"), stroke: "loss", width: 2.25, dash: [], value: "smooth" }];
    }
    const [stroke, width, dash, value] = line.kind === "run" ? [RUNS[line.run][0], 1.75, RUNS[line.run][1], line.value] : STROKES[line.kind];
    return [{ ...line, stroke, width, dash, value }];
  });
}

// The panels of several runs: a line for each run in each.
export function compared(runs) {
  const lines = (name, value, of = () => ({ name })) => runs.map((run, n) => ({ run: n, label: run.label, kind: "run", value, ...of(run) }))
    .filter((line) => line.name && runs[line.run].metrics[line.name]);
  const panels = [
    { title: tr("Loss, smoothed"), unit: "loss", log: true, shared: true, levels: [], lines: lines("loss", "smooth") },
    { title: tr("Held-out loss"), unit: "loss", log: true, shared: true, levels: [], lines: lines("eval_loss", "mean") },
    { title: tr("Memory of the process, GiB"), unit: "GiB", zero: true, levels: [], lines: lines("", "high", (run) => {
      const { name, add } = run.panels[1]?.lines[0] ?? {};
      return { name, add };
    }) },
  ];
  return panels.filter((panel, n) => n === 0 || panel.lines.length);
}

// The points of a line: [place on the axis, value], null for a gap. Sparse lines go on over what is between their points.
function points(line, run, axis, smoothing, isLog) {
  const rows = run.rows(line.name), width = run.metrics[line.name]?.width ?? 1;
  const averages = line.value === "smooth" ? smoothed(rows, smoothing, width) : null;
  return rows.flatMap((row, n) => {
    let value = averages ? averages[n] : row[line.value];
    if (value !== null) value += line.add || 0;
    if (isLog && value <= 0) value = null;
    const point = [axis.to(Math.min(row.step, Math.max(run.step, row.first))), value];
    return row.gaps && row.mean !== null ? [point, [axis.to(row.last + 0.5), null]] : [point];
  });
}

// uPlot's data of a panel: places of all lines, and for each line its values there; undefined where it has no point.
export function dataOf(lines, runs, axes, smoothing, isLog) {
  const all = lines.map((line) => new Map(points(line, runs[line.run ?? 0], axes[line.run ?? 0], smoothing, isLog)));
  const places = [...new Set(all.flatMap((line) => [...line.keys()]))].sort((a, b) => a - b);
  return [places, ...all.map((line) => places.map((place) => line.get(place)))];
}

// Only points between two gaps are drawn: a line of one point would be invisible.
function lonePoints(u, index) {
  const values = u.data[index], lone = [];
  let before = null;
  values.forEach((value, n) => {
    if (value === undefined) return;
    let next = n + 1;
    while (next < values.length && values[next] === undefined) next++;
    if (value !== null && before === null && (values[next] ?? null) === null) lone.push(n);
    before = value;
  });
  return lone.length ? lone : null;
}

const p99 = (values) => [...values].sort((a, b) => a - b)[Math.floor(0.99 * (values.length - 1))];

// The top of the scale where some of several runs would flatten the others: the 99th percentile of those; else null. On a log
// scale only one that is fifty times higher does.
export function sharedTop(data, isLog) {
  const runs = data.slice(1).map((values) => values.filter(Number.isFinite)).filter((values) => values.length), tops = runs.map(p99);
  const middle = [...tops].sort((a, b) => a - b)[(tops.length - 1) >> 1], others = runs.filter((values, n) => tops[n] <= (isLog ? 50 : 3) * middle);
  return others.length < runs.length ? p99(others.flat()) : null;
}

function rangeOf(panel, isLog, view) {
  return (u, low, high) => {
    const top = panel.shared && !view.isWhole() ? sharedTop(u.data, isLog) : null;
    if (top !== null && high > top) high = top;
    if (low === null || high === null) [low, high] = panel.levels.length ? [Infinity, -Infinity] : isLog ? [0.1, 1] : [0, 1];
    if (isLog) return [low / 1.12, high * 1.12];
    for (const level of [...panel.levels].sort((a, b) => a.value - b.value)) {
      if (high > 0 && level.value > 1.3 * high && level.kind !== "forecast") continue; // it would flatten the lines
      [low, high] = [Math.min(low, level.low ?? level.value), Math.max(high, level.high ?? level.value)];
    }
    if (panel.zero) return [0, high * 1.07]; // else the noise of runs that take as much fills the plot
    const margin = (high - low) * 0.07 || Math.abs(high) * 0.07 || 1;
    return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
  };
}

export function optionsOf(panel, lines, view) {
  const isLog = panel.log && view.isLog, small = panel.small;
  const axis = { stroke: () => colour("soft"), font: font(11), ticks: { show: false }, grid: { stroke: () => colour("line"), width: 1 } };
  const placeText = (value) => (view.axis === "time" ? duration(value) : view.axis === "epoch" ? `${+value.toFixed(3)}` : steps(value));
  const withUnit = { time: (n) => n, epoch: (n) => tr("{n} epochs", { n }), step: (n) => tr("{n} steps", { n }) }[view.axis];
  const x = view.isLast || small ? {
    ...axis, size: 30, gap: 6, space: 90,
    values: (u, places) => { // the unit stands at the last one that has room for it
      const { min, max } = u.scales.x, last = places.findLastIndex((place) => place < max - (max - min) * 40 / u.width);
      return places.map((place, n) => (n === last && !small ? withUnit(placeText(place)) : placeText(place)));
    },
    splits: (u, index, low, high) => {
      const count = Math.max(2, u.width / (small ? 110 : 130));
      if (view.axis === "time") return timeTicks(low, high, count);
      return ticks(low, high, count).filter((value) => view.axis === "epoch" || Number.isInteger(value));
    },
  } : { show: false, size: 0 };
  const y = {
    ...axis, size: small ? 48 : LEFT, gap: 6,
    splits: (u, index, low, high) => (isLog ? logTicks(low, high) : ticks(low, high, 4)),
    values: (u, values) => values.map((value) => tick(value, panel.unit, isLog && values.at(-1) >= 4 * values[0] ? value : values[1] - values[0])),
    filter: (u, values) => values,
  };
  return {
    width: view.width, height: view.height, legend: { show: false }, padding: [8, RIGHT, view.isLast || small ? 0 : 6, 0],
    scales: { x: { time: false, range: () => view.range() }, y: { distr: isLog ? 3 : 1, range: rangeOf(panel, isLog, view) } },
    axes: [x, y],
    cursor: {
      y: false, points: { size: 7, stroke: (u, n) => colour(lines[n - 1].stroke), fill: (u, n) => colour(lines[n - 1].stroke) },
      drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => { view.whole(); } },
    },
    series: [{}, ...lines.map((line) => ({
      stroke: () => colour(line.stroke), width: line.width, dash: line.dash, spanGaps: line.name === "eval_loss",
      points: line.kind === "held" ? { show: true, size: 7, width: 2, fill: () => colour("ground") } : { show: false, size: 5, fill: () => colour(line.stroke), filter: lonePoints },
    }))],
    bands: lines.flatMap((line, n) => (line.value === "low" ? [{ series: [n, n + 1], fill: () => colour("raw-band") }] : [])),
    hooks: { drawClear: [(u) => underneath(u, panel, view)], draw: [(u) => levels(u, panel)], ...view.hooks },
  };
}

// Under the lines: what is still to come, and a forecast's range.
function underneath(u, panel, view) {
  const { left, top, width, height } = u.bbox, now = Math.max(left, Math.min(left + width, u.valToPos(view.now(), "x", true)));
  u.ctx.save();
  u.ctx.fillStyle = colour("raised");
  u.ctx.fillRect(now, top, left + width - now, height);
  u.ctx.globalAlpha = 0.14;
  for (const level of panel.levels) {
    if (level.low === undefined) continue;
    const [high, low] = [level.high, level.low].map((value) => Math.max(top, Math.min(top + height, u.valToPos(value, "y", true))));
    u.ctx.fillStyle = colour(level.kind);
    u.ctx.fillRect(left, high, width, low - high);
  }
  u.ctx.restore();
}

// Levels with their names at the line: above it, or below it where another name is.
function levels(u, panel) {
  const { left, top, width, height } = u.bbox, scale = devicePixelRatio, used = [];
  u.ctx.save();
  for (const level of [...panel.levels].sort((a, b) => b.value - a.value)) {
    const y = u.valToPos(level.value, "y", true);
    if (y < top || y > top + height) continue;
    u.ctx.strokeStyle = u.ctx.fillStyle = colour(level.kind);
    u.ctx.lineWidth = 1.5 * scale;
    u.ctx.setLineDash(level.kind === "forecast" ? [6 * scale, 4 * scale] : []);
    u.ctx.beginPath();
    u.ctx.moveTo(left, y);
    u.ctx.lineTo(left + width, y);
    u.ctx.stroke();
    const above = y - 5 * scale, isFree = above - 10 * scale > top && used.every((other) => Math.abs(other - above) > 12 * scale);
    const baseline = isFree ? above : y + 13 * scale;
    used.push(baseline);
    u.ctx.font = font(11 * scale, 550);
    u.ctx.textAlign = "right";
    u.ctx.fillText(`${level.label} ${text(level.value, panel.unit)}`, left + width - 6 * scale, baseline);
  }
  u.ctx.restore();
}
