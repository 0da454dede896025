// <ft-chart data-runs='["name"]'>: the curves of a run, or of several in comparison, drawn by uPlot. It asks /ft/series/RUN for what
// is new, once a second while a run goes on and the tab is seen. The server's HTML never changes it.
import { Followed, duration, smoothed, steps, text, timeline } from "./chart_data.js";
import { LEFT, RIGHT, compared, dataOf, linesOf, optionsOf, sharedTop } from "./chart_lines.js";
import { eventsOf } from "./chart_events.js";
import { tr } from "./language.js";

const TICK_MS = 1000, IDLE_MS = 5000;
const MARKUP = `<div class="ftc-tools">
  <div class="ftc-segments" role="group" aria-label="${tr("Horizontal axis")}"><button type="button" data-axis="step">${tr("Step")}</button><button type="button"
    data-axis="time">${tr("Time")}</button><button type="button" data-axis="epoch">${tr("Epoch")}</button></div>
  <div class="ftc-segments" role="group" aria-label="${tr("Loss axis")}"><button type="button" data-log="">${tr("Linear")}</button><button type="button"
    data-log="1">${tr("Log scale")}</button></div>
  <label>${tr("Smoothing")} <input type="range" min="0" max="0.99" step="0.01"></label>
  <span class="ftc-actions"><button type="button" data-do="scale" aria-pressed="false" hidden>${tr("All runs on the scale")}</button><button type="button" data-do="whole" hidden>${tr("Whole run")}</button><button type="button" data-do="in"
    aria-label="${tr("Zoom in")}">+</button><button type="button" data-do="out" aria-label="${tr("Zoom out")}">−</button><button type="button" data-do="table"
    aria-pressed="false">${tr("Table")}</button><button type="button" data-do="csv">CSV</button><button type="button" data-do="png">PNG</button></span></div>
  <p class="ft-note ftc-note" role="status" hidden></p>
  <div class="ftc-main" tabindex="0" role="slider" aria-orientation="horizontal"></div>
  <p class="ftc-help">${tr("Drag to zoom, double click for the whole run, arrow keys to read values.")}</p>
  <div class="ftc-table" hidden></div><details class="ftc-more" hidden><summary>${tr("More curves")}</summary><div class="ftc-small"></div></details><p class="sr-only" aria-live="polite"></p>`;

let library = null;
// uPlot and the styles, when the first chart is on a page.
const loaded = () => library ??= Promise.all([document.fonts.load("11px Inter"), ...["uplot.css", "chart.css", "uplot.js"].map((name) => new Promise((done, failed) => {
  const address = new URL(name, import.meta.url).href, isScript = name.endsWith(".js"), element = document.createElement(isScript ? "script" : "link");
  Object.assign(element, isScript ? { src: address } : { rel: "stylesheet", href: address }, { onload: done, onerror: failed });
  document.head.append(element);
}))]);
// The table and the files are of a script that is fetched when the first is asked for. A browser remembers an address that gave
// none, so another attempt has another one.
let attempt = 0;
const exporting = () => import(`./chart_export.js?${attempt}`).catch(() => { attempt += 1; });
const span = (low, high) => tr("{low} to {high}", { low, high });
const saved = () => { try { return JSON.parse(localStorage.getItem("ft-chart")) || {}; } catch { return {}; } };

class Chart extends HTMLElement {
  static observedAttributes = ["data-runs"];

  // Gradio may move the element, or keep it for other runs, without what is in it.
  connectedCallback() { if (this.runs) this.follow(); else this.start(); }
  attributeChangedCallback(name, before, after) { if (before !== null && before !== after) this.start(); }
  disconnectedCallback() { this.leave(); }

  async start() {
    this.leave();
    const labels = JSON.parse(this.dataset.labels ?? "[]"), runs = JSON.parse(this.dataset.runs).map((name, n) => new Followed(name, labels[n]));
    this.runs = runs;
    this.view = { axis: "step", isLog: true, smoothing: 0.8, ...saved() };
    this.charts = [];
    this.at = this.zoom = this.strip = this.panels = this.signature = this.timelines = null; // at, zoom: step under the pointer, shown steps
    await loaded();
    if (this.runs !== runs) return;
    this.innerHTML = MARKUP;
    this.main = this.querySelector(".ftc-main");
    this.listen();
    if (this.isConnected) this.follow();
  }

