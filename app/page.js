// What the server can't do: set the tab's title, open a run's page when the run that was requested here has started, bring an
// entered number into its range, and load the charts.
import { tr } from "./language.js";

const update = () => {
  const titled = document.querySelector("[data-title]");
  if (titled) {
    const title = `${titled.dataset.title} · finetune`;
    if (document.title !== title) document.title = title;
  }
  const ready = document.querySelector("[data-go]");
  if (ready && !ready.dataset.gone) {
    ready.dataset.gone = "1";
    if (ready.dataset.go === "/" || ready.dataset.go.startsWith("/run?run=")) window.location.assign(ready.dataset.go);
  }
  if (document.querySelector("ft-chart:not(:defined)")) import("./chart.js");
  const theme = document.querySelector("[data-theme-choice]:not([data-set])");
  if (theme) Object.assign(theme, { value: localStorage.getItem("ft-theme") ?? "" }).dataset.set = "1";
};

// An entered number that its box refuses becomes the nearest one that it takes; an empty box keeps the last one.
const numbers = new WeakMap();
const isNumber = (target) => target.matches('input[type="number"]:not([data-set])') && target.min !== "";
document.addEventListener("focusin", ({ target }) => {
  if (isNumber(target)) numbers.set(target, target.value);
});
document.addEventListener("change", ({ target }) => {
  if (!isNumber(target)) return;
  const [typed, min] = [target.value, Number(target.min)];
  const max = target.max === "" ? Infinity : Number(target.max);
  const whole = Number.isInteger(Number(target.step || 1)) && target.step !== "" && target.step !== "any";
  let value = typed === "" ? Number(numbers.get(target) || min) : Math.min(Math.max(Number(typed), min), max);
  if (whole) value = Math.round(value);
  const box = target.closest(".block");
  box.querySelector(".ft-range")?.remove();
  if (typed === "" || value !== Number(typed)) {
    const range = max === Infinity ? tr("{min} or more", { min }) : tr("{min} to {max}", { min, max });
    const note = document.createElement("p");
    note.className = "ft-range";
    note.setAttribute("role", "status");
    note.textContent = tr("{typed}: {value} is used ({range}).",
      { typed: typed || tr("Empty"), value, range: whole ? `${range}${tr(", whole numbers")}` : range });
    box.append(note);
    target.value = value;
    target.dispatchEvent(new Event("input", { bubbles: true }));
  }
  numbers.set(target, target.value);
}, true);
new MutationObserver(update).observe(document.documentElement, { childList: true, subtree: true, characterData: true });
update();

// The list of a dropdown scrolls, so it would be a stop of the keyboard, and is gone once it has the focus.
document.addEventListener("keydown", ({ key, target }) => {
  if (key === "Tab" && target.role === "combobox") document.getElementById(target.getAttribute("aria-controls"))?.setAttribute("tabindex", "-1");
}, true);

// A link inside a page moves the focus; followed, it would open Home, of which the page's <base> makes its address.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#']"), linked = link?.hash && document.querySelector(link.hash);
  if (!linked) return;
  event.preventDefault();
  Object.assign(linked, { tabIndex: -1 }).focus();
});

// Light or dark: the system's, until a person chooses here.
const applyTheme = () => {
  const chosen = localStorage.getItem("ft-theme");
  if (chosen && document.body.classList.contains("dark") !== (chosen === "dark")) document.body.classList.toggle("dark", chosen === "dark");
};
document.addEventListener("click", ({ target }) => {
  if (!target.closest?.("[data-theme-switch]")) return;
  localStorage.setItem("ft-theme", document.body.classList.contains("dark") ? "light" : "dark");
  applyTheme();
});
document.addEventListener("change", ({ target }) => {
  if (!target.matches?.("[data-theme-choice]")) return;
  if (target.value) localStorage.setItem("ft-theme", target.value); else localStorage.removeItem("ft-theme");
  const dark = target.value ? target.value === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.body.classList.toggle("dark", dark);
});
new MutationObserver(applyTheme).observe(document.body, { attributeFilter: ["class"] });
applyTheme();
