// The Fit page: which phase and part are shown, its messages to the server, what it answers, and the drawer.
// An answer replaces HTML, so what a person chose here is applied anew.
import { tr } from "./language.js";
import { messageBox, sendBy, write as writeBox } from "./message.js";

const state = { phase: "train", part: "", page: Math.random().toString(36).slice(2), sent: 0, waiting: [], basis: "" };
// What the server has said: to the last message, the draft, the plan's numbers and how to start; and the stamps of the draft, of
// the one whose plan is shown, and of those before.
const fit = { acted: null, draft: null, plan: null, asked: "", answered: "", stamps: new Set() };
// A message that is not acknowledged after this long is sent again.
const RESENT_MS = 3000;
const isFit = () => Boolean(document.querySelector("#fit-answered"));
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

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
};

// A message goes to the handler of its text box without Gradio's page, and has those before it that are not acknowledged yet; of
// those for one control the last is enough.
const controlOf = ({ set, auto, field, basis }) => set ?? auto ?? field ?? (basis === undefined ? "" : "text");
const send = (message) => {
  const last = state.waiting.at(-1);
  if (last && controlOf(message) && controlOf(last) === controlOf(message)) state.waiting.pop();
  state.sent += 1;
  state.waiting.push({ ...message, sent: state.sent });
  const box = messageBox();
  if (box) write(box, messages());
  fill();
  post();
};
sendBy(send);
const messages = () => JSON.stringify({ ...state.waiting.at(-1), page: state.page, earlier: state.waiting.slice(0, -1), tick: performance.now() });
const request = (options) => {
  const { components, dependencies } = window.gradio_config;
  const { id } = components.find(({ props }) => props.elem_id === "fit-act");
  const handler = dependencies.find(({ targets }) => targets.some(([target, event]) => target === id && event === "submit"));
  const body = JSON.stringify({ data: [messages()], fn_index: handler.id });
  return fetch("/gradio_api/run/predict", { method: "POST", headers: { "content-type": "application/json" }, body, ...options });
};
const post = async () => {
  if (state.isPosting) return;
  state.isPosting = true;
  for (; state.waiting.length; fill()) {
    try {
      const response = await request({ signal: AbortSignal.timeout(RESENT_MS) });
      acknowledge(JSON.parse((await response.json()).data[0]));
    } catch { await pause(RESENT_MS); }
  }
  state.isPosting = false;
};
// What still waits when the page is left, or when Gradio loads it again because its server is back; and a field that is being
// typed in, which a browser does not call changed then.
addEventListener("pagehide", () => {
  document.querySelector("[data-typed]")?.dispatchEvent(new Event("change", { bubbles: true }));
  if (state.waiting.length) request({ keepalive: true }).catch(() => {});
});
const acknowledge = (answer) => {
  fit.acted = answer;
  state.waiting = state.waiting.filter(({ sent }) => sent > answer.sent);
  if (answer.refused !== undefined) show({ refused: answer.refused });
  if (!state.waiting.length) takeDraft(answer);
};

// What the server answers about the draft. A plan that is no longer the draft's is asked for again, and the newest question wins.
const show = (parts) => {
  for (const [name, html] of Object.entries(parts)) {
    const part = document.querySelector(`#fit-${name} [data-part]`);
    if (part && part.shown !== html) [part.shown, part.innerHTML] = [html, html];
  }
};
const answerTo = async (question, signal) => {
  try {
    const response = await fetch(`/ft/fit/${question}`, { signal });
    return response.ok ? await response.json() : null;
  } catch { return null; }
};
const takeDraft = (draft) => {
  if (draft && (fit.draft?.read ?? 0) < draft.read) {
    fit.draft = draft;
    takeStamp(draft.stamp);
  }
  fill();
};
const takeStamp = (stamp) => {
  if (fit.stamps.has(stamp)) return;
  fit.stamps.add(stamp);
  fit.asked = stamp;
  askForPlan();
};
const askForPlan = async () => {
  fit.asking?.abort();
  const asking = fit.asking = new AbortController();
  let answer = null;
  while (!(answer = await answerTo("plan", asking.signal))) {
    if (asking.signal.aborted) return;
    await pause(1000);
  }
  if (asking.signal.aborted) return;
  fit.stamps.add(answer.stamp);
  [fit.plan, fit.asked, fit.answered] = [answer, answer.stamp, answer.stamp];
  show(answer.parts);
  fill();
  if (fit.draft?.stamp !== answer.stamp) takeDraft(await answerTo("draft"));
  const compared = answer.planned ? await answerTo("compared", asking.signal) : null;
  if (compared?.stamp === fit.answered) show(compared.parts);
};
// What Gradio's controls and its timer bring: the draft's stamp, why a change was refused, and what the planner does.
const askForBoth = async (stamp) => {
  takeStamp(stamp);
  takeDraft(await answerTo("draft"));
};
const notice = () => {
  if (!fit.asking) askForBoth("");
  const text = document.querySelector("#fit-stamp [data-json]")?.dataset.json;
  if (text && fit.noticed !== text) {
    fit.noticed = text;
    const { stamp, refused, doing } = JSON.parse(text);
    document.querySelector("#fit-planning span").textContent = doing ?? "";
    if (refused !== undefined) show({ refused });
    if (!fit.stamps.has(stamp)) askForBoth(stamp);
  }
};
const write = (box, text) => {
  state.writing = true;
  writeBox(box, text);
  state.writing = false;
};

