// The Fit page: which phase and part are shown, its buttons' messages to the server, the drawer, and focus across answers.
// Gradio replaces the HTML of an answer, so what a person chose here is applied anew and a replaced control has the focus again.
import { tr } from "./language.js";

const state = { phase: "train", part: "", focus: "", page: Math.random().toString(36).slice(2), sent: 0, waiting: [], basis: "" };
// A message that is not acknowledged after this long is sent again.
const RESENT_MS = 3000;

const apply = () => {
  for (const panel of document.querySelectorAll(".ft-phase")) panel.hidden = panel.dataset.phase !== state.phase;
  for (const button of document.querySelectorAll("[data-phase-button]")) button.setAttribute("aria-pressed", button.dataset.phaseButton === state.phase);
  for (const panel of document.querySelectorAll(".ft-phase")) {
    const explained = panel.querySelector(`.ft-why[data-why="${state.part}"]`) ? state.part : "";
    for (const text of panel.querySelectorAll(".ft-why")) text.hidden = text.dataset.why !== explained;
    for (const part of panel.querySelectorAll("[data-part-button]")) {
      const chosen = explained !== "" && part.dataset.partButton === explained;
      if (part.matches("button")) part.setAttribute("aria-pressed", chosen);
      else part.classList.toggle("on", chosen);
    }
  }
  if (state.focus && document.activeElement === document.body) document.querySelector(`[data-key="${state.focus}"]`)?.focus({ preventScroll: true });
};

// A message to the page's server: its text box is the one whose name ends so. Gradio may report the last of several quick ones
// only, so each has those before it that Fit's server has not acknowledged; of those for one control the last is enough.
const values = (name) => JSON.parse(document.querySelector(`#fit-${name} [data-json]`)?.dataset.json ?? "null");
const controlOf = ({ set, auto, field, basis }) => set ?? auto ?? field ?? (basis === undefined ? "" : "text");
export const send = (message) => {
  const isFit = document.querySelector("#fit-acted"), last = state.waiting.at(-1);
  if (last && controlOf(message) && controlOf(last) === controlOf(message)) state.waiting.pop();
  state.sent += 1;
  state.waiting = [...(isFit ? state.waiting : []), { ...message, sent: state.sent }];
  submit();
};
const submit = () => {
  const box = document.querySelector('[id$="-act"] :is(textarea, input)'), last = state.waiting.at(-1);
  clearTimeout(state.timer);
  if (!box || !last) return;
  write(box, JSON.stringify({ ...last, page: state.page, earlier: state.waiting.slice(0, -1), tick: performance.now() }));
  if (document.querySelector("#fit-acted")) state.timer = setTimeout(submit, RESENT_MS);
  fill();
};
// Gradio is told what its box has, or it would copy or send what it had before.
const write = (box, text) => {
  state.writing = true;
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
  state.writing = false;
};