  leave() {
    clearTimeout(this.timer);
    this.observers?.forEach((observer) => observer.disconnect());
  }

  // Follows the runs, the size, and whether it is light or dark.
  follow() {
    this.leave();
    const sizes = new ResizeObserver(() => this.resize()), themes = new MutationObserver(() => this.charts.forEach(({ u }) => u.redraw()));
    sizes.observe(this);
    themes.observe(document.body, { attributeFilter: ["class"] });
    const seen = new AbortController();
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.poll(); }, { signal: seen.signal });
    this.observers = [sizes, themes, { disconnect: () => seen.abort() }];
    this.poll();
  }

  listen() {
    this.querySelector(".ftc-tools").addEventListener("click", ({ target }) => {
      const { axis, log, do: action } = target.closest("button")?.dataset ?? {};
      if (axis) this.set({ axis });
      else if (log !== undefined) this.set({ isLog: Boolean(log) });
      else if (action) this[`do_${action}`]();
    });
    const slider = this.querySelector("input");
    slider.value = this.view.smoothing;
    slider.addEventListener("input", () => this.set({ smoothing: Number(slider.value) }));
    this.querySelector(".ftc-more").addEventListener("toggle", () => this.draw());
    this.main.addEventListener("keydown", (event) => this.key(event));
    this.main.addEventListener("blur", () => this.read(null));
    this.pinch();
  }

  set(change) {
    const smoothingOnly = Object.keys(change).join() === "smoothing";
    Object.assign(this.view, change);
    try { localStorage.setItem("ft-chart", JSON.stringify(this.view)); } catch { /* a browser without storage */ }
    if (smoothingOnly) this.draw(); else this.build();
  }

  // One request for each run that goes on: what is new, or, after a zoom, its finer bins.
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden || this.isPolling || !this.main) return;
    const { runs } = this;
    this.isPolling = true;
    const answers = await Promise.all(runs.map((run) => this.ask(run)));
    this.isPolling = false;
    if (!this.isConnected) return;
    if (this.runs !== runs) return this.poll();
    if (answers.some(Boolean)) this.update();
    this.say();
    const isComplete = this.runs.every((run) => run.version && !run.read);
    if (this.runs.some((run) => !run.isGone)) {
      this.timer = setTimeout(() => this.poll(), isComplete && !this.runs.some((run) => run.alive) ? IDLE_MS : TICK_MS);
    }
  }

  async ask(run) {
    const [from, to] = this.range().map((place, n) => Math.max(0, Math[n ? "ceil" : "floor"](place)));
    const isZoom = this.zoom && run.version && run.isCoarse(from, to);
    const points = Math.max(100, Math.min(400, Math.round(this.clientWidth / 2)));
    if (run.isGone) return false;
    try {
      const query = new URLSearchParams(isZoom ? { points, from, to } : { points, have: run.version });
      this.dispatchEvent(new CustomEvent("ft-ask", { bubbles: true, detail: query })); // the run's page asks for its parts, too
      const response = await fetch(`${run.address}?${query}`);
      if (response.status === 404) { run.isGone = true; return true; }
      if (!response.ok) throw new Error(response.status);
      const answer = await response.json(), before = run.version;
      run.answered = Date.now();
      this.dispatchEvent(new CustomEvent("ft-answer", { bubbles: true, detail: answer }));
      if (isZoom) run.takeZoom(answer);
      else if (!run.take(answer)) return this.ask(run);
      return isZoom || run.version !== before || run.read !== null;
    } catch { return false; }
  }

  // What there is to say beside the curves: history that is being read, an empty run, a server that does not answer.
  say() {
    const lines = this.runs.map((run) => {
      const silent_s = Math.round((Date.now() - run.answered) / 1000), of = this.runs.length > 1 ? `${run.label}: ` : "";
      if (run.isGone) return of + tr("This run is no longer there.");
      if (silent_s > 5) return of + tr("No answer for {time}; the curves are as of then.", { time: duration(silent_s) });
      if (run.read) return of + tr("Reading this run's history: {share}", { share: `${Math.round(100 * run.read)} %` });
      return run.version && !run.step ? of + tr("No step is complete yet.") : "";
    }).filter(Boolean);
    if (this.isRefused) lines.push(tr("The page's server does not answer: try again when it is back."));
    const note = this.querySelector(".ftc-note"), line = lines.join(" ");
    note.hidden = !line;
    if (note.textContent !== line) note.textContent = line;
  }

  update() {
    const panels = this.runs.length > 1 ? compared(this.runs) : this.runs[0].panels, signature = JSON.stringify(panels);
    if (signature === this.signature) return this.draw();
    [this.panels, this.signature] = [panels, signature];
    this.build();
  }

  // Makes the plots anew: other panels, another axis.
  build() {
    if (!this.panels) return;
    this.charts.forEach(({ u }) => u.destroy());
    this.main.replaceChildren();
    this.querySelector(".ftc-small").replaceChildren();
    const large = this.panels.filter((panel) => !panel.small);
    this.querySelector(".ftc-more").hidden = large.length === this.panels.length;
    this.charts = this.panels.map((panel) => {
      const section = document.createElement("section");
      section.innerHTML = '<div class="ftc-values"></div><div class="ftc-plot"></div>';
      (panel.small ? this.querySelector(".ftc-small") : this.main).append(section);
      const lines = linesOf(panel), chart = { panel, lines, section, values: section.firstChild, plot: section.lastChild };
      const isLog = panel.log && this.view.isLog;
      const view = {
        ...this.view, isLog, isLast: panel === large.at(-1), width: Math.max(120, chart.plot.clientWidth),
        height: panel.small ? 120 : panel === large[0] ? 240 : 200, now: () => this.axes().reduce((most, axis, n) => Math.max(most, axis.to(this.runs[n].step)), 0),
        range: () => this.places(), isWhole: () => Boolean(this.isWhole), whole: () => this.do_whole(),
        hooks: { setCursor: [(u) => this.pointed(u)], setSelect: [(u) => this.selected(u)] },
      };
      chart.u = new window.uPlot(optionsOf(panel, lines, view), dataOf(lines, this.runs, this.axes(), this.view.smoothing, isLog), chart.plot);
      if (panel.small) { chart.plot.setAttribute("role", "img"); }
      if (panel === large[0] && this.runs.length === 1) {
        this.strip = document.createElement("div");
        this.strip.className = "ftc-strip";
        section.append(this.strip);
      }
      return chart;
    });
    this.draw();
  }

  // New points into the plots that are there; the range stays.
  draw() {
    this.timelines = null;
    const { open } = this.querySelector(".ftc-more"); // what is folded is drawn when it is opened
    for (const { panel, lines, u } of this.charts.filter(({ panel }) => open || !panel.small)) {
      u.setData(dataOf(lines, this.runs, this.axes(), this.view.smoothing, panel.log && this.view.isLog));
    }
    for (const button of this.querySelectorAll("[data-axis], [data-log]")) {
      const { axis, log } = button.dataset;
      button.setAttribute("aria-pressed", axis ? axis === this.view.axis : Boolean(log) === this.view.isLog);
    }
    this.querySelector("[data-axis=epoch]").hidden = !this.runs.every((run) => run.epochs);
    this.querySelector("[data-do=whole]").hidden = !this.zoom;
    this.querySelector("[data-do=scale]").hidden = !this.charts.some(({ panel, u }) => panel.shared && sharedTop(u.data, panel.log && this.view.isLog) !== null);
    if (this.strip) eventsOf(this.strip, this.runs[0], ...this.range());
    this.fillTable();
    this.read(this.at);
  }

  resize() {
    for (const { u, plot } of this.charts) {
      if (plot.clientWidth && plot.clientWidth !== u.width) u.setSize({ width: plot.clientWidth, height: u.height });
    }
  }

  // Axes of the runs; the shown steps; and the places of these on the first one's axis.
  axes() { return this.timelines ??= this.runs.map((run) => timeline(run, this.view.axis)); }
  last() { return Math.max(1, ...this.runs.map((run) => run.total || run.step)); }
  range() { return this.zoom ?? [0, this.last()]; }
  places() {
    const axes = this.axes();
    if (this.zoom) return this.zoom.map(axes[0].to);
    return [0, Math.max(...axes.map((axis, n) => axis.to(Math.max(1, this.runs[n].total || this.runs[n].step))))];
  }

  setZoom(from, to) {
    const last = this.last(), width = Math.max(Math.min(4, last), to - from);
    const start = Math.max(0, Math.min(from, last - width));
    this.zoom = width >= last ? null : [start, start + width];
    this.draw();
    this.querySelector("[aria-live]").textContent = this.zoom ? tr("Steps {from} to {to}", { from: steps(start), to: steps(start + width) }) : tr("Whole run");
    this.poll();
  }
  zoomBy(factor, at = this.at) {
    const [from, to] = this.range(), middle = at !== null && at >= from && at <= to ? at : (from + to) / 2;
    this.setZoom(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }
  do_whole() { if (this.zoom) this.setZoom(0, this.last()); }
  do_scale() {
    this.isWhole = !this.isWhole;
    this.querySelector("[data-do=scale]").setAttribute("aria-pressed", this.isWhole);
    this.draw();
  }
  do_in() { this.zoomBy(0.5); }
  do_out() { this.zoomBy(2); }
  async exported(use) {
    const script = await exporting();
    this.isRefused = !script;
    this.say();
    if (script) use(script);
  }
  do_table() {
    return this.exported(({ tableOf }) => {
      const table = this.querySelector(".ftc-table");
      this.tableOf = tableOf;
      table.hidden = !table.hidden;
      this.querySelector("[data-do=table]").setAttribute("aria-pressed", !table.hidden);
      this.fillTable();
    });
  }
  fillTable() {
    const table = this.querySelector(".ftc-table");
    if (this.tableOf) table.innerHTML = table.hidden ? "" : this.tableOf(this.panels, this.runs);
  }
  do_csv() {
    return this.exported(({ csvOf, save }) => save(new Blob([csvOf(this.runs)], { type: "text/csv" }), `${this.runs[0].name}.csv`));
  }
  do_png() {
    return this.exported(({ pictureOf, save }) =>
      pictureOf(this.charts.filter(({ panel }) => !panel.small), (blob) => save(blob, `${this.runs[0].name}.png`)));
  }

  selected(u) {
    const { left, width } = u.select, [axis] = this.axes();
    if (width > 4) this.setZoom(...[left, left + width].map((x) => axis.from(u.posToVal(x, "x"))));
    if (width) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  // The pointer is on one of the plots, or has left it.
  pointed(u) {
    const { left } = u.cursor;
    const step = left >= 0 ? Math.round(this.axes()[0].from(u.posToVal(left, "x"))) : null;
    if (step !== null || document.activeElement !== this.main) this.read(step, u);
  }

  // Shows the values at a step above each plot, the newest ones for null.
  read(at, pointed = null) {
    this.at = at === null ? null : Math.max(0, Math.min(at, Math.max(...this.runs.map((run) => run.step))));
    for (const chart of this.charts) {
      const { u, values, panel, lines } = chart, place = this.at === null ? -10 : u.valToPos(this.axes()[0].to(this.at), "x");
      if (u !== pointed) u.setCursor({ left: place, top: place < 0 ? -10 : 10 }, false, false);
      const readings = this.readings(panel, lines);
      const heading = panel.small ? "h3" : "h2", shape = JSON.stringify(readings.map(([label, , line]) => [label, line?.stroke, line?.dash?.length]));
      if (chart.shape !== shape) { // else only the numbers are others, as with most ticks
        chart.shape = shape;
        values.innerHTML = `<${heading}></${heading}>${readings.map(() => "<span><i></i><em></em> <b></b></span>").join("")}`;
        values.firstChild.textContent = panel.title;
        readings.forEach(([label, , line], n) => {
          const [key, name] = values.children[n + 1].children;
          if (line) Object.assign(key.style, { borderColor: `var(--ft-${line.stroke})`, borderTopStyle: line.dash?.length ? "dashed" : "solid" }); else key.remove();
          name.textContent = label;
        });
      }
      readings.forEach(([, value], n) => {
        const number = values.children[n + 1].lastChild;
        if (number.textContent !== value) number.textContent = value;
      });
      chart.spoken = readings.map(([label, value]) => `${label} ${value}`).join(", ");
      if (panel.small) chart.plot.setAttribute("aria-label", `${panel.title}: ${chart.spoken}`);
    }
    this.speak();
  }

  // What the row above a plot has: [label, value, line].
  readings(panel, lines) {
    const readings = [], isSingle = this.runs.length === 1;
    const nearest = (run, name, at) => run.rows(name).findLast((row) => row.first <= at) ?? run.rows(name)[0];
    if (!panel.small && panel === this.panels[0]) readings.push(this.place(nearest));
    for (const line of lines) {
      const run = this.runs[line.run ?? 0], row = nearest(run, line.name, this.at ?? Infinity);
      if (!row || line.value === "low") continue;
      let value = text(line.value === "smooth" ? this.average(run, line.name, row) : row[line.value] === null ? null : row[line.value] + (line.add || 0), panel.unit);
      if (line.kind === "loss" && line.value === "high" && row.high !== row.low) value = span(text(row.low, panel.unit), value);
      if (line.name === "eval_loss") value = tr("{value} at {step}", { value, step: steps(row.last) });
      readings.push([line.label, value, line]);
    }
    if (!panel.small && isSingle) {
      for (const { label, value, low, high, kind } of panel.levels) {
        readings.push([label, text(value, panel.unit) + (low === undefined ? "" : ` (${span(text(low, panel.unit), text(high, panel.unit))})`), { stroke: kind, dash: low === undefined ? [] : [1] }]);
      }
    }
    return readings;
  }

  average(run, name, row) {
    const rows = run.rows(name);
    return smoothed(rows, this.view.smoothing, run.metrics[name].width)[rows.indexOf(row)];
  }

  // Step, or steps of the bin, with time or epoch where that is the axis.
  place(nearest) {
    const [run] = this.runs, row = nearest(run, "loss", this.at ?? Infinity), step = this.at ?? run.step;
    const last = row && Math.min(row.last, run.step), isBin = row && last > row.first && this.runs.length === 1;
    const name = isBin ? span(steps(row.first), steps(last)) : steps(step), place = this.axes()[0].to(step);
    const more = { time: `, ${duration(place)}`, epoch: `, ${tr("epoch {epoch}", { epoch: place.toFixed(2) })}`, step: "" };
    return [isBin ? tr("steps") : tr("step"), name + more[this.view.axis], null];
  }

  speak() {
    const [from, to] = this.range(), now = this.at ?? this.runs[0].step, large = this.charts.filter(({ panel }) => !panel.small);
    const spoken = large.map(({ panel, spoken: values }) => `${panel.title}: ${values || tr("nothing yet")}`).join(". ");
    const label = this.zoom ? tr("Curves by step, steps {from} to {to}. Arrow keys read values, plus and minus zoom.", { from: steps(from), to: steps(to) })
      : tr("Curves by step. Arrow keys read values, plus and minus zoom.");
    for (const [name, value] of Object.entries({ label, valuemin: 0, valuemax: this.last(), valuenow: Math.round(now), valuetext: spoken })) {
      this.main.setAttribute(`aria-${name}`, value);
    }
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1 }, [from, to] = this.range(), now = Math.max(...this.runs.map((run) => run.step));
    const rows = this.runs[0].rows("loss"), first = rows.findIndex((row) => row.last >= from), at = this.at ?? Infinity;
    if (event.key === "+" || event.key === "=") this.do_in();
    else if (event.key === "-") this.do_out();
    else if (event.key === "Escape") this.read(null);
    else if (event.key === "Home" && rows.length) this.read(rows[Math.max(0, first)].first);
    else if (event.key === "End") this.read(Math.floor(Math.min(to, now)));
    else if (event.key in moves && rows.length) {
      const index = rows.findLastIndex((row) => row.first <= at), move = moves[event.key] * (event.shiftKey ? 25 : 1);
      const row = rows[Math.max(0, Math.min(rows.length - 1, Math.max(0, index) + move))];
      const step = row.first + (row.last > row.first ? Math.floor((Math.min(row.last, now) - row.first) / 2) : 0);
      if (this.zoom && (step < from || step > to)) this.setZoom(step - (to - from) / 2, step + (to - from) / 2);
      this.read(step);
    } else return;
    event.preventDefault();
  }

  // Two fingers zoom around the point between them.
  pinch() {
    let before = null;
    const spread = ({ touches: [a, b] }) => Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
    this.main.addEventListener("touchstart", (event) => { before = event.touches.length === 2 ? spread(event) : null; }, { passive: true });
    this.main.addEventListener("touchmove", (event) => {
      if (!before || event.touches.length !== 2) return;
      event.preventDefault();
      const now = spread(event), box = this.main.getBoundingClientRect(), middle = (event.touches[0].clientX + event.touches[1].clientX) / 2;
      const [from, to] = this.range(), share = Math.min(1, Math.max(0, (middle - box.left - LEFT) / (box.width - LEFT - RIGHT)));
      if (Math.abs(now / before - 1) < 0.05) return;
      this.zoomBy(before / now, from + share * (to - from));
      before = now;
    }, { passive: false });
  }
}
customElements.define("ft-chart", Chart);
