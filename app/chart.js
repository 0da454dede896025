// <ft-chart data-runs='["name"]'>: loss and memory of a run, or of several runs in comparison, over the same steps, drawn by uPlot.
// It asks /ft/series/RUN once a second while a run goes on, else each five seconds, and not in a hidden tab.
import { tr } from "./language.js";
import { colour, copyPicture, save, show } from "./parts.js";

const TICK_MS = 1000, IDLE_MS = 5000, SILENT_S = 5, TABLE_ROWS = 12;
const MARKUP = `<div class="ftc-tools"><label><input type="checkbox" data-view="isLog"> ${tr("Log scale")}</label>
  <label>${tr("Smoothing")} <input type="range" data-view="smoothing" min="0" max="0.99" step="0.01"></label>
  <span class="ftc-actions"><button type="button" data-do="whole" hidden>${tr("Whole run")}</button><button type="button" data-do="table"
    aria-pressed="false">${tr("Table")}</button><button type="button" data-do="csv">CSV</button><button type="button" data-do="copy">${tr("Copy image")}</button></span></div>
  <p class="ft-note ftc-note" role="status" hidden></p><div class="ftc-main"></div><p class="ftc-marks"></p><div class="ftc-table" hidden></div>
  <details class="ftc-more" hidden><summary>${tr("More curves")}</summary><div class="ftc-small"></div></details>`;
// Strokes by kind of line: colour, width, dash, and which value of a bin the line shows. Below: colour and name of each event.
const STROKES = {
  high: ["raw", 1, [], "high"], low: ["raw", 0, [], "low"], loss: ["loss", 2.25, [], "smooth"], held: ["eval", 1.75, [], "mean"],
  process: ["memory", 1.75, [], "high"], allocated: ["reserved", 1, [], "high"], whole: ["soft", 1, [2, 2], "high"], mean: ["loss", 1.5, [], "mean"],
};
const RUNS = [["loss", []], ["forecast", [8, 3]], ["memory", [2, 3]], ["eval", [12, 3, 2, 3]], ["card", [5, 5]]];
const MARKS = { retry: ["bad", tr("retry")], resume: ["whole", tr("resume")], evaluation: ["eval", tr("evaluation")], save: ["ok", tr("checkpoint")] };
const isRare = (name) => name === "retry" || name === "resume";
const count = (value) => Math.round(value).toLocaleString("en-US"), short = (value) => String(+value.toPrecision(3));
const tick = (value, step) => (step < 1e-3 ? short(value) : value.toLocaleString("en-US", { minimumFractionDigits: Math.max(0, Math.ceil(-Math.log10(step) - 0.3)) }));
const FORMATS = {
  loss: (value) => value.toFixed(Math.abs(value) < 0.1 ? 4 : 3), GiB: (value) => value.toFixed(2), count, short,
  percent: (value) => `${(100 * value).toFixed(1)} %`, "°C": (value) => `${value.toFixed(0)} °C`, W: (value) => `${value.toFixed(0)} W`,
};
const formatted = (value, unit) => (value === null || value === undefined ? tr("not a number") : FORMATS[unit](value));
const span = (low, high) => (low === high ? high : tr("{low} to {high}", { low, high }));
const escaped = (value) => String(value).replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
const storedView = () => { try { return JSON.parse(localStorage.getItem("ft-chart")) || {}; } catch { return {}; } };
let library = null;
const loadLibrary = () => library ??= new Promise((done, failed) => { document.head.append(Object.assign(document.createElement("script"), { src: new URL("uplot.js", import.meta.url).href, onload: done, onerror: failed })); });

// A run's data from the server: the bins of each metric by index, and the marks of its events.
class RunData {
  constructor(name, label = name) { Object.assign(this, { name, label, have: "", read: null, step: 0, total: 0, alive: true, panels: [], marks: [], metrics: {}, answered: Date.now() }); }
  async ask() {
    const response = await fetch(`/ft/series/${encodeURIComponent(this.name)}?have=${this.have}`).catch(() => null);
    const body = response?.ok ? await response.json().catch(() => null) : null;
    this.isGone = response?.status === 404;
    if (!body) return;
    const { series, from, ...answer } = body;
    if (!from) this.metrics = {};
    for (const [name, { width, bins }] of Object.entries(series)) {
      const metric = this.metrics[name] ??= { width, bins: new Map() };
      if (metric.width !== width) { this.have = ""; return this.ask(); } // the server's bins are wider by now
      for (const [index, mean, low = mean, high = mean, gaps = 0] of bins) metric.bins.set(index, { mean, low, high, gaps });
    }
    Object.assign(this, answer, { answered: Date.now() });
  }
  rows(name) {
    const { width = 1, bins = [] } = this.metrics[name] ?? {};
    return [...bins].map(([index, bin]) => ({ first: Math.max(index * width, width > 1 ? 1 : 0), last: Math.max(index * width, Math.min((index + 1) * width - 1, this.step)), ...bin }));
  }
}