// The controls that are this script's show the draft: numbers, recipe, and the fields of Advanced, a form that is fetched when it
// is opened. While a message waits, an answer may be older than it, and then nothing is written; nor is what is being used.
const controls = () => document.querySelectorAll('[class*="ft-own-"] :is(input[type=number], textarea), [data-field]');
const nameOf = (control) => control.dataset.field ?? control.closest?.('[class*="ft-own-"]')?.className.match(/ft-own-(\w+)/)[1];
const isUsed = (control) => control === document.activeElement && document.hasFocus();
const fill = () => {
  const [asked, answered] = ["asked", "answered"].map((name) => document.querySelector(`#fit-${name}`)?.textContent.trim());
  if (asked === undefined) return;
  const acted = values("acted"), drafted = values("drafted"), planned = values("planned");
  state.waiting = state.waiting.filter(({ sent }) => sent > (acted?.sent ?? 0));
  if (!state.waiting.length) clearTimeout(state.timer);
  document.body.toggleAttribute("data-unsaved", state.waiting.length > 0);
  document.body.toggleAttribute("data-planning", state.waiting.length > 0 || asked === "" || asked !== answered);
  if (!drafted || state.waiting.length || (acted && drafted.read < acted.read && drafted.stamp !== acted.stamp)) return;
  const numbers = { ...(planned?.stamp === drafted.stamp ? planned.numbers : {}), ...drafted.numbers };
  const isRefused = acted?.refused && state.basis !== drafted.stamp;
  for (const control of controls()) {
    const name = nameOf(control);
    if (isUsed(control) && !(name === "text" && isRefused)) continue;
    const text = control.dataset.field ? drafted.values[name] ?? control.dataset.usual : name === "text" ? drafted.text : numbers[name];
    if (name === "text") state.basis = drafted.stamp;
    if (text !== undefined && control.value !== String(text)) write(control, text);
  }
};
document.addEventListener("toggle", async ({ target }) => {
  const form = target.id === "fit-advanced" && target.open && document.querySelector("#fit-fields:not(:has([data-field]))");
  if (!form) return;
  const response = await fetch("/ft/fields.html").catch(() => null);
  if (!response?.ok) { form.textContent = tr("The page's server does not answer: close this and open it again."); return; }
  form.innerHTML = await response.text();
  for (const field of document.querySelectorAll("[data-field]")) field.dataset.usual = field.value;
  fill();
}, true);
document.addEventListener("change", ({ target }) => {
  // A field that Enter has sent changes once more for the browser when it is left, perhaps after another tab's edit.
  if (!target.dataset.field || target.dataset.sent === target.value) return;
  target.dataset.sent = target.value;
  send({ field: target.dataset.field, text: target.value });
});
document.addEventListener("input", ({ target }) => {
  delete target.dataset.sent;
  if (state.writing || target.dataset.field || !target.matches("input[type=number], textarea")) return;
  const name = nameOf(target);
  if (name === "text") send({ text: target.value, basis: state.basis });
  else if (name && target.value !== "") send({ set: name, value: Number(target.value) });
}, true);
document.addEventListener("focusout", () => setTimeout(fill));

const drawer = (open) => {
  document.body.toggleAttribute("data-drawer-open", open);
  document.querySelector("[data-drawer][aria-expanded]")?.setAttribute("aria-expanded", open);
  document.querySelector(open ? "#fit-drawer [data-drawer]" : "#fit-go [data-drawer]")?.focus();
};

document.addEventListener("focusin", ({ target }) => { state.focus = target.dataset?.key ?? ""; });
document.addEventListener("click", ({ target }) => {
  const element = target.closest?.("[data-phase-button], [data-part-button], [data-act], [data-drawer]");
  if (!element) return;
  const { phaseButton, partButton, act } = element.dataset;
  if (phaseButton) state.phase = phaseButton;
  else if (partButton) state.part = state.part === partButton ? "" : partButton;
  else if (act) {
    for (const bar of element.role === "radio" ? element.parentNode.children : []) {
      bar.setAttribute("aria-checked", bar === element);
      bar.tabIndex = bar === element ? 0 : -1;
    }
    send(JSON.parse(act));
  } else drawer(!document.body.hasAttribute("data-drawer-open"));
  apply();
});
// Under the bars: what the one under the pointer or with the focus would change.
const tell = ({ target }) => {
  for (const said of document.querySelectorAll("[data-said]")) {
    const bar = target.closest?.('.ft-bars [role="radio"]');
    const own = bar && said.closest(".ft-knob")?.contains(bar);
    said.textContent = own ? bar.getAttribute("aria-label") : said.dataset.said;
  }
};
document.addEventListener("mouseover", tell);
document.addEventListener("focusin", tell);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches?.("textarea[data-field]")) {
    event.preventDefault();
    event.target.dispatchEvent(new Event("change", { bubbles: true }));
  }
  if (event.key === "Escape" && document.body.hasAttribute("data-drawer-open")) drawer(false);
  if (!event.target.matches?.('.ft-bars [role="radio"]')) return;
  const bars = [...event.target.parentNode.children];
  const now = bars.indexOf(event.target);
  const next = { ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1, Home: 0, End: bars.length - 1 }[event.key];
  if (next === undefined || !bars[next]) return;
  event.preventDefault();
  bars[next].focus();
  bars[next].click();
});
new MutationObserver(() => { apply(); fill(); }).observe(document.documentElement, { childList: true, subtree: true, characterData: true });
