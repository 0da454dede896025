// What <ft-chart> makes of its points when it is asked to: the table, and the files with the points and the picture.
import { steps, text } from "./chart_data.js";
import { RIGHT, colour } from "./chart_lines.js";
import { tr } from "./language.js";

const MOST_ROWS = 12;
const escaped = (value) => String(value).replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

// The large panels' values at evenly spaced steps.
export function tableOf(panels, runs) {
  const columns = panels.filter((panel) => !panel.small).flatMap((panel) => panel.lines.map((line) => ({ ...line, panel, run: runs[line.run ?? 0] })));
  const rows = runs.reduce((longest, run) => (run.rows("loss").length > longest.length ? run.rows("loss") : longest), []);
  const chosen = rows.filter((row, n) => n % Math.max(1, Math.floor(rows.length / MOST_ROWS)) === 0 || n === rows.length - 1);
  const cell = ({ name, run, panel, add }, { first, last }) => {
    const bin = run.rows(name).findLast((row) => row.first <= last && row.last >= first);
    return bin ? text(bin.mean === null ? null : bin.mean + (add || 0), panel.unit) : "–";
  };
  const head = columns.map(({ label, panel }) => `<th scope="col" class="right">${escaped(`${panel.title}: ${label}`)}</th>`).join("");
  const body = chosen.map((row) => `<tr><td class="right">${steps(row.first)}${row.last > row.first ? `–${steps(row.last)}` : ""}</td>${
    columns.map((column) => `<td class="right">${escaped(cell(column, row))}</td>`).join("")}</tr>`).join("");
  return `<div class="ft-scroll" role="region" aria-label="${tr("Curves as a table")}" tabindex="0"><table><thead><tr><th scope="col" class="right">${tr("step")}</th>${
    head}</tr></thead><tbody>${body}</tbody></table></div>`;
}

// Every bin of every metric, as CSV; memory is in GiB.
export function csvOf(runs) {
  const lines = ["run,metric,first_step,last_step,mean,lowest,highest,not_a_number"];
  const cell = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
  for (const run of runs) {
    for (const name of Object.keys(run.metrics)) {
      for (const { first, last, mean, low, high, gaps } of run.rows(name)) {
        lines.push([run.name, name, first, Math.min(last, Math.max(run.step, first)), mean, low, high, gaps].map(cell).join(","));
      }
    }
  }
  return `${lines.join("\n")}\n`;
}

// The plots below each other with the values above them, as PNG.
export function pictureOf(charts, done) {
  const scale = devicePixelRatio, row = 26 * scale, canvases = charts.map(({ u }) => u.ctx.canvas), picture = document.createElement("canvas");
  picture.width = Math.max(...canvases.map((canvas) => canvas.width));
  picture.height = canvases.reduce((height, canvas) => height + canvas.height + row, 0);
  const context = picture.getContext("2d");
  context.fillStyle = colour("ground");
  context.fillRect(0, 0, picture.width, picture.height);
  context.fillStyle = colour("text");
  let top = 0;
  charts.forEach(({ panel, spoken }, n) => {
    context.font = `600 ${13 * scale}px Inter, system-ui, sans-serif`;
    context.fillText(panel.title, 8 * scale, top + 18 * scale);
    const after = context.measureText(panel.title).width + 24 * scale;
    context.font = `400 ${12 * scale}px Inter, system-ui, sans-serif`;
    context.fillText(spoken, after, top + 18 * scale, picture.width - after - RIGHT * scale);
    context.drawImage(canvases[n], 0, top + row);
    top += row + canvases[n].height;
  });
  picture.toBlob(done);
}

export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
