// The Fit page: which phase and part are shown, its buttons' messages to the server, the drawer, and focus across answers.
// Gradio replaces the HTML of an answer, so what a person chose here is applied anew and a replaced control has the focus again.
const state = { phase: "train", part: "", focus: "", page: Math.random().toString(36).slice(2), sent: [], values: "" };

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
// only, so each has those before it, with their numbers.
export const send = (message) => {
  const box = document.querySelector('[id$="-act"] :is(textarea, input)');
  if (!box) return;
  const last = { ...message, sent: (state.sent.at(-1)?.sent ?? 0) + 1 };
  box.value = JSON.stringify({ ...last, page: state.page, earlier: state.sent });
  state.sent = [...state.sent, last].slice(-20);
  box.dispatchEvent(new Event("input", { bubbles: true }));
};

// Advanced: the form is fetched when it is opened. Its fields show the draft, but for the one that is being used.
const fill = () => {
  const text = document.querySelector("#fit-values [data-values]")?.dataset.values, fields = document.querySelectorAll("[data-field]");
  if (!text || !fields.length || text === state.values) return;
  const values = JSON.parse(text), used = [...fields].find((field) => field === document.activeElement);
  for (const field of fields) if (field !== used) field.value = values[field.dataset.field] ?? field.dataset.usual;
  if (!used) state.values = text;
};
document.addEventListener("toggle", async ({ target }) => {
  const form = target.id === "fit-advanced" && target.open && document.querySelector("#fit-fields:empty");
  if (!form) return;
  const response = await fetch("/ft/fields.html").catch(() => null);
  if (!response?.ok) { form.textContent = "The page's server does not answer: close this and open it again."; return; }
  form.innerHTML = await response.text();
  for (const field of document.querySelectorAll("[data-field]")) field.dataset.usual = field.value;
  fill();
}, true);
document.addEventListener("change", ({ target }) => {
  if (target.dataset.field) send({ field: target.dataset.field, text: target.value });
});
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
