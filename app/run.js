// A run's page: the open tab, the parts of it that change while it is open, and how old they are.
import { tr } from "./language.js";

const TICK_MS = 1000, IDLE_MS = 5000, SILENT_S = 5;
const live = () => document.querySelector("#run-live");
const parts = () => [...document.querySelectorAll("#run-head [data-part], #run-body [data-part]")];
let answered = Date.now(), alive = true, timer = 0;

// Asks once a second for the parts of the tab whose checksum is another one.
const ask = async () => {
  clearTimeout(timer);
  if (live() && !document.hidden) {
    const shown = parts().map(({ dataset }) => dataset.stamp).filter(Boolean).join(".");
    const response = await fetch(`/ft/run/${encodeURIComponent(live().dataset.run)}?${new URLSearchParams({ tab: document.body.dataset.tab, shown })}`).catch(() => null);
    if (response?.ok) take(await response.json());
  }
  timer = setTimeout(ask, alive ? TICK_MS : IDLE_MS);
};
const take = (answer) => {
  [answered, alive] = [Date.now(), answer.alive];
  for (const part of parts()) {
    const news = answer.parts[part.dataset.part];
    if (!news) continue;
    const focus = part.contains(document.activeElement) ? document.activeElement.dataset.key : "";
    const folded = [...part.querySelectorAll("details")].map(({ open }) => open), scrolled = part.querySelector(".ft-log")?.scrollTop;
    [part.dataset.stamp, part.innerHTML] = news;
    part.querySelectorAll("details").forEach((details, n) => { details.open = folded[n] ?? details.open; });
    if (scrolled) part.querySelector(".ft-log").scrollTop = scrolled;
    if (focus) part.querySelector(`[data-key="${focus}"]`)?.focus({ preventScroll: true });
  }
  silence();
};

// How long there was no answer: the head is dimmed, and nothing is covered.
const silence = () => {
  const note = document.querySelector("#run-lost"), silent_s = Math.round((Date.now() - answered) / 1000);
  const isLost = silent_s > (alive ? SILENT_S : SILENT_S + IDLE_MS / 1000) && !document.hidden;
  document.body.toggleAttribute("data-lost", isLost && Boolean(note));
  if (!note) return;
  note.hidden = !isLost;
  note.textContent = isLost ? tr("No answer from the page's server for {s} s: what you see is as of then. The run itself goes on.", { s: silent_s }) : "";
};
setInterval(silence, 1000);
document.addEventListener("visibilitychange", () => {
  answered = Date.now();
  if (!document.hidden) ask();
});

// Tabs: the address has the open one; the server is told, for the tabs with controls.
const open = (tab) => {
  document.body.dataset.tab = tab;
  for (const link of document.querySelectorAll(".ft-tabs a")) {
    if (link.dataset.tab === tab) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const box = document.querySelector("#run-tab :is(textarea, input)");
  if (box && box.value !== tab) {
    box.value = tab;
    box.dispatchEvent(new Event("input", { bubbles: true }));
  }
  ask();
};
document.addEventListener("click", (event) => {
  if (event.target.closest?.(".ft-act")) setTimeout(ask, 400);
  const link = event.target.closest?.("a[data-tab]");
  if (!link || !live() || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  const { tab } = link.dataset;
  if (tab !== document.body.dataset.tab) history.pushState(null, "", `/run?${new URLSearchParams({ run: live().dataset.run, tab })}`);
  open(tab);
  if (!link.closest(".ft-tabs")) document.querySelector(`.ft-tabs [data-tab="${tab}"]`)?.focus();
});
addEventListener("popstate", () => { if (live()) open(new URLSearchParams(location.search).get("tab") || "overview"); });

// When the head has arrived: the tab that the server has chosen.
const started = new MutationObserver(() => {
  if (!live()) return;
  started.disconnect();
  document.body.dataset.tab = live().dataset.tab;
  answered = Date.now();
  ask();
});
if (location.pathname.startsWith("/run") && !location.pathname.startsWith("/runs")) started.observe(document.documentElement, { childList: true, subtree: true });