// Exponential moving average of the means, without a bias at its start; gaps stay.
function smoothed(rows, factor) {
  let average = 0, weight = 0;
  return rows.map(({ mean }) => {
    if (mean === null) return null;
    [average, weight] = [factor * average + (1 - factor) * mean, factor * weight + 1 - factor];
    return average / weight;
  });
}

// Panels that compare several runs, with one line per run.
function compared(runs) {
  const panel = (title, unit, value, sourceOf) => ({
    title, unit, levels: [],
    lines: runs.map((run, n) => ({ ...sourceOf(run), run: n, label: run.label, kind: "run", value })).filter(({ name }, n) => runs[n].metrics[name]),
  });
  const held = panel(tr("Held-out loss"), "loss", "mean", () => ({ name: "eval_loss" }));
  return [panel(tr("Loss, smoothed"), "loss", "smooth", () => ({ name: "loss" })), ...(held.lines.length ? [held] : []),
    panel(tr("Memory of the process, GiB"), "GiB", "high", ({ panels }) => panels[1]?.lines[0])];
}

// The uPlot series of a panel. The loss has three; a level is a horizontal line, with a band if it has a range.
function linesOf({ lines, levels, unit }, plain = { width: 1.5, dash: [] }) {
  const drawn = lines.flatMap((line) => (line.kind !== "loss" ? [line] : [{ ...line, kind: "high" }, { ...line, kind: "low", label: "" }, { ...line, kind: "loss", label: tr("smoothed") }]));
  return [...drawn.map((line) => {
    const [stroke, width, dash, value] = line.kind === "run" ? [RUNS[line.run][0], 1.75, RUNS[line.run][1], line.value] : STROKES[line.kind];
    return { ...line, stroke, width, dash, value };
  }), ...levels.flatMap(({ label, value, kind, low, high }) => (low === undefined ? [{ ...plain, label, stroke: kind, level: value, reading: formatted(value, unit) }] : [
    { width: 0, label: "", stroke: kind, level: high, kind: "high" }, { width: 0, label: "", stroke: kind, level: low },
    { ...plain, dash: [6, 4], label, stroke: kind, level: value, reading: `${formatted(value, unit)} (${span(formatted(low, unit), formatted(high, unit))})` }]))];
}

// The range of a panel's vertical axis. A level far above the lines would flatten them and stays outside, except the forecast.
function verticalRange({ levels, unit }, isLog, low, high) {
  if (low === null || low === undefined) [low, high] = isLog ? [0.1, 1] : levels.length ? [Infinity, -Infinity] : [0, 1];
  if (isLog) return window.uPlot.rangeLog(low, high, 10, false);
  for (const level of [...levels].sort((a, b) => a.value - b.value)) {
    if (high > 0 && level.value > 1.3 * high && level.kind !== "forecast") continue;
    [low, high] = [Math.min(low, level.low ?? level.value), Math.max(high, level.high ?? level.value)];
  }
  const margin = 0.07 * (high - low > 1e-6 * Math.abs(high) ? high - low : Math.abs(high) || 1); // else rounding fills the plot
  if (unit === "GiB" && !levels.length) return [0, high * 1.07]; // else the noise of runs with equal memory fills the plot
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
}