// The controls that are this script's show the draft: numbers, recipe, and the fields of Advanced, a form that is fetched when it
// is opened. While a message waits, an answer may be older than it, and then nothing is written; nor is what is being used.
const controls = () => document.querySelectorAll('[class*="ft-own-"] :is(input[type=number], textarea:not(#fit-command *)), [data-field]');
const nameOf = (control) => control.dataset.field ?? control.closest?.('[class*="ft-own-"]')?.className.match(/ft-own-(\w+)/)[1];
const isUsed = (control) => control === document.activeElement && document.hasFocus();
const fill = () => {
  if (!isFit()) return;
  const { acted, draft, plan } = fit, start = document.querySelector("#fit-start");
  for (const name of ["asked", "answered"]) {
    const shown = document.querySelector(`#fit-${name}`);
    if (shown.textContent !== fit[name]) shown.textContent = fit[name];
  }
  document.body.toggleAttribute("data-unsaved", state.waiting.length > 0);
  document.body.toggleAttribute("data-planning", state.waiting.length > 0 || !fit.answered || fit.asked !== fit.answered);
  document.body.toggleAttribute("data-too-big", Boolean(plan?.too_big));
  if (start) start.disabled = !plan?.start;
  const command = document.querySelector("#fit-command textarea");
  if (plan && command && command.value !== plan.command) write(command, plan.command);
  if (!draft || state.waiting.length) return;
  const numbers = { ...(plan?.stamp === draft.stamp ? plan.numbers : {}), ...draft.numbers };
  const isRefused = acted?.text_refused && state.basis !== draft.stamp;
  for (const control of controls()) {
    const name = nameOf(control);
    if (isUsed(control) && !(name === "text" && isRefused)) continue;
    const text = control.dataset.field ? draft.values[name] ?? control.dataset.usual : name === "text" ? draft.text : numbers[name];
    if (name === "text") state.basis = draft.stamp;
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
  if (!target.dataset.field) return;
  delete target.dataset.typed;
  if (target.dataset.sent === target.value) return;
  target.dataset.sent = target.value;
  send({ field: target.dataset.field, text: target.value });
});
document.addEventListener("input", ({ target }) => {
  delete target.dataset.sent;
  if (target.dataset.field && !state.writing) target.dataset.typed = "";
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

document.addEventListener("click", ({ target }) => {
  const element = target.closest?.("[data-phase-button], [data-part-button], [data-drawer]");
  if (!element) return;
  const { phaseButton, partButton } = element.dataset;
  if (phaseButton) state.phase = phaseButton;
  else if (partButton) state.part = state.part === partButton ? "" : partButton;
  else drawer(!document.body.hasAttribute("data-drawer-open"));
  apply();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches?.("textarea[data-field]")) {
    event.preventDefault();
    event.target.dispatchEvent(new Event("change", { bubbles: true }));
  }
  if (event.key === "Escape" && document.body.hasAttribute("data-drawer-open")) drawer(false);
});
new MutationObserver(() => { apply(); fill(); if (isFit()) notice(); }).observe(document.documentElement, { childList: true, subtree: true, characterData: true });
