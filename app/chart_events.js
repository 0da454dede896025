// The strip of events below the plots of <ft-chart>.
import { steps } from "./chart_data.js";
import { tr } from "./language.js";

// The kinds of events by their names in the run's marks, the one that matters most first, which is drawn where several are at
// one step: how it looks, and what it is called.
const KINDS = new Map([["retry", ["retry", tr("retry")]], ["gap", ["gap", tr("not a number")]], ["resume", ["resume", tr("resume")]],
  ["best", ["best", tr("best so far")]], ["evaluation", ["dot", tr("evaluation")]], ["save", ["dot", tr("checkpoint")]],
  ["first step", ["first", tr("first step")]]]);
const kindOf = (names) => [...KINDS].find(([name]) => names.has(name))?.[1] ?? ["first", ""];
const inWords = (names) => [...names].map((name) => KINDS.get(name)?.[1] ?? name).join(", ");

// Events by step: name of each.
function eventsBySteps(run) {
  const events = new Map(), add = (step, name) => events.set(step, new Set([...(events.get(step) ?? []), name]));
  for (const [name, step] of run.marks) add(step, name);
  for (const row of run.rows("loss")) if (row.gaps) add(row.first, "gap");
  const best = run.rows("eval_loss").reduce((a, b) => (b.mean !== null && (a === null || b.mean < a.mean) ? b : a), null);
  if (best) add(best.last, "best");
  return [...events].sort(([a], [b]) => a - b);
}

// Fills the strip with the events between two steps; the newest of those that would be drawn over each other.
export function eventsOf(strip, run, from, to) {
  const events = eventsBySteps(run).filter(([step]) => step >= from && step <= to), width = (to - from) || 1;
  const key = JSON.stringify([from, to, events.map(([step, names]) => [step, ...names])]);
  if (strip.key === key) return; // nothing new, as with most ticks
  strip.key = key;
  const nearest = new Map(events.map((event) => [`${kindOf(event[1])[0]} ${Math.round((event[0] - from) / width * 120)}`, event]));
  const used = new Map();
  strip.innerHTML = '<div role="img"></div><ul></ul>';
  const [line, legend] = strip.children;
  for (const [step, names] of nearest.values()) {
    const [css, name] = kindOf(names), mark = document.createElement("i");
    mark.className = css;
    mark.style.left = `${(100 * (step - from)) / width}%`;
    mark.title = tr("Step {step}: {events}", { step: steps(step), events: inWords(names) });
    line.append(mark);
    used.set(css === "dot" ? tr("checkpoint, evaluation") : name, css);
  }
  const newest = events.slice(-8).map(([step, names]) => tr("{value} at step {step}", { value: inWords(names), step: steps(step) }));
  line.setAttribute("aria-label", newest.length ? tr("Events: {events}", { events: newest.join("; ") }) : tr("No events"));
  for (const [name, css] of used) {
    const item = document.createElement("li"), mark = document.createElement("i");
    mark.className = css;
    item.append(mark, name);
    legend.append(item);
  }
}