class Chart extends HTMLElement {
  connectedCallback() { if (this.runs) this.follow(); else this.start(); } // Gradio may move the element
  disconnectedCallback() { this.leave(); queueMicrotask(() => { if (!this.isConnected) this.clear(); this.signature = ""; }); }
  async start() {
    const labels = JSON.parse(this.dataset.labels ?? "[]"), runs = JSON.parse(this.dataset.runs).map((name, n) => new RunData(name, labels[n]));
    Object.assign(this, { runs, view: { isLog: false, smoothing: 0.8, ...storedView() }, charts: [], zoom: null, signature: "" });
    await loadLibrary().catch(() => { library = null; });
    this.innerHTML = MARKUP;
    [this.part("table").hidden, this.part("main").hidden] = [Boolean(window.uPlot), !window.uPlot]; // without uPlot: the table instead of the plots
    for (const tool of this.querySelectorAll("label, button:not([data-do=csv], [data-do=whole])")) tool.hidden = !window.uPlot;
    for (const box of this.querySelectorAll("[data-view]")) {
      const { view: name } = box.dataset, property = box.type === "checkbox" ? "checked" : "valueAsNumber";
      box[property] = this.view[name];
      box.addEventListener("input", () => {
        this.view[name] = box[property];
        try { localStorage.setItem("ft-chart", JSON.stringify(this.view)); } catch { /* a browser without storage */ }
        if (name === "isLog") this.build(); else this.draw();
      });
    }
    this.addEventListener("click", ({ target }) => this[`do_${target.dataset.do}`]?.());
    this.part("more").addEventListener("toggle", () => this.build());
    if (this.isConnected) this.follow();
  }
  clear() { this.charts.splice(0).forEach(({ u, section }) => { u.destroy(); section.remove(); }); }
  part(name) { return this.querySelector(`.ftc-${name}`); }
  leave() { clearTimeout(this.timer); this.observers?.forEach((observer) => observer.disconnect()); }
  // Watches the runs, the width and the theme.
  follow() {
    this.leave();
    const resize = () => this.charts.forEach(({ u, section }) => { if (section.clientWidth && section.clientWidth !== u.width) u.setSize({ width: section.clientWidth, height: u.height }); });
    const widths = new ResizeObserver(resize), themes = new MutationObserver(() => this.charts.forEach(({ u }) => u.redraw())), seen = new AbortController();
    widths.observe(this);
    themes.observe(document.body, { attributeFilter: ["class"] });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.poll(); }, { signal: seen.signal });
    this.observers = [widths, themes, { disconnect: () => seen.abort() }];
    this.poll();
  }
  async poll() {
    clearTimeout(this.timer);
    const { runs } = this;
    if (document.hidden || this.isPolling || !this.innerHTML) return;
    this.isPolling = true;
    await Promise.all(runs.filter(({ isGone }) => !isGone).map((run) => run.ask()));
    this.isPolling = false;
    if (!this.isConnected) return;
    const isChanging = runs.some(({ alive, have, read }) => alive || !have || read !== null);
    if (runs.some(({ isGone }) => !isGone)) this.timer = setTimeout(() => this.poll(), isChanging ? TICK_MS : IDLE_MS);
    const panels = runs.length > 1 ? compared(runs) : runs[0].panels, signature = JSON.stringify(panels);
    if (signature === this.signature) this.draw();
    else [this.panels, this.signature] = [panels, signature], this.build();
    this.showNote();
  }
  // The note beside the curves: a run is gone or has no step yet, its history is being read, or the server does not answer.
  showNote() {
    const lines = this.runs.map((run) => {
      const silent_s = Math.round((Date.now() - run.answered) / 1000), prefix = this.runs.length > 1 ? `${run.label}: ` : "";
      if (run.isGone) return prefix + tr("This run no longer exists.");
      if (silent_s > SILENT_S) return prefix + tr("No answer for {s} s. The curves show the last state received.", { s: silent_s });
      if (run.read !== null) return prefix + tr("Reading this run's history: {share}", { share: `${Math.round(100 * run.read)} %` });
      return run.have && !run.step ? prefix + tr("No step yet.") : "";
    });
    if (!window.uPlot) lines.push(tr("The curves need uPlot, which can't be loaded. Reload the page, or build again with npm and a network connection."));
    Object.assign(this.part("note"), { hidden: !lines.join(""), textContent: lines.filter(Boolean).join(" ") });
  }

  // Rebuilds the plots, for other panels or another axis.
  build() {
    if (!this.panels) return;
    this.clear();
    const { open } = this.part("more"), large = this.panels.filter(({ small }) => !small);
    this.part("more").hidden = !window.uPlot || large.length === this.panels.length;
    this.charts = (!window.uPlot ? [] : open ? this.panels : large).map((panel) => {
      const section = document.createElement("section"), lines = linesOf(panel);
      section.append(Object.assign(document.createElement(panel.small ? "h3" : "h2"), { textContent: panel.title }));
      this.part(panel.small ? "small" : "main").append(section);
      const u = new window.uPlot({ ...this.options(panel, lines, panel === large[0]), width: Math.max(120, section.clientWidth) }, this.dataOf(panel, lines), section);
      Object.entries({ role: "img", "aria-label": panel.title }).forEach(([name, value]) => u.root.querySelector(".u-wrap").setAttribute(name, value));
      return { panel, lines, section, u };
    });
    this.draw();
  }
  isLog({ unit }) { return this.view.isLog && unit === "loss"; }
  range() { return this.zoom ?? [0, Math.max(1, ...this.runs.map(({ total, step }) => Math.max(total, step)))]; }
  options(panel, lines, isFirst) {
    const axis = { stroke: () => colour("soft"), font: "11px Inter, system-ui, sans-serif", ticks: { show: false }, grid: { stroke: () => colour("line"), width: 1 } };
    const isLog = this.isLog(panel), shown = (u, n, index) => u.data[n].slice(0, index + 1).findLast((value) => value !== undefined);
    const reading = (u, value, n, index) => {
      const line = lines[n - 1], number = index === null ? undefined : shown(u, n, index);
      if (line.reading || number === undefined) return line.reading ?? "";
      return line.kind === "high" ? span(formatted(shown(u, n + 1, index), panel.unit), formatted(number, panel.unit)) : formatted(number, panel.unit);
    };
    return {
      height: panel.small ? 120 : 210, padding: [8, 26, 0, 0], legend: { markers: { stroke: (u, n) => `var(--ft-${lines[n - 1].stroke})`, fill: "none" } },
      scales: { x: { time: false, range: () => this.range() }, y: { distr: isLog ? 3 : 1, range: (u, low, high) => verticalRange(panel, isLog, low, high) } },
      axes: [{ ...axis, size: 30, values: (u, steps) => steps.map(count), incrs: [...Array(8).keys()].flatMap((power) => [1, 2, 5].map((base) => base * 10 ** power)) },
        { ...axis, size: 56, values: (u, values, n, space, step) => values.map((value) => (value === null ? null : isLog ? short(value) : tick(value, step))) }],
      cursor: { y: false, sync: { key: "ft-chart" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => this.do_whole() } },
      series: [{ label: tr("step"), class: isFirst ? null : "ftc-unnamed", value: (u, step) => (step === null ? "" : count(Math.min(Math.max(...this.runs.map((run) => run.step)) || step, Math.ceil(step)))) },
        ...lines.map(({ label, stroke, width, dash, level }) => ({
          label, width, dash, value: reading, class: label || panel.small ? null : "ftc-unnamed", stroke: () => colour(stroke), auto: level === undefined,
          points: level === undefined && width ? { size: 5 } : { show: false },
        }))],
      bands: lines.flatMap(({ kind, stroke }, n) => (kind === "high" ? [{ series: [n + 1, n + 2], fill: () => colour(`${stroke}-band`) }] : [])),
      hooks: { draw: panel.small ? [] : [(u) => this.drawMarks(u)], setSelect: [(u) => this.selected(u)], setCursor: [(u) => { if (u.cursor.idx === null) this.readNewest(u); }] },
    };
  }
  // uPlot's data of a panel: the steps of all lines, then each line's values there; undefined where a line has no point.
  dataOf(panel, lines) {
    return window.uPlot.join([[this.range()], ...lines.map(({ name, run = 0, value, add = 0, level }) => {
      if (level !== undefined) return [[0, this.range()[1]], [level, level]];
      const rows = this.runs[run].rows(name), averages = value === "smooth" ? smoothed(rows, this.view.smoothing) : null, places = [], values = [];
      rows.forEach((row, n) => {
        const number = averages ? averages[n] : row[value];
        places.push((row.first + row.last) / 2);
        values.push(number === null || (this.isLog(panel) && number <= 0) ? null : number + add);
        if (row.gaps && row.mean !== null) { places.push(row.last + 0.4); values.push(null); }
      });
      return [places, values];
    })]);
  }
  // Draws new points into the existing plots; the visible range stays.
  draw() {
    for (const { panel, lines, u } of this.charts) {
      u.setData(this.dataOf(panel, lines));
      if (u.cursor.idx === null || u.cursor.idx === undefined) this.readNewest(u);
    }
    this.querySelector("[data-do=whole]").hidden = !this.zoom;
    this.part("marks").textContent = this.runs.length > 1 ? "" : this.markTexts().map(([value, step]) => tr("{value} at step {step}", { value, step: count(step) })).join(" · ");
    if (!this.part("table").hidden) this.fillTable();
  }
  readNewest(u) { u.setLegend({ idx: u.data[0].length - 1 }, false); }
  // Texts and steps below the curves: all retries, resumes and losses that are no number; the newest evaluation and checkpoint.
  markTexts() {
    const [run] = this.runs, gaps = run.rows("loss").filter((row) => row.gaps).map(({ first }) => [tr("not a number"), first]);
    const named = new Map(run.marks.filter(([name]) => MARKS[name]).map(([name, step]) => [isRare(name) ? `${name} ${step}` : name, [MARKS[name][1], step]]));
    return [...named.values(), ...gaps].sort(([, a], [, b]) => a - b);
  }
  drawMarks(u) {
    const { left, top, width, height } = u.bbox, scale = devicePixelRatio;
    for (const [name, step] of this.runs.length > 1 ? [] : this.runs[0].marks) {
      const x = u.valToPos(step, "x", true), tall = isRare(name) ? height : 7 * scale;
      if (!MARKS[name] || x < left || x > left + width) continue;
      u.ctx.fillStyle = colour(MARKS[name][0]);
      u.ctx.fillRect(x - scale / 2, top + height - tall, scale, tall);
    }
  }
  selected(u) {
    const { left, width } = u.select;
    if (width) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width > 4) { this.zoom = [left, left + width].map((x) => u.posToVal(x, "x")); this.draw(); }
  }
  do_whole() { this.zoom = null; this.draw(); }
  do_table() {
    const table = this.part("table"), hidden = (table.hidden = !table.hidden);
    this.querySelector("[data-do=table]").setAttribute("aria-pressed", !hidden);
    this.fillTable();
  }
  fillTable() {
    const columns = this.panels.filter(({ small }) => !small).flatMap(({ title, unit, lines }) => lines.map((line) => ({ ...line, title, unit, rows: this.runs[line.run ?? 0].rows(line.name) })));
    const rows = this.runs.map((run) => run.rows("loss")).reduce((longest, rows) => (rows.length > longest.length ? rows : longest)), every = Math.max(1, Math.floor(rows.length / TABLE_ROWS));
    const cell = ({ rows: lineRows, unit, add = 0 }, { first, last }) => {
      const bin = lineRows.findLast((row) => row.first <= last && row.last >= first);
      return bin ? formatted(bin.mean === null ? null : bin.mean + add, unit) : "–";
    };
    const line = (cells, tag) => `<tr>${cells.map((value) => `<${tag} class="right">${escaped(value)}</${tag}>`).join("")}</tr>`;
    const body = rows.filter((row, n) => n % every === 0 || n === rows.length - 1).map((row) => line([span(count(row.first), count(row.last)), ...columns.map((column) => cell(column, row))], "td"));
    show(this.part("table"), `<div class="ft-scroll" role="region" aria-label="${tr("Curves as a table")}" tabindex="0"><table><thead>${
      line([tr("step"), ...columns.map(({ title, label }) => `${title}: ${label}`)], "th")}</thead><tbody>${body.join("")}</tbody></table></div>`);
  }
  // Every bin of every metric, memory in GiB.
  do_csv() {
    const cell = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
    const lines = this.runs.flatMap((run) => Object.keys(run.metrics).flatMap((name) => run.rows(name).map(({ first, last, mean, low, high, gaps }) => [run.name, name, first, last, mean, low, high, gaps].map(cell).join(","))));
    save(new Blob([`run,metric,first_step,last_step,mean,lowest,highest,not_a_number\n${lines.join("\n")}\n`], { type: "text/csv" }), `${this.runs[0].name}.csv`);
  }
  // Copies the large plots, one below the other, under their titles and readings.
  do_copy() {
    copyPicture(this.charts.filter(({ panel }) => !panel.small).map(({ panel, u, section }) => {
      const readings = [...section.querySelectorAll(".u-series:not(.ftc-unnamed)")].map(({ textContent }) => textContent).join("   ");
      return [`${this.runs.map(({ label }) => label).join(", ")}: ${panel.title}   ${readings}`, u.ctx.canvas];
    }), this.runs[0].name, this.querySelector("[data-do=copy]"));
  }
}
customElements.define("ft-chart", Chart);
